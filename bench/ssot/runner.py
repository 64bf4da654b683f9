# SPDX-License-Identifier: Apache-2.0
"""Runs one child under one allocator, and whole sessions of interleaved rounds of them.

Called by: cli and its commands, details, results, terminal.
Owns: the session folder (plan.json, samples.jsonl, logs/).
Invariant: a Sample is ok only when the library was seen in the child's own /proc/PID/maps, the
child's self-checks held, and its result line carries the case's metric.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Callable, Iterator

from bench.ssot import machine, places, programs
from bench.ssot.allocators import BASE_ENV, FLOOR, Allocator
from bench.ssot.errors import UserError
from bench.ssot.registry import Case

MAX_FALLBACK_PERCENT = 0.10
TIMEOUT_S = 300.0
MIN_ROUNDS = 5  # timed rounds that run even when the budget is spent
WARM_UP = 0  # the round whose samples are dropped
_LINE = re.compile(r"^(?:\[(?P<tag>\w+)\]|(?P<name>[\w.+-]+):) (?P<rest>.*=.*)$")


@dataclass
class Sample:
    """One run of one cell. Metrics as printed by the program; resources in the key's unit."""

    case: str
    allocator: str
    round: int
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)
    trace: list[tuple[float, float]] = field(default_factory=list)  # (ms, RSS in KiB)
    output: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def parse_output(text: str, program: str) -> dict[str, float]:
    """Numbers of the result lines. Keys of the program's own line are kept, `[TAG] k=v` lines
    become `tag.k` (`tag.op.k` when the line has an op). Percent signs are dropped."""
    numbers: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        pairs = dict(p.split("=", 1) for p in match["rest"].split() if "=" in p)
        prefix = ""
        if match["tag"]:
            prefix = match["tag"].lower() + "." + (pairs["op"] + "." if "op" in pairs else "")
        elif match["name"] != program:
            continue
        for key, value in pairs.items():
            try:
                numbers[prefix + key] = float(value.rstrip("%"))
            except ValueError:
                continue
    return numbers


_running: set[subprocess.Popen] = set()


def _end(process: subprocess.Popen) -> None:
    # On Ctrl-C, subprocess itself waits a moment for the child: a short one is gone by now.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """Kills what launch() runs in other threads, where Ctrl-C does not arrive."""
    for process in list(_running):
        _end(process)


def launch(
    command: list[str],
    allocator: Allocator,
    sample_ms: int = 0,
    timeout_s: float = TIMEOUT_S,
    cwd: Path | None = None,
) -> tuple[str, dict[str, float], list[tuple[float, float]], str]:
    """Runs a command through launch.c: (output, accounting, RSS trace, error or '')."""
    settings = [f"{k}={v}" for k, v in allocator.child_env().items()]
    # A pipe, which is read when all is over, would be full after minutes of samples.
    with os.fdopen(os.memfd_create("report"), encoding="utf-8") as report:
        process = subprocess.Popen(
            [str(places.built("bench/launch")), str(report.fileno()), allocator.path or "-"]
            + [str(sample_ms), *settings, "--", *command],
            env=BASE_ENV,
            pass_fds=[report.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            cwd=cwd,
        )
        timed_out = False
        _running.add(process)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(process)
            output, _ = process.communicate()
        except BaseException:
            _end(process)
            process.communicate()
            raise
        finally:
            _running.discard(process)
        report.seek(0)
        lines = report.read().split("\n")[:-1]  # a launcher that was killed leaves half a line
    trace = [(float(l.split()[1]), float(l.split()[2])) for l in lines if l.startswith("rss ")]
    child = next((l for l in lines if l.startswith("child ")), "")
    account = {k: float(v) for k, v in (p.split("=") for p in child.split()[1:])}
    return output, account, trace, _why_bad(output, account, allocator, timed_out, timeout_s)


def _why_bad(
    output: str, account: dict[str, float], allocator: Allocator, timed_out: bool, timeout_s: float
) -> str:
    if timed_out:
        return f"no end after {timeout_s:.0f} s"
    if not account:
        return "killed together with its launcher"
    if account["signal"]:
        return f"killed by signal {int(account['signal'])}"
    if account["exit"]:
        last = output.strip().splitlines()[-1:] or ["no output"]
        return f"exit status {int(account['exit'])}: {last[0]}"
    if allocator.path and not account["loaded"]:
        return f"{allocator.path} was never mapped into the child: the preload did not take effect"
    return ""


def run_case(
    case: Case, args: list[str], allocator: Allocator, number: int, sample_ms: int = 0
) -> Sample:
    """One run of a case; every reason not to believe it ends up in `error`."""
    sample = Sample(case.name, allocator.name, number)
    if case.is_real:
        programs.run(case, args[0], allocator, sample, launch)
        return sample
    command = [str(places.built(f"bench/workloads/{case.program}")), *args]
    before = machine.cpu_seconds()
    sample.output, sample.resources, sample.trace, sample.error = launch(
        command, allocator, sample_ms
    )
    used = sample.resources.get("user_s", 0) + sample.resources.get("sys_s", 0)
    sample.resources["foreign_cpu_s"] = max(0.0, machine.cpu_seconds() - before - used)
    sample.metrics = parse_output(sample.output, case.program)
    if not sample.error and case.metric not in sample.metrics:
        sample.error = f"no '{case.metric}=' in the result line"
    fallback = sample.metrics.get("effective_remote.fallback_rate", 0.0)
    if not sample.error and fallback >= MAX_FALLBACK_PERCENT:
        sample.error = (
            f"fallback_rate {fallback:.2f} % is {MAX_FALLBACK_PERCENT:.2f} % or more: "
            "raise ring_slots or lower iters"
        )
    return sample


def rate(case: Case, sample: Sample) -> float:
    """The compared number, oriented so that more is better (units per second, or 1/s)."""
    value = sample.metrics[case.metric]
    return value if case.higher_is_better else 1.0 / value


FLOOR_ROUNDS = 3  # the harness's own cost is needed to a few per cent only


def _floor_runs(allocator: Allocator, case: Case, number: int) -> bool:
    return allocator.name == case.floor and WARM_UP < number <= FLOOR_ROUNDS


@dataclass
class Plan:
    """Everything that decides which runs happen, and in what order."""

    seed: int
    size: str
    rounds: int
    budget_s: float  # stop starting rounds after this; 0 means all rounds
    cases: list[Case]
    allocators: list[Allocator]

    def order(self, number: int) -> list[tuple[Case, Allocator]]:
        """Cells of one round: cases shuffled, allocators shuffled within a case, so that the
        two halves of a pair are always close in time."""
        rng = random.Random(f"{self.seed}/{number}")
        cells = []
        for case in rng.sample(self.cases, len(self.cases)):
            row = [a for a in self.allocators if a.role != FLOOR or _floor_runs(a, case, number)]
            cells += [(case, allocator) for allocator in rng.sample(row, len(row))]
        return cells

    def fingerprint(self) -> dict:
        """What --resume must find unchanged."""
        return {
            "seed": self.seed,
            "size": self.size,
            "cases": [[c.name, c.sizes[self.size]] for c in self.cases],
            "allocators": [[a.name, a.path, a.sha256] for a in self.allocators],
        }


def stored(file: Path) -> list[dict]:
    """What was appended to a file, a line each; none if it is not there. A last line that a full disk
    or a power failure cut short is cut off, so that the next one starts a line of its own."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        file.write_text("".join(lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


class Session:
    """One result folder: plan, raw logs, every sample as a line of samples.jsonl."""

    def __init__(self, folder: Path, plan: Plan, facts: dict[str, str]):
        self.folder, self.plan, self.facts = folder, plan, facts
        self.samples: list[Sample] = []
        self.broken: set[tuple[str, str]] = set()
        self.interrupted = False
        places.writable(folder / "logs")

    def start(self, resume: bool) -> None:
        """Writes the plan of a new session, or loads the samples of a resumed one."""
        plan_file = self.folder / "plan.json"
        if resume:
            if json.loads(plan_file.read_text(encoding="utf-8"))["plan"] != self.plan.fingerprint():
                raise UserError("--resume: libraries or options changed; start a new run instead")
            for sample in stored(self.folder / "samples.jsonl"):
                self._take(Sample(**sample))
        else:
            plan_file.write_text(
                json.dumps({"plan": self.plan.fingerprint(), "facts": self.facts}, indent=1),
                encoding="utf-8",
            )

    def _take(self, sample: Sample) -> None:
        self.samples.append(sample)
        if not sample.ok:
            self.broken.add((sample.case, sample.allocator))

    def record(self, sample: Sample, case: Case, allocator: Allocator) -> None:
        """Keeps a finished sample in memory, in samples.jsonl and in the raw log."""
        self._take(sample)
        log = self.folder / "logs" / f"{allocator.name}__{case.name.replace('/', '-')}.log"
        if not log.exists():
            log.write_text(self.header(case, allocator) + "\n", encoding="utf-8")
        with log.open("a", encoding="utf-8") as f:
            f.write(f"# round={sample.round}{' FAILED: ' + sample.error if sample.error else ''}\n")
            f.write(sample.output.rstrip("\n") + "\n")
        stored = asdict(sample)
        stored["output"] = ""  # the log has it
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(stored) + "\n")

    def header(self, case: Case, allocator: Allocator) -> str:
        """First line of a raw log."""
        args = case.args(self.plan.size)
        fields = {
            "git": self.facts["git"],
            "lane": allocator.lane,
            "flags": allocator.version.replace(" ", ",") or "-",
            "lib": allocator.path or "libc",
            "lib_sha256": allocator.sha256 or "-",
            "lib_version": allocator.version.split(" ")[0] or "-",
            "runs": str(self.plan.rounds),
            **case.header_fields(args),
            "bench": case.program,
            "args": ",".join(args),
            "name": allocator.name,
            "preload": allocator.path or "-",
            **{k: self.facts[k] for k in ("cpu", "kernel", "glibc", "governor")},
        }
        env = ",".join(f"{k}:{v}" for k, v in allocator.env.items())
        text = " ".join(f"{k}={v.replace(' ', '_')}" for k, v in fields.items())
        return f"[BENCH-HEADER] {text}" + (f" env={env}" if env else "")

    def pending(self, number: int) -> list[tuple[Case, Allocator]]:
        """Cells of a round that were not run yet and did not fail before."""
        done = {(s.case, s.allocator) for s in self.samples if s.round == number} | self.broken
        return [(c, a) for c, a in self.plan.order(number) if (c.name, a.name) not in done]

    def run(self, progress: Callable[[int, Case, Allocator, float], None]) -> None:
        """All rounds, warm-up first. Ctrl-C ends it and keeps what is done."""
        start = time.monotonic()
        try:
            for number in range(self.plan.rounds + 1):
                if number > MIN_ROUNDS and self._over_budget(start, number):
                    break
                for case, allocator in self.pending(number):
                    progress(number, case, allocator, time.monotonic() - start)
                    sample = run_case(case, case.args(self.plan.size), allocator, number)
                    self.record(sample, case, allocator)
        except KeyboardInterrupt:
            self.interrupted = True

    def _over_budget(self, start: float, number: int) -> bool:
        elapsed = time.monotonic() - start
        return bool(self.plan.budget_s) and elapsed + elapsed / number > self.plan.budget_s

    def rerun(
        self,
        cells: list[tuple[Case, Allocator]],
        numbers: Iterator[int],
        deadline: float,
        progress: Callable[[int, Case, Allocator, float], None],
    ) -> None:
        """Extra rounds of some cells (the noisy ones) until `deadline` (monotonic seconds)."""
        try:
            for number in numbers:
                for case, allocator in cells:
                    if time.monotonic() > deadline:
                        return
                    progress(number, case, allocator, 0.0)
                    self.record(
                        run_case(case, case.args(self.plan.size), allocator, number),
                        case,
                        allocator,
                    )
        except KeyboardInterrupt:
            self.interrupted = True

    def measured(self, case: Case, allocator: str) -> dict[int, float]:
        """Rates of one cell by round, warm-up dropped; empty when the cell failed."""
        if (case.name, allocator) in self.broken:
            return {}
        return {
            s.round: rate(case, s)
            for s in self.samples
            if s.case == case.name and s.allocator == allocator and s.round != WARM_UP
        }
