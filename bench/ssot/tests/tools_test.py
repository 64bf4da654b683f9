# SPDX-License-Identifier: Apache-2.0
"""Parsers, gates, registry, comparison, history and records, on given text and invented results."""

import argparse
import json
import os
import re
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from bench.ssot import (
    ab, attribute, cli, compare, contention, details, explain, gate, history, places, plots, programs, record, registry,
    report, results, runner, sweep, terminal,
)
from bench.ssot.allocators import SUBJECT, Allocator
from bench.ssot.errors import UserError
from bench.ssot.tests import fixture

CALLGRIND = """\
positions: line
events: Ir
ob=(1) /b/work
fl=(1) ???
fn=(1) main
0 50
cob=(2) /l/libx.so
cfi=(2) ???
cfn=(2) tc_malloc
calls=10 0
0 300
cob=(2)
cfn=(3) free
calls=5 0
0 100

ob=(2)
fn=(2)
0 200
cfn=(4) slow
calls=2 0
0 100
0 40

fn=(4)
0 100
"""

STRACE = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000123           1       123           mmap
 40.00    0.000050           5        10         2 openat
------ ----------- ----------- --------- --------- ----------------
100.00    0.000173           1       133         2 total
"""


class Parsers(unittest.TestCase):
    def test_result_lines(self):
        text = ("[BENCH_ARGS] threads=2 iters=9\nmt_remote: threads=2 ops=10 ops/s=5.50\n"
                "[EFFECTIVE_REMOTE] target=50.0% actual=49.9% fallback_rate=0.25%\n"
                "[LATENCY] op=free count=3 p50_ns=12.5\nother: ops/s=1\nnot a line\n")
        found = runner.parse_output(text, "mt_remote")
        self.assertEqual(found["ops/s"], 5.5)
        self.assertEqual(found["effective_remote.fallback_rate"], 0.25)
        self.assertEqual(found["latency.free.p50_ns"], 12.5)

    def test_callgrind(self):
        aliases = {"tc_malloc": "malloc", "malloc": "malloc", "free": "free"}
        profile = attribute.parse_callgrind(CALLGRIND, "/b/work", "/l/libx.so", aliases)
        self.assertEqual(profile.entry, {"malloc": (10, 300), "free": (5, 100)})
        self.assertEqual(profile.per_call("malloc"), 30.0)
        self.assertEqual(profile.own, {"tc_malloc": 240, "slow": 100})
        self.assertIsNone(profile.per_call("calloc"))

    def test_a_profile_that_failed_is_named_below_the_table(self):
        stderr = "==7== Callgrind\n\ncannot start [ready]\n==7== I refs: 5\n"
        self.assertEqual(attribute.reason(stderr), "cannot start [ready]")
        self.assertEqual(attribute.reason("==7== a\n==7== b\n"), "==7== b")
        self.assertEqual(attribute.reason(""), "no output")
        profiles = {"one": attribute.Profile({"malloc": (10, 300), "free": (10, 100)}),
                    "two": attribute.Profile(error=attribute.reason(stderr)),
                    "three": attribute.Profile({"malloc": (10, 150)})}
        with terminal.console.capture() as capture:
            attribute.print_entries("title", profiles)
        cells = [[cell.strip() for cell in line.split("│")] for line in capture.get().splitlines()]
        rows = {row[1]: row[2:-1] for row in cells if len(row) > 1}
        self.assertEqual(rows, {"one": ["30.0", "10.0"], "two": ["failed", "failed"], "three": ["15.0 (-50%)", "-"]})
        self.assertIn("two does not run under callgrind: cannot start [ready]", capture.get())

    def test_strace_and_perf_and_traces(self):
        self.assertEqual(details.parse_strace(STRACE), {"mmap": 123, "openat": 10})
        perf = "5000,,instructions:u,10,100.00,,\n<not supported>,,cycles:u,0,100.00,,\n"
        self.assertEqual(attribute.parse_perf(perf), {"instructions:u": 5000.0})
        trace = details.parse_trace("[RSS_TRACE] 0.000:12 0.050:900\n", "RSS_TRACE")
        self.assertEqual(trace, [[0.0, 12.0], [0.05, 900.0]])

    def test_system_calls_of_a_run_that_failed_are_not_shown_as_none(self):
        case, both = registry.by_name("tiny"), fixture.allocators()[:2]
        counted = {"hz3-fast": {"error": "", "calls": {"mmap": 9}},
                   "hz3-scale": {"error": "exit status 1: [ptrace] not permitted", "calls": {}}}
        with (mock.patch.object(details, "syscalls", lambda case, size, a: counted[a.name]),
              mock.patch.object(explain.shutil, "which", lambda program: f"/bin/{program}")):
            self.assertEqual(explain._syscalls(case, both), "no syscall counts: under strace, hz3-scale: "
                             "exit status 1: [ptrace] not permitted")
            counted["hz3-scale"] = {"error": "", "calls": {"brk": 2}}
            self.assertEqual(explain._syscalls(case, both).row_count, 2)

    def test_details_are_of_the_planned_cases(self):
        with tempfile.TemporaryDirectory() as folder:
            session = fixture.session(Path(folder), rounds=1)
            session.plan.cases = [c for c in session.plan.cases if c.threads == 1]
            with mock.patch.dict(details.MEASURES, dict.fromkeys(details.MEASURES, lambda *_: {})):
                found = details.run(session, "", lambda *_: None)
        cases = [registry.by_name(d["case"]) for d in found if d["kind"] != details.MEMORY]
        self.assertEqual({c.threads for c in cases}, {1})

    def test_ab(self):
        self.assertEqual(ab.parse("large_cache=off,lto=on"),
                         (["--//hz3:large_cache=off", "--//hz3:lto=on"], []))
        self.assertEqual(ab.parse("rev=HEAD~2..HEAD"), ([], ["HEAD~2", "HEAD"]))
        for wrong in ("large_cache", "a=b c", "rev=", "rev=a..b..c"):
            with self.assertRaises(UserError):
                ab.parse(wrong)
        with self.assertRaisesRegex(UserError, "compare lanes with --lanes"):
            ab.parse("lto=on,lane=checked")
        with mock.patch.object(ab, "_sha"):
            for spec, names in (
                ("lto=on", ("hz3-fast:lto=on", "hz3-fast")), ("rev=a/b", ("hz3-fast", "hz3-fast@a_b")),
                ("rev=old..new", ("hz3-fast@new", "hz3-fast@old")),
            ):
                self.assertEqual(ab.names(spec, "fast"), names)

    def test_ab_refuses_a_library_against_itself(self):
        def build(_, name: str, role: str, flags: list[str]) -> Allocator:
            return Allocator(name, role, sha256="off" if "--//hz3:large_cache=off" in flags else "on")

        with mock.patch.object(ab.Builder, "build", build), tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(UserError, "large_cache=on.* byte for byte the same"):
                ab.pair("large_cache=on", "bazel", "fast", Path(folder))
            subject, peer = ab.pair("large_cache=off", "bazel", "fast", Path(folder))
        self.assertEqual((subject.name, peer.name), ("hz3-fast:large_cache=off", "hz3-fast"))


class Registry(unittest.TestCase):
    def test_names_are_unique_and_every_case_says_what_it_stresses(self):
        names = [c.name for c in registry.CASES]
        self.assertEqual(len(names), len(set(names)))
        for case in registry.CASES:
            self.assertEqual(set(case.sizes), {"quick", "default", "full"})
            self.assertGreater(len(case.stresses), 10)

    def test_every_case_has_its_program_and_every_program_a_case(self):
        used = {c.program for c in registry.CASES}
        self.assertEqual({p for p in used if p.startswith("real:")}, set(programs.REAL))
        folder = Path(__file__).resolve().parents[2] / "workloads"
        have = {f.stem for f in folder.glob("*.c*") if "int main(" in f.read_text()}
        self.assertEqual({p for p in used if not p.startswith("real:")}, have)

    def test_the_matrix_is_whole(self):
        names = {c.name for c in registry.CASES}
        for threads in (1, 2, 8, 32):
            for remote in (0, 50, 90):
                for sizes in ("guard", "main", "cross128"):
                    cell = f"mt_remote/t{threads}/r{remote}/{sizes}"
                    self.assertLessEqual({cell, cell + "/touch"}, names)

    def test_selection(self):
        self.assertEqual(len(registry.select("quick", "", [])), 5)
        self.assertEqual({c.threads for c in registry.select("full", "mt_remote", [8])}, {8})
        with self.assertRaises(UserError):
            registry.select("quick", "", [77])

    def test_a_shorter_form_for_callgrind(self):
        args = explain.shorter(registry.by_name("mt_remote/t8/r50/guard"))
        self.assertIn("iters=25000", args)
        self.assertIn("threads=8", args)


class Contention(unittest.TestCase):
    def test_without_contention_it_is_the_closed_form(self):
        for pop_share in (0.0, 0.5, 1.0):
            quiet = contention.Machine(64, 1, op_ns=50000, objects=62, pop_share=pop_share)
            self.assertAlmostEqual(contention.lost(quiet) / contention.without_contention(quiet), 1, delta=0.05)
            self.assertAlmostEqual(contention.lost(replace(quiet, held=True)) / contention.lost(quiet), 1, delta=0.05)
        # A core by itself always owns its line: a load and a swap, both hits.
        alone = contention.Machine(1, 1, op_ns=5, objects=62, pop_share=0.0)
        self.assertAlmostEqual(contention.lost(alone), 10 / (10 + 310), delta=0.005)

    def test_at_saturation_it_is_the_closed_form(self):
        # Served in turn, all others fail after a success and the winner loads anew: N + 1 transfers each.
        for cores in (4, 16, 64):
            full = contention.Machine(cores, 1, op_ns=1e-6, pop_share=0.0)
            self.assertAlmostEqual(contention.exchange_ns(full) / (100 * (cores + 1)), 1, delta=0.05)
            self.assertGreater(contention.lost(full), 0.99)
            # Where the line is held, a success takes one transfer and one hit.
            self.assertAlmostEqual(contention.exchange_ns(replace(full, held=True)) / 105, 1, delta=0.05)

    def test_shards_are_machines_of_their_own(self):
        point = contention.Machine(64, 8, op_ns=20, objects=126)
        whole = contention.lost(point)
        part = contention.lost(replace(point, cores=8, shards=1))
        self.assertAlmostEqual(whole, part, delta=0.05)
        self.assertGreater(contention.lost(replace(point, shards=1)), whole + 0.1)
        self.assertEqual([contention.shards_of(c, 8, 16) for c in (1, 8, 9, 128, 256)], [1, 1, 2, 16, 16])

    def test_a_common_pool_joins_what_the_shards_part(self):
        sharded = contention.Machine(128, 16, op_ns=20, objects=126, pool_every=4, pool_shards=16)
        common = contention.Machine(128, 16, op_ns=20, objects=126, pool_every=4)
        self.assertGreater(contention.lost(common), contention.lost(sharded) + 0.1)


class Sweep(unittest.TestCase):
    CURVE = {990: 5.0, 1000: 5.1, 1010: 10.1, 1020: 10.5, 1030: 30.0, 1040: 9.0, 2040: 9.1, 2060: 4.5}

    def test_lines(self):
        text = "[SIZE] bytes=8 ns=5.25\n[SIZE] bytes=9 ns=6.00\nsize_sweep: ops=4 ops/s=1\n"
        self.assertEqual(sweep.parse(text), {8: 5.25, 9: 6.0})
        self.assertEqual(sweep.least([{8: 5.0, 9: 9.0}, {8: 7.0, 9: 6.0}]), {8: 5.0, 9: 6.0})
        with self.assertRaises(ValueError):
            sweep.least([{8: 5.0}, {9: 5.0}])

    def test_borders_are_those_of_the_header(self):
        classes, boxes = sweep.borders((places.BUILT / sweep.SIZE_CLASSES).read_text())
        self.assertEqual((classes[0], classes[-1], classes), (16, 1 << 20, sorted(set(classes))))
        self.assertEqual(sorted(boxes), [2048, 128 << 10, 1 << 20])
        with self.assertRaisesRegex(UserError, "no longer"):
            sweep.borders("X(1, 0, 16, 1, 4096)")

    def test_steps_up_and_down_and_where(self):
        boxes = {2048: "small | medium"}
        found = sweep.steps("mine", self.CURVE, 2.0, [1024, 2048], boxes)
        self.assertEqual([(s.below, s.above, s.border) for s in found],
                         [(1030, 1040, ""), (1020, 1030, "class of 1,024 B"), (2040, 2060, "small | medium")])
        self.assertAlmostEqual(found[0].ratio, 30 / 9)
        self.assertEqual(sweep.steps("mine", self.CURVE, 4.0, [], {}), [])

    def test_files(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = sweep.write(folder, {"mine": self.CURVE, "flat": dict.fromkeys(self.CURVE, 7.0)}, 2.0, "a <b>")
            self.assertEqual({s.allocator for s in found}, {"mine"})
            rows = (folder / "sweep.tsv").read_text().splitlines()
            self.assertEqual(rows[0], "bytes\tallocator\tns_per_pair")
            self.assertEqual(len(rows), 1 + 2 * len(self.CURVE))
            page = (folder / "sweep.html").read_text()
        for part in ('id="sweep"', "<svg", "small | medium", "3.3×", "a &lt;b&gt;"):
            self.assertIn(part, page)
        self.assertNotIn("http://", page.replace("http://www.w3.org", ""))


class Tables(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def made(self, name: str, **options) -> dict:
        return fixture.result(self.folder / name, **{"limit": 8, **options})

    def test_verdicts_follow_the_speeds(self):
        result = self.made("a")
        verdicts = {
            (s, p): {c["verdict"] for c in result["comparisons"] if (c["subject"], c["peer"]) == (s, p)}
            for s in ("hz3-fast", "hz3-scale")
            for p in ("system", "tcmalloc")
        }
        self.assertEqual(set().union(*verdicts.values()), {"WIN"})
        self.assertEqual(result["control_verdict"], "TIE")
        mean = next(m for m in result["geometric_means"]
                    if (m["subject"], m["peer"]) == ("hz3-fast", "tcmalloc"))
        self.assertAlmostEqual(mean["ratio"], 1 / 0.9, delta=0.01)
        tsv = (self.folder / "a" / "results.tsv").read_text().splitlines()
        self.assertEqual(len(tsv), 1 + len(result["cells"]))

    def test_gates(self):
        result = self.made("a", limit=None)
        for text, expected in (
            ("guard>=+5%", True), ("guard>=+15%", False), ("system@all>=+100%", True),
            ("tiny<=+5%", False), ("tiny>=.5%", True), ("tiny>=5.%", True),
        ):
            (parsed,) = gate.parse(text)
            self.assertEqual(gate.check(parsed, "hz3-fast", result)[0], expected, text)

    def test_a_gate_over_too_few_pairs_is_broken(self):
        for rounds, expected in ((4, False), (5, True)):
            result = self.made(f"r{rounds}", rounds=rounds)
            passed, text = gate.check(gate.parse("all>=-99%")[0], "hz3-fast", result)
            self.assertEqual(passed, expected, text)
            self.assertEqual("has fewer than 5 pairs" in text, not expected)

    def test_a_gate_is_broken_where_the_control_is(self):
        session = fixture.session(self.folder / "a", limit=2, speed={"hz3-fast=again": 0.9})
        with terminal.console.capture() as capture:
            self.assertEqual(cli.finish(session, [], gate.parse("tcmalloc@all>=-1%")), gate.NO_GO)
            self.assertEqual(cli.finish(session, [], []), 0)
        self.assertEqual(capture.get().count("the A/A control reads DIFFERENT"), 2)

    def test_a_gate_that_nothing_could_meet_is_refused_before_the_measurement(self):
        for text, peers, words in (
            ("guard>=1%", [], "add --peers"), ("nosuch>=1%", ["system"], "matches no case"),
            ("tcmalloc@guard>=1%", ["system"], "no peer here: system"),
        ):
            with self.assertRaisesRegex(UserError, words):
                gate.refuse_unmatched(gate.parse(text), ["mt_remote/t8/r50/guard"], peers)
        gate.refuse_unmatched(gate.parse("all>=1%,system@guard<=1%"), ["guard"], ["system"])

    def test_a_gate_over_a_failed_cell_is_broken(self):
        result = self.made("a")
        next(c for c in result["cells"] if c["case"] == "tiny")["error"] = "killed by signal 9"
        self.assertFalse(gate.check(gate.parse("all>=-99%")[0], "hz3-fast", result)[0])

    def test_a_gate_is_about_every_subject(self):
        for slow, status in ((0.97, 0), (0.5, gate.NO_GO)):
            session = fixture.session(self.folder / f"scale{slow}", limit=2, speed={"hz3-scale": slow})
            with terminal.console.capture() as capture:
                self.assertEqual(cli.finish(session, [], gate.parse("tcmalloc@all>=-1%")), status)
            lines = re.findall(r"^((?:NO-)?GO) .*: (\S+) against tcmalloc: ", capture.get(), re.M)
            self.assertEqual(lines, [("GO", "hz3-fast"), ("NO-GO" if status else "GO", "hz3-scale")])

    def test_a_report_that_fails_takes_neither_table_nor_gates_along(self):
        session = fixture.session(self.folder / "a", limit=2)
        with (mock.patch.object(report, "write", side_effect=RuntimeError), self.assertRaises(RuntimeError),
              terminal.console.capture() as capture):
            cli.finish(session, [], gate.parse("tcmalloc@all>=-1%"))
        self.assertIn("A/A control", capture.get())
        self.assertIn("GO tcmalloc@all>=-1%", capture.get())

    def shown(self, result: dict) -> dict[str, str]:
        """What the user reads, by place."""
        report.write(self.folder, result)
        with terminal.console.capture() as capture:
            terminal.print_result(result)
        options = argparse.Namespace(id="0001", title="t", question="q", predicted="p", decision="d", revisit="r")
        return {"terminal": capture.get(), "record": report.record(result, options, "folder"),
                **{name: (self.folder / name).read_text() for name in ("report.md", "report.html")}}

    def test_what_was_not_reached_did_not_fail(self):
        session = fixture.session(self.folder / "a", limit=3)
        one, two, three = (c.name for c in session.plan.cases)
        session.samples = [s for s in session.samples
                           if s.case != three and (s.case, s.allocator) != (two, "tcmalloc")]
        session.record(runner.Sample(one, "system", 9, error="killed [by] signal 9"), session.plan.cases[0],
                       session.plan.allocators[2])
        detail = {"kind": details.SYSCALLS, "case": "app", "allocator": "tcmalloc", "error": "exit status 7",
                  "calls": {"mmap": 9}}
        session.interrupted = True
        result = results.build(session, [detail])
        shown = self.shown(result)
        for place in ("terminal", "report.md", "report.html"):
            self.assertIn(f"ot reached: {two} (tcmalloc), {three}", shown[place])
            self.assertIn("killed [by] signal 9", shown[place])
            self.assertIn("exit status 7", shown[place])
        self.assertEqual(shown["terminal"].count("FAILED"), 2)
        self.assertEqual(plots.heat_map(result).count(">failed<"), 1)

    def test_cells_with_few_pairs_are_no_ties(self):
        shown = self.shown(self.made("a", rounds=4))
        for place in ("report.md", "record"):
            self.assertRegex(shown[place], r"\| hz3-fast ÷ system \| 8 \| [^\n]* \| 0 \| 0 \| 0 \| 8 \|\n")
        self.assertIn("0 tie<", shown["report.html"])
        self.assertIn("8 with few pairs", shown["report.html"])

    def test_what_has_no_number_is_a_dash_and_a_whole_time_is_marked(self):
        result = self.made("a", rounds=1, limit=3)
        result["cells"] = cells = [c for c in result["cells"] if c["allocator"] == "hz3-fast"]
        del cells[0]["ns_per_op"]  # as of a real program, which is timed as a whole
        cells[1]["allocator_ns_per_op"] = 7.5
        for d in result["details"]:
            d["error"] = "exit status 1" if d["allocator"] == "tcmalloc" else ""
        shown = self.shown(result)
        for place, between in (("terminal", r" +│ +"), ("report.md", r" \| "), ("report.html", r"</td>\s*<td[^>]*>")):
            for cell, own in zip(cells, ("–", r"7\.5", r"\d+\.\d whole")):
                row = between.join([cell["case"], "hz3-fast", r"[\d.M]+(?:/s)?", own, "–"])
                self.assertRegex(shown[place], row, place)
        self.assertRegex(shown["report.html"], r">madvise</td><td>1</td><td>1</td><td>900</td><td>–</td>")

    def test_a_cell_of_several_runs_has_its_scatter(self):
        result = self.made("a", rounds=3, limit=1)
        result["cells"][0].update(cv=0.123, noisy=True)
        for place in ("terminal", "report.md", "report.html"):
            self.assertIn("12.3 % noisy", self.shown(result)[place], place)

    def test_what_others_used_is_that_of_the_busiest_round(self):
        result = self.made("a", rounds=2, limit=1)
        for place, text in self.shown(result).items():
            self.assertNotIn("thers used", text, place)
        for sample in result["samples"]:
            sample["resources"].update(wall_s=0.5, foreign_cpu_s=0.0 if sample["round"] else 9.0)
        # In a short run a tick of a clock that has 100 a second is much.
        late = [s["resources"] for s in result["samples"] if s["round"] == 2]
        late[0].update(wall_s=0.001, foreign_cpu_s=0.01)
        late[1].update(foreign_cpu_s=0.5)
        self.assertAlmostEqual(results.foreign_cpus(result), 0.51 / (0.5 * (len(late) - 1) + 0.001))
        for place, text in self.shown(result).items():
            self.assertEqual("thers used 0.25 processors in the busiest round" in text, place != "record", place)

    def test_memory_cases_show_their_figures_also_where_nothing_is_timed(self):
        result = self.made("a", limit=1)
        next(d for d in result["details"] if d["kind"] == "memory" and d["allocator"] == "system")["error"] = "killed"
        self.assertEqual([(m["case"], m["figure"], sorted(m["values"])) for m in results.memory(result)],
                         [("burst_idle", figure, ["hz3-fast", "hz3-scale", "tcmalloc"]) for figure in ("peak_kib", "fall_s")])
        nothing = {"cases": [], "cells": [], "comparisons": [], "geometric_means": [], "control_verdict": "none"}
        for case in (result, {**result, **nothing}):
            for place, text in self.shown(case).items():
                between = {"terminal": r" +│ +", "report.html": r"</td>\s*<td[^>]*>"}.get(place, r" \| ")
                for figure, value in (("peak_kib", "524,288"), ("fall_s", r"1\.25")):
                    row = between.join(["burst_idle", figure, value, value, "–", value])
                    self.assertRegex(text, row, place)
        for text in self.shown({**result, **nothing}).values():
            self.assertNotIn("alloc ns/op", text)
            self.assertNotIn("vs tcmalloc", text)

    def test_the_spread_of_a_mean_has_its_name_and_needs_five_cases(self):
        spread = r"spread over the cases \d\.\d{3}–"
        column = r"\| hz3-fast ÷ system \| \d \| [\d.]+ \| \d\.\d{3}–"
        for cases in (1, 4, 5):
            shown = self.shown(self.made(f"c{cases}", limit=cases))
            for place, text in shown.items():
                pattern = spread if place in ("terminal", "report.html") else column
                self.assertEqual(bool(re.search(pattern, text)), cases == 5, (place, cases))
                self.assertNotRegex(text, r"\b1 cases")
            self.assertIn("of 1 case:" if cases == 1 else f"of {cases} cases:", shown["terminal"])

    def test_the_forest_draws_no_spread_below_five_cases(self):
        for cases in (4, 5):
            result = self.made(f"c{cases}", limit=cases)
            mean = result["geometric_means"][0]
            drawn = plots.forest(result, mean["subject"], mean["peer"])
            mean["low"] /= 1.01
            again = plots.forest(result, mean["subject"], mean["peer"])
            self.assertEqual(drawn == again, cases == 4)

    def test_without_peers_the_subjects_have_their_numbers(self):
        session = fixture.session(self.folder / "a", limit=8)
        session.plan.allocators = [a for a in session.plan.allocators if a.role == SUBJECT]
        result = results.build(session)
        for text in self.shown(result).values():
            for cell in result["cells"]:
                for word in (cell["case"], cell["allocator"], terminal.si(cell["rate"]), "2.0"):
                    self.assertIn(word, text)
            self.assertNotIn("orst first", text)
            self.assertNotIn("subject ÷", text)

    def test_compare_finds_the_change_and_the_drift(self):
        old = self.made("a", seed=1)
        new = self.made("b", seed=2, speed={"hz3-scale": 0.90})
        for result in (old, new):
            sha = {a["name"]: a for a in result["allocators"]}
            sha["hz3-scale"]["sha256"] = result["facts"]["git"]  # built anew
        found, drift = compare.compare(old, new)
        changed = {c.subject for c in found if c.verdict != "TIE"}
        self.assertEqual(changed, {"hz3-scale"})
        self.assertAlmostEqual(drift, 1.0, delta=0.01)

    def test_compare_leaves_out_what_failed_once(self):
        old, new = self.made("a", seed=1, limit=2), self.made("b", seed=2, limit=2)
        next(s for s in new["samples"] if s["allocator"] == "system")["error"] = "killed by signal 9"
        failed = next((s["case"], s["allocator"]) for s in new["samples"] if s["error"])
        found = {(c.case, c.subject) for c in compare.compare(old, new)[0]}
        self.assertEqual(len(found), 2 * 4 - 1)
        self.assertNotIn(failed, found)

    def test_history_marks_the_commit_that_changed(self):
        for day in range(1, 13):
            self.made(f"hz3_ssot_{day}", seed=day, rounds=5, limit=3, speed={"tcmalloc": 0.9 if day < 7 else 0.75})
        page = history.run(argparse.Namespace(dir=self.folder))
        text = (self.folder / "history.html").read_text()
        self.assertEqual(page, 0)
        changes = history.changed_cases(history.load(self.folder))
        self.assertIn("0000007", {c["commit"] for c in changes})
        self.assertNotIn("hz3-fast ÷ system", {c["pair"] for c in changes})
        self.assertIn('id="history"', text)

    def test_history_knows_result_folders_by_their_names(self):
        for name in ("hz3_ssot_1", "below/hz3_ssot_2"):
            self.made(name, rounds=1, limit=1)
        other = self.folder / "other" / "results.json"
        other.parent.mkdir()
        other.write_text("[]")
        for place, count in ((".", 2), ("below", 1), ("below/hz3_ssot_2", 1)):
            self.assertEqual(len(history.load(self.folder / place)), count, place)

    def test_a_shift_in_noise_is_no_change_of_a_case(self):
        rng = np.random.default_rng(10)
        noise = np.exp(rng.normal(0, 0.05, (12, 60)))
        found = [{"facts": {"git": str(i)}, "comparisons": [
            {"case": f"c{j}", "subject": "s", "peer": "p", "ratio": float(r)} for j, r in enumerate(row)]}
            for i, row in enumerate(noise)]
        self.assertEqual(history.changed_cases(found), [])

    def test_a_record_is_written_once(self):
        self.made("a")
        options = argparse.Namespace(
            folder=self.folder / "a", id="0042", title="A Title: here", question="Why?",
            predicted="+2 %", decision="GO", revisit="never", force=False)
        with mock.patch.object(places, "ROOT", self.folder):
            self.assertEqual(record.run(options), 0)
            text = (self.folder / "docs/decisions/0042-a-title-here.md").read_text()
            with self.assertRaisesRegex(UserError, "exists"):
                record.run(options)
        for part in ("+2 %", "| hz3-fast ÷ tcmalloc | 8 | 1.11", "| tiny | hz3-fast |", "GO", "Why?"):
            self.assertIn(part, text)

    def test_results_of_another_schema_are_refused(self):
        self.made("a")
        file = self.folder / "a" / "results.json"
        file.write_text(file.read_text().replace(results.SCHEMA, "hz3.ssot/0"))
        with self.assertRaisesRegex(UserError, "schema"):
            results.read(self.folder / "a")

    def test_files_that_are_no_results_are_refused(self):
        file = self.folder / "results.json"
        for text, words in (("[]", "without a schema"), ("{}", "without a schema"), ("{", "Expecting"),
                            (json.dumps({"schema": results.SCHEMA}), "without 'allocators'")):
            file.write_text(text)
            with self.assertRaisesRegex(UserError, f"not a result of this tool .*{words}"):
                results.read(file)
        (self.folder / "plan.json").write_text("[]")
        with self.assertRaisesRegex(UserError, "no plan.json of this tool"):
            results.planned_seed(self.folder)

    def test_without_git_there_is_no_revision(self):
        with mock.patch.dict(os.environ, PATH="/nonexistent"):
            self.assertEqual(places.git("rev-parse", "HEAD"), "")


if __name__ == "__main__":
    unittest.main()
