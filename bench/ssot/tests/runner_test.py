# SPDX-License-Identifier: Apache-2.0
"""The runner believes nothing that it did not see: loading, exits, self-checks, environment.

Needs: //bench:launch, the workloads and libplanted.so, as run_test.sh provides them.
"""

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable
from unittest import mock

from rich.console import Console

from bench.ssot import (
    allocators, cli, details, gate, machine, places, registry, results, runner, sweep, terminal,
)
from bench.ssot.allocators import PEER, SUBJECT
from bench.ssot.errors import UserError

PLANTED = places.built("bench/libplanted.so").resolve()
TINY = replace(
    registry.by_name("tiny"),
    sizes={s: "iters=3000000 ws=400 min=16 max=256" for s in ("quick", "default", "full")},
    program="random_mixed",
    floor="",
)


def planted(name: str = "planted", role: str = SUBJECT, **faults: int) -> allocators.Allocator:
    """libplanted.so with the faults given in PLANTED_ variables."""
    env = {f"PLANTED_{k}": str(v) for k, v in faults.items()}
    return allocators.load(name, PLANTED, role, env)


def heed_interrupts(test: unittest.TestCase) -> None:
    """Ctrl-C raises KeyboardInterrupt, even where the test is a background job that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    test.addCleanup(signal.signal, signal.SIGINT, before)


class Trust(unittest.TestCase):
    def run_tiny(self, allocator: allocators.Allocator) -> runner.Sample:
        return runner.run_case(TINY, TINY.args("quick"), allocator, 1)

    def test_a_good_library_is_believed(self):
        sample = self.run_tiny(planted())
        self.assertEqual(sample.error, "")
        self.assertGreater(sample.metrics["ops/s"], 1e4)

    def test_a_library_that_ld_so_ignores_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "libforeign.so"
            data = bytearray(PLANTED.read_bytes())
            data[18] ^= 0xFF  # e_machine: a library of another processor
            copy.write_bytes(data)
            sample = self.run_tiny(allocators.Allocator("x", SUBJECT, str(copy)))
        self.assertIn("the preload did not take effect", sample.error)

    def test_a_library_that_is_not_preloaded_is_refused(self):
        class Silent(allocators.Allocator):
            def child_env(self):
                return {}

        sample = self.run_tiny(Silent("x", SUBJECT, str(PLANTED)))
        self.assertIn("the preload did not take effect", sample.error)

    def test_a_child_killed_in_the_middle_is_a_failure(self):
        sample = self.run_tiny(planted(KILL=30))
        self.assertEqual(sample.error, f"killed by signal {int(signal.SIGKILL)}")

    def test_an_exit_status_is_a_failure(self):
        self.assertIn("exit status 7", self.run_tiny(planted(EXIT=7)).error)

    def test_a_missing_result_line_is_a_failure(self):
        case = replace(TINY, metric="no/s")
        sample = runner.run_case(case, case.args("quick"), allocators.system(), 1)
        self.assertIn("no 'no/s='", sample.error)

    def test_too_many_fallbacks_are_refused(self):
        case = registry.by_name("mt_remote/t2/r90/guard")
        args = "threads=2 iters=200000 ws=400 min=16 max=64 remote_pct=90 ring_slots=2".split()
        sample = runner.run_case(case, args, allocators.system(), 1)
        self.assertIn("raise ring_slots", sample.error)

    def test_a_run_without_end_is_ended(self):
        _, _, _, error = runner.launch(["/bin/sleep", "60"], allocators.system(), timeout_s=0.3)
        self.assertEqual(error, "no end after 0 s")

    def test_an_interrupt_is_not_lost_when_the_child_ends_at_once(self):
        heed_interrupts(self)
        signals = ["/bin/sh", "-c", f"sleep 0.1; kill -INT {os.getpid()}"]
        with self.assertRaises(KeyboardInterrupt):
            runner.launch(signals, allocators.system())

    @unittest.skipUnless(shutil.which("redis-server"), "install the package redis-server")
    def test_an_interrupted_load_leaves_no_server_behind(self):
        heed_interrupts(self)
        run, threads = subprocess.run, threading.active_count()

        def interrupted(command: list[str], **options):
            if command[0] == "redis-benchmark":
                os.kill(os.getpid(), signal.SIGINT)
            return run(command, **options)

        with mock.patch.object(subprocess, "run", interrupted), self.assertRaises(KeyboardInterrupt):
            runner.run_case(registry.by_name("real/redis"), ["1000"], allocators.system(), 1)
        self.assertEqual(threading.active_count(), threads)

    @unittest.skipUnless(shutil.which("redis-server"), "install the package redis-server")
    def test_a_server_that_cannot_be_started_says_why(self):
        with (mock.patch.object(runner, "launch", side_effect=UserError("bench/launch is not built")),
              self.assertRaisesRegex(UserError, "bench/launch is not built")):
            runner.run_case(registry.by_name("real/redis"), ["1000"], allocators.system(), 1)

    def test_a_library_without_malloc_is_refused(self):
        libc_part = Path("/proc/self/maps").read_text().split()
        libm = next(w for w in libc_part if "/libm.so" in w or "/libm-" in w or "/libz.so" in w)
        with self.assertRaisesRegex(UserError, "does not define malloc"):
            allocators.load("x", libm, SUBJECT)


class Child(unittest.TestCase):
    def test_environment_is_exactly_what_is_meant(self):
        os.environ["SSOT_LEAK"] = "1"
        for allocator in (allocators.system(), planted(SPIN=0)):
            output, _, _, error = runner.launch(["/usr/bin/env"], allocator)
            self.assertEqual(error, "")
            seen = dict(line.split("=", 1) for line in output.splitlines())
            self.assertEqual(seen, {**allocators.BASE_ENV, **allocator.child_env()})

    def test_peak_memory_is_the_childs_and_not_the_tools(self):
        _, account, _, _ = runner.launch(["/bin/true"], allocators.system())
        self.assertLess(account["peak_rss_kib"], 8 * 1024)
        self.assertGreater(account["minor_faults"], 0)

    def test_resident_size_is_sampled_over_time(self):
        _, _, trace, _ = runner.launch(["/bin/sleep", "0.3"], allocators.system(), sample_ms=20)
        self.assertGreater(len(trace), 5)
        self.assertGreater(max(kib for _, kib in trace), 100)

    def launched(self, script: str, timeout_s: float) -> tuple[list, str]:
        """(trace, error) by a launcher that is only this script."""
        with tempfile.TemporaryDirectory() as folder:
            launcher = Path(folder) / "launch"
            launcher.write_text("#!/bin/bash\n" + script)
            launcher.chmod(0o755)
            with mock.patch.object(places, "built", lambda _: launcher):
                return runner.launch(["/bin/true"], allocators.system(), timeout_s=timeout_s)[2:]

    def test_a_trace_may_be_longer_than_a_pipe(self):
        script = 'yes "rss 1.0 2" | head -n 100000 >&"$1"; echo "child exit=0 signal=0 loaded=1" >&"$1"'
        self.assertEqual(self.launched(script, 20), ([(1.0, 2.0)] * 100000, ""))

    def test_a_trace_may_end_in_the_middle_of_a_line(self):
        script = 'printf "rss 1.0 2\\nrss 3" >&"$1"; sleep 60'
        self.assertEqual(self.launched(script, 1), ([(1.0, 2.0)], "no end after 1 s"))


class Sessions(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        short = {s: "iters=1000000 ws=100 min=16 max=256" for s in ("quick", "default", "full")}
        cases = [replace(TINY, name=n, sizes=short) for n in ("one", "two")]
        self.plan = runner.Plan(
            5, "quick", 6, 0.0, cases, [planted("mine"), replace(allocators.system(), role=PEER)]
        )
        self.facts = {k: "x" for k in ("git", "cpu", "kernel", "glibc", "governor")}

    def session(self) -> runner.Session:
        return runner.Session(self.folder, self.plan, self.facts)

    def test_orders_are_permutations_that_keep_pairs_together(self):
        seen = set()
        for number in range(6):
            order = [(c.name, a.name) for c, a in self.plan.order(number)]
            self.assertEqual(len(set(order)), 4)
            self.assertEqual(order[0][0], order[1][0])
            self.assertEqual(order, [(c.name, a.name) for c, a in self.plan.order(number)])
            seen.add(tuple(order))
        self.assertGreater(len(seen), 1)

    def test_an_interrupted_run_keeps_its_samples_and_is_resumed(self):
        steps = []

        def interrupt(*_):
            steps.append(1)
            if len(steps) == 10:
                raise KeyboardInterrupt

        first = self.session()
        first.start(resume=False)
        first.run(interrupt)
        self.assertTrue(first.interrupted)
        self.assertEqual(len(first.samples), 9)
        self.assertTrue(results.build(first)["interrupted"])

        with (first.folder / "samples.jsonl").open("a") as f:
            f.write('{"case": "ti')  # all that there was room for
        second = self.session()
        second.start(resume=True)
        self.assertEqual(len(second.samples), 9)
        second.run(lambda *_: None)
        cells = [(s.case, s.allocator, s.round) for s in second.samples]
        self.assertEqual(len(cells), 7 * 4)
        self.assertEqual(len(set(cells)), 7 * 4)

    def test_what_ended_before_its_first_sample_is_resumed(self):
        self.session().start(resume=False)
        second = self.session()
        second.start(resume=True)
        self.assertEqual(second.samples, [])

    def test_a_resume_with_another_library_is_refused(self):
        self.session().start(resume=False)
        self.plan.allocators[0] = replace(self.plan.allocators[0], sha256="other")
        with self.assertRaisesRegex(UserError, "changed"):
            self.session().start(resume=True)

    def test_a_killed_cell_fails_and_is_never_fast(self):
        self.plan.cases = [replace(TINY, name="one")]
        self.plan.allocators[0] = planted("mine", KILL=30)
        session = self.session()
        session.start(resume=False)
        session.run(lambda *_: None)
        result = results.build(session)
        failed = [c for c in result["cells"] if c["error"]]
        self.assertEqual([(c["case"], c["allocator"]) for c in failed], [("one", "mine")])
        self.assertIn("killed by signal", failed[0]["error"])
        self.assertNotIn("rate", failed[0])
        self.assertEqual(result["comparisons"], [])
        self.assertEqual(result["geometric_means"], [])

    def test_logs_begin_with_the_header(self):
        session = self.session()
        session.start(resume=False)
        session.run(lambda *_: None)
        logs = sorted(self.folder.glob("logs/*.log"))
        self.assertEqual(len(logs), 4)
        first = logs[0].read_text().splitlines()[0]
        self.assertTrue(first.startswith("[BENCH-HEADER] git=x "))
        for field in "lane flags lib lib_sha256 lib_version runs iters ws size bench args name " \
                     "preload cpu kernel glibc governor".split():
            self.assertIn(f" {field}=", first)
        self.assertEqual(logs[0].read_text().count("# round="), 7)


class CommandLine(unittest.TestCase):
    def tool(self, *arguments: str) -> tuple[int, str, str]:
        """(exit status, stdout, stderr) of the command line, run in this process."""
        out, err = io.StringIO(), io.StringIO()
        shown = Console(file=out, width=160)
        with redirect_stdout(out), redirect_stderr(err), mock.patch.object(terminal, "console", shown):
            try:
                status = cli.main(list(arguments))
            except SystemExit as e:
                status = e.code
        return status, out.getvalue(), err.getvalue()

    def test_what_the_user_can_fix_is_one_line(self):
        for arguments, words in (
            (["--lib", "x=/no/such.so"], "not found"),
            (["--lib", "x"], "write --lib name="),
            (["--lib", f"my/lib={PLANTED}"], "write --lib name="),
            (["--lib", f"my[red]={PLANTED}"], "write --lib name="),
            (["--filter", "nosuchcase", "--lib", f"x={PLANTED}"], "unknown case"),
            (["--filter", "(", "--lib", f"x={PLANTED}"], "not a regular expression"),
            (["--peers", "nosuchpeer", "--lib", f"x={PLANTED}"], "unknown peer"),
            (["--gate", "guard"], "write it like"),
            (["--gate", "guard>=1.2.3%"], "write it like"),
            (["--gate", "guard>=.%"], "write it like"),
            (["--gate", "nosuch>=1%", "--lib", f"x={PLANTED}", "--peers", "system"], "matches no case"),
            (["--rounds", "0", "--lib", f"x={PLANTED}"], "at least 1"),
            (["--rounds", "-3", "--lib", f"x={PLANTED}"], "at least 1"),
            (["--threads", "3,5", "--lib", f"x={PLANTED}"], "no selected case has 3 or 5 threads"),
            (["--lib", f"x={PLANTED}", "--lib", f"x={PLANTED}", "--peers", "system"], "two allocators"),
            (["--resume", "x", "--seed", "0"], "leave --out and --seed out"),
            (["--resume", "x", "--out", "y"], "leave --out and --seed out"),
            (["--list", "--threads", "77"], "no selected case has 77 threads"),
            (["--quick", "--filter", "^burst_idle$", "--lib", f"x={PLANTED}"], "leave out --quick to watch"),
            (["--no-details", "--filter", "^burst_idle$", "--lib", f"x={PLANTED}"], "leave out --no-details to watch"),
            (["explain", "nosuchcase"], "unknown case"),
            (["history", "/nonexistent"], "no hz3_ssot_*/results.json"),
            (["contention", "--cores", "0.5"], "whole numbers"),
            (["contention", "--cores", "nan"], "whole numbers"),
            (["contention", "--objects", "0.2"], "whole numbers"),
            (["contention", "--ns", "nan"], "numbers above 0"),
            (["contention", "--transfer", "inf"], "numbers above 0"),
            (["sweep", "--lib", f"x={PLANTED}", "--min", "9", "--max", "8"], "at least --min"),
        ):
            status, _, err = self.tool(*arguments)
            self.assertEqual(status, 2, arguments)
            self.assertIn(words, err)
            self.assertEqual(len(err.strip().splitlines()), 1, err)

    def test_a_memory_case_that_does_not_run_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            status, out, _ = self.tool(
                "--lib", f"mine={PLANTED}", "--peers", "none", "--quick", "--filter", "^(tiny|burst_idle)$",
                "--rounds", "1", "--allow-busy", "--out", folder)
        self.assertEqual(status, 0, out)
        self.assertIn("skipped burst_idle: leave out --quick to watch its memory\n1 timed case ×", out)

    def test_what_is_not_installed_is_named_when_nothing_else_is_left(self):
        with mock.patch.object(shutil, "which", lambda _: None):
            status, out, err = self.tool("--filter", "^real/git_gc$", "--lib", f"x={PLANTED}")
        self.assertEqual((status, out), (2, ""))
        self.assertEqual(err, "ssot: nothing to run is left: skipped real/git_gc: install the package git\n")

    def test_a_folder_that_cannot_be_written_is_found_before_anything_is_built_or_run(self):
        library = ["--lib", f"x={PLANTED}", "--peers", "none"]
        with mock.patch.object(runner, "launch", side_effect=AssertionError("measured")):
            for arguments in (
                [*library, "--quick", "--filter", "^tiny$", "--out", "/proc/x"],
                ["--ab", "large_cache=off", "--lanes", "fast", "--bazel", "false", "--out", "/proc/x"],
                ["sweep", *library, "--out", "/proc/x"],
                ["sweep", *library, "--out", "/proc"],  # it is there
            ):
                status, _, err = self.tool(*arguments)
                self.assertEqual(status, 2, arguments)
                self.assertRegex(err, "^ssot: cannot write into /proc.*--out\n$")

    def test_a_wrong_ab_builds_nothing_and_leaves_no_folder(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as built:
            (Path(built) / "hz3").mkdir()
            for lane in ("fast", "scale"):
                (Path(built) / "hz3" / f"libhz3_{lane}.so").touch()
            for arguments, words in (
                (["--ab", "large_cache"], "write name=value"),
                (["--ab", "rev=no-such-revision"], "no git revision"),
                (["--lanes", "fast,scale"], "--ab compares one lane: --lanes fast or --lanes scale"),
                (["--lanes", "fats"], "unknown lane 'fats': known are fast, scale"),
                (["--lib", "x=/x.so"], "leave --lib out"),
                (["--peers", "nosuchpeer"], "unknown peer"),
                (["--gate", "nosuch>=1%"], "matches no case"),
                (["--gate", "system@all>=1%"], "'system' is no peer here: hz3-fast"),
            ):
                with mock.patch.object(places, "BUILT", Path(built)):
                    status, out, err = self.tool(
                        "--ab", "large_cache=off", "--lanes", "fast", "--out", folder, *arguments)
                self.assertEqual((status, out), (2, ""), arguments)
                self.assertIn(words, err)
            self.assertEqual(list(Path(folder).iterdir()), [])

    def test_the_list_is_of_the_cases_with_these_threads(self):
        status, out, _ = self.tool("--list", "--threads", "8", "--filter", "^glibc_simple")
        self.assertEqual(status, 0)
        self.assertIn("glibc_simple/t8", out)
        self.assertNotIn("glibc_simple/t1", out)

    def test_no_bazel_is_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            status, _, err = self.tool(
                "--ab", "large_cache=off", "--lanes", "fast", "--bazel", "/no/bazel", "--out", folder)
        self.assertEqual(status, 2)
        self.assertEqual(err, "ssot: cannot start '/no/bazel' (No such file or directory): give --bazel\n")

    def test_what_a_rule_refuses_is_said(self):
        said = "ERROR: BUILD:9:13: in _setting rule //hz3:x:\nError in fail: //hz3:x: 'y' is not a number\n"
        failed = subprocess.CompletedProcess([], 1, "", said)
        with mock.patch.object(subprocess, "run", return_value=failed):
            with self.assertRaisesRegex(UserError, "failed: Error in fail: //hz3:x: 'y' is not a number"):
                places.bazel_build("bazel", ["//a:b"], [], Path("/tmp/links"))

    def test_a_full_disk_is_one_line(self):
        full = OSError(errno.ENOSPC, "No space left on device")
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(runner.Session, "start", side_effect=full):
            status, _, err = self.tool(
                "--lib", f"x={PLANTED}", "--peers", "none", "--quick", "--filter", "^tiny$", "--allow-busy",
                "--out", folder)
        self.assertEqual(status, 2)
        self.assertRegex(err, "^ssot: no room left for results .*--out\n$")

    def test_a_busy_machine_is_an_error_that_says_what_to_do(self):
        with mock.patch.object(machine, "foreign_load", lambda: 0.7), mock.patch.object(os, "cpu_count", lambda: 2):
            with self.assertRaisesRegex(UserError, "0.08 are allowed.*stop other work or pass --allow-busy"):
                machine.check_quiet(patience_s=0)

    def test_how_busy_is_too_busy_depends_on_the_processors(self):
        with mock.patch.object(machine, "foreign_load", lambda: 0.7), mock.patch.object(os, "cpu_count", lambda: 64):
            with mock.patch.object(machine, "spin_spread", lambda: 0.0):
                self.assertEqual(machine.check_quiet(patience_s=0)["foreign_cpus"], 0.7)

    def test_every_command_has_help_with_an_example(self):
        for command in ([], ["compare"], ["history"], ["explain"], ["record"], ["attribute"],
                        ["sweep"], ["contention"]):
            status, out, _ = self.tool(*command, "--help")
            self.assertEqual(status, 0)
            self.assertIn("example", out)
            self.assertNotIn("%%", out)

    def test_an_interrupted_sweep_does_not_say_that_nothing_was_measured(self):
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.object(sweep, "write", side_effect=KeyboardInterrupt):
                status, out, err = self.tool(
                    "sweep", "--lib", f"mine={PLANTED}", "--peers", "none", "--min", "1000", "--max", "1010",
                    "--runs", "1", "--out", folder)
        self.assertIn("run 1 of 1", out)
        self.assertEqual((status, err), (130, "ssot: interrupted\n"))

    def test_a_small_sweep(self):
        with tempfile.TemporaryDirectory() as folder:
            status, out, err = self.tool(
                "sweep", "--lib", f"mine={PLANTED}", "--peers", "system", "--min", "1000", "--max", "1100",
                "--runs", "2", "--out", folder)
            self.assertEqual(status, 0, out + err)
            rows = (Path(folder) / "sweep.tsv").read_text().splitlines()
            sizes = [int(r.split("\t")[0]) for r in rows[1:] if r.split("\t")[1] == "mine"]
            self.assertEqual((sizes[0], sizes[1], sizes[-1]), (1000, 1010, 1100))
            self.assertEqual(len(rows), 1 + 2 * len(sizes))
            self.assertRegex(out, "steps?: ")

    def test_a_whole_small_run(self):
        with tempfile.TemporaryDirectory() as folder:
            status, out, err = self.tool(
                "--lib", f"mine={PLANTED}", "--peers", "system", "--quick", "--filter", "^tiny$",
                "--rounds", "5", "--allow-busy", "--out", folder, "--gate", "tiny>=-99%", "--seed", "0", "--no-control")
            self.assertEqual(status, 0, out + err)
            self.assertIn("order seed 0,", out)
            self.assertIn("GO tiny>=-99%", out)
            made = next(Path(folder).iterdir())
            self.assertRegex(made.name, r"^hz3_ssot_\w+_\d{8}_\d{6}$")
            names = {f.name for f in made.iterdir()}
            self.assertLessEqual({"results.json", "results.tsv", "report.html", "report.md", "logs"}, names)
            status, out, _ = self.tool(
                "--lib", f"mine={PLANTED}", "--peers", "system", "--quick", "--filter", "^tiny$",
                "--rounds", "5", "--allow-busy", "--out", folder, "--gate", "tiny>=+900%")
            self.assertEqual(status, gate.NO_GO, out)

    def test_a_locale_of_few_characters_loses_neither_files_nor_tables(self):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
            library, here = ["--lib", f"mine={PLANTED}", "--peers", "system"], str(places.ROOT)
            for root, *arguments in (
                [here, "--quick", "--filter", "^tiny$", "--rounds", "1", "--allow-busy", "--out", folder, *library],
                [here, "sweep", "--min", "1000", "--max", "1010", "--runs", "1", "--out", f"{folder}/sweep", *library],
                [here, "contention", "--cores", "4", "--ns", "20", "--objects", "62"],
                [folder, "history", folder],
                [folder, "record", "--id", "0001", "--title", "t", "--question", "q", "--predicted", "p",
                 "--decision", "d"],
            ):
                done = subprocess.run(
                    [sys.executable, "-m", "bench.ssot", *arguments], capture_output=True, text=True, check=False,
                    env={**environment, "BUILD_WORKSPACE_DIRECTORY": root})
                self.assertEqual((done.returncode, done.stderr), (0, ""), arguments)
            self.assertIn("÷", next(Path(folder).glob("hz3*/report.md")).read_text(encoding="utf-8"))

    def test_an_interrupt_while_timing_leaves_a_whole_folder_and_says_how_to_go_on(self):
        heed_interrupts(self)
        step = terminal.RoundProgress._step

        def interrupted_soon(progress: terminal.RoundProgress, *now) -> None:
            step(progress, *now)
            if progress.done == 8:  # in a timed round
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()

        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.object(terminal.RoundProgress, "_step", interrupted_soon):
                status, out, err = self.tool(
                    "--lib", f"mine={PLANTED}", "--peers", "system", "--quick", "--filter", "^tiny$",
                    "--rounds", "50", "--allow-busy", "--out", folder)
            self.assertEqual((status, err), (130, ""))
            made = next(Path(folder).iterdir())
            self.assertIn(f"continue with --resume {made}", out.replace("\n", ""))
            self.assertTrue(results.read(made)["interrupted"])
            self.assertIn("Interrupted", (made / "report.html").read_text())

    def detailed(self, folder: str, measure: Callable) -> tuple[runner.Session, list[dict], str]:
        """A session with separate runs that are this function: (session, what they found, output)."""
        plan = runner.Plan(1, "default", 1, 0.0, [registry.by_name("app")], [planted("mine"), allocators.system()])
        session = runner.Session(Path(folder), plan, {})
        out = io.StringIO()
        with (mock.patch.object(terminal, "console", Console(file=out, width=160)),
              mock.patch.dict(details.MEASURES, dict.fromkeys(details.MEASURES, measure))):
            found = cli._details(session, "^(app|fragment)$")
        return session, found, out.getvalue()

    def test_separate_runs_say_how_far_they_are(self):
        with tempfile.TemporaryDirectory() as folder:
            _, found, out = self.detailed(folder, lambda *_: {"error": ""})
        self.assertLessEqual({("latency", "app"), ("memory", "fragment"), ("settle", "app")},
                             {(d["kind"], d["case"]) for d in found})
        self.assertIn("memory: 1 of 2 separate runs  fragment\n", out)
        self.assertIn("settle: 1 of 2 separate runs  app\n", out)

    def test_an_interrupt_of_the_separate_runs_ends_them_at_once_and_keeps_what_is_done(self):
        heed_interrupts(self)

        def measure(case: registry.Case, _, allocator: allocators.Allocator) -> dict:
            if case.name == "app" and allocator.name == "system":  # of the latency runs, the first, the second
                script = f"kill -INT {os.getpid()}; sleep 60"
                return {"error": runner.launch(["/bin/sh", "-c", script], allocator)[3]}
            return {"error": ""}

        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            session, found, _ = self.detailed(folder, measure)
            self.assertLess(time.monotonic() - start, 30)
            self.assertTrue(session.interrupted)
            self.assertEqual([(d["kind"], d["allocator"]) for d in found], [("latency", "mine")])
            self.assertEqual(runner.stored(Path(folder) / "details.jsonl"), found)

    def test_an_interrupt_ends_runs_side_by_side(self):
        heed_interrupts(self)
        with tempfile.TemporaryDirectory() as folder:
            started = Path(folder) / "started"
            full = f"[ $(wc -l < {started}) -ge {details.SIDE_BY_SIDE} ]"  # which two may see, but one makes the folder
            script = f"echo >> {started}; {full} && mkdir {folder}/full && kill -INT {os.getpid()}; sleep 60"
            launch = partial(runner.launch, ["/bin/sh", "-c", script], allocators.system())
            start, stopped = time.monotonic(), threading.Event()
            with self.assertRaises(KeyboardInterrupt):
                details._run_all([launch] * 9, details.SIDE_BY_SIDE, stopped)
            self.assertLess(time.monotonic() - start, 30)
            self.assertTrue(stopped.is_set())
            self.assertEqual(len(started.read_text().splitlines()), details.SIDE_BY_SIDE)

    def test_an_interrupt_while_runs_are_being_started_ends_those_that_are(self):
        heed_interrupts(self)
        launch = partial(runner.launch, ["/bin/sh", "-c", "sleep 60"], allocators.system())

        def calls():
            yield launch
            while not runner._running:
                time.sleep(0.01)
            raise KeyboardInterrupt

        start = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            details._run_all(calls(), 2, threading.Event())
        self.assertLess(time.monotonic() - start, 30)

    def test_an_interrupt_that_does_not_wake_the_main_thread_is_heeded_all_the_same(self):
        heed_interrupts(self)

        def call() -> None:
            time.sleep(0.5)  # the main thread waits by now
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            runner.launch(["/bin/sh", "-c", "sleep 60"], allocators.system())

        start = time.monotonic()
        with self.assertRaises(KeyboardInterrupt):
            details._run_all([call], 1, threading.Event())
        self.assertLess(time.monotonic() - start, 30)

    def test_an_interrupt_just_after_a_run_began_ends_it(self):
        launch = partial(runner.launch, ["/bin/sh", "-c", "sleep 60"], allocators.system())
        submit = ThreadPoolExecutor.submit

        def interrupted(pool: ThreadPoolExecutor, call: Callable[[], None]) -> None:
            submit(pool, call)
            raise KeyboardInterrupt

        start = time.monotonic()
        with mock.patch.object(ThreadPoolExecutor, "submit", interrupted), self.assertRaises(KeyboardInterrupt):
            details._run_all([launch], 1, threading.Event())
        self.assertLess(time.monotonic() - start, 30)

    def test_a_signal_to_end_does_what_ctrl_c_does(self):
        with tempfile.TemporaryDirectory() as folder:
            tool = subprocess.Popen(
                [sys.executable, "-m", "bench.ssot", "--lib", f"mine={PLANTED}", "--peers", "none", "--quick",
                 "--filter", "^tiny$", "--rounds", "500", "--allow-busy", "--out", folder],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for line in tool.stdout:
                if "warm-up" in line:
                    tool.terminate()
                    break
            out, _ = tool.communicate(timeout=60)
            self.assertEqual(tool.returncode, 130, out)
            self.assertIn("not reached: tiny", out)
            self.assertNotIn("FAILED", out)
            made = next(Path(folder).iterdir())
            self.assertTrue(results.read(made)["interrupted"])


if __name__ == "__main__":
    unittest.main()
