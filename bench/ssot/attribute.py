# SPDX-License-Identifier: Apache-2.0
"""`ssot attribute`: instructions per malloc and per free, by path and by function.

Called by: cli, explain; also //bench:attribute. Owns: nothing.
Needs: valgrind (callgrind counts exactly, but counts only instructions); perf where the
machine has hardware counters, for cycles, branch and cache misses.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from bench.ssot import allocators, places, terminal
from bench.ssot.allocators import BASE_ENV, Allocator
from bench.ssot.errors import UserError
from bench.ssot.runner import parse_output

EXAMPLE = """example: ssot attribute --lanes fast --peers tcmalloc --path hit,refill
         bazel run //bench:attribute -- --peers system,tcmalloc"""

# What each path runs: long enough that starting the process does not count.
PATHS = {
    "hit": ("lifo", "pairs=300000 size=64 depth=1"),
    "refill": ("lifo", "pairs=300000 size=64 depth=1600"),
    "mixed": ("random_mixed", "iters=300000 ws=400 min=16 max=32768"),
    "remote": ("mt_remote", "threads=2 iters=60000 ws=400 min=16 max=2048 remote_pct=50"),
    "large": ("large_blocks", "iters=60 buffers=8 min_mib=1 max_mib=3"),
}
ENTRIES = ("malloc", "calloc", "realloc", "free")


@dataclass
class Profile:
    """Instruction counts of one run. `entry` maps malloc/free/… to (calls, instructions with
    everything called below); `own` maps functions of the library to their own instructions."""

    entry: dict[str, tuple[int, int]] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def per_call(self, name: str) -> float | None:
        """Instructions per call of an entry point."""
        calls, cost = self.entry.get(name, (0, 0))
        return cost / calls if calls else None

    @property
    def operations(self) -> int:
        """Calls of all entry points."""
        return sum(calls for calls, _ in self.entry.values())


class _Names:
    """Callgrind's name compression: '(3) text' defines, '(3)' refers."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def get(self, text: str) -> str:
        match = re.match(r"\((\d+)\)(?: (.*))?$", text)
        if not match:
            return text
        if match[2] is not None:
            self.known[match[1]] = match[2]
        return self.known[match[1]]


def _inside(ob: str, function: str, library: str) -> bool:
    """Code in a section of its own (gperftools' entry points) has a name but no object."""
    return library in ob or (ob == "???" and not function.startswith("0x"))


def parse_callgrind(text: str, program: str, library: str, aliases: dict[str, str]) -> Profile:
    """Counts calls that `program` (a path) makes into `library` (a substring of a path);
    `aliases` maps other names of an entry point to the one in ENTRIES."""
    objects, functions = _Names(), _Names()
    own: dict[str, int] = defaultdict(int)
    calls: dict[str, int] = defaultdict(int)
    costs: dict[str, int] = defaultdict(int)
    here = there = function = callee = ""
    entered = 0  # calls of the line just read; the next line has their inclusive cost
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key == "ob":
            here = there = objects.get(value)
        elif key == "fn":
            function = functions.get(value)
        elif key == "cob":
            there = objects.get(value)
        elif key == "cfn":
            callee = functions.get(value)
        elif key == "calls":
            entered = int(value.split()[0])
        elif line and line[0] in "0123456789+-*":
            cost = int(line.split()[1])
            if not entered:
                if _inside(here, function, library):
                    own[function] += cost
            elif here == program and _inside(there, callee, library):
                name = aliases.get(callee.split("'")[0])
                if name:
                    calls[name] += entered
                    costs[name] += cost
            entered, there = 0, here
    return Profile({n: (calls[n], costs[n]) for n in calls}, dict(own))


def entry_aliases(library: Path) -> dict[str, str]:
    """Every symbol that has the address of malloc, free, …: callgrind reports any one of them."""
    done = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True,
                          text=True, check=True)
    fields = [line.split() for line in done.stdout.splitlines()]
    address = {f[-1].split("@")[0]: f[0] for f in fields if len(f) == 3}
    return {
        symbol: entry
        for entry in ENTRIES
        for symbol, where in address.items()
        if where == address.get(entry)
    }


def libc_path() -> Path:
    """The C library that this process runs on."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return Path(next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line))


def reason(stderr: str) -> str:
    """What a failed program said itself, or else valgrind's last line."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if not line.startswith("==")), lines[-1])


def callgrind(program: str, arguments: list[str], allocator: Allocator) -> Profile:
    """Profiles one run of a workload under an allocator."""
    if not shutil.which("valgrind"):
        raise UserError("callgrind is missing: install the package valgrind")
    binary = places.built(f"bench/workloads/{program}").resolve()
    library = allocator.path or str(libc_path())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind.out"
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", str(binary), *arguments],
            env={**BASE_ENV, **allocator.child_env()}, capture_output=True, text=True, check=False,
        )
        if done.returncode != 0 or not out.exists():
            return Profile(error=f"exit status {done.returncode}: {reason(done.stderr)}")
        profile = parse_callgrind(out.read_text(encoding="utf-8"), str(binary), library,
                                  entry_aliases(Path(library)))
    if not profile.entry:
        profile.error = "never called: the preload did not take effect"
    return profile


PERF_EVENTS = ("instructions:u", "cycles:u", "branch-misses:u", "cache-misses:u")


def parse_perf(text: str) -> dict[str, float]:
    """Counts by event from `perf stat -x,`; events without a counter are left out."""
    counts = {}
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and re.fullmatch(r"[\d.]+", fields[0]):
            counts[fields[2]] = float(fields[0])
    return counts


def has_counters() -> bool:
    """True when perf can count instructions here."""
    if not shutil.which("perf"):
        return False
    done = subprocess.run(
        ["perf", "stat", "-x,", "-e", PERF_EVENTS[0], "true"], capture_output=True, text=True,
        check=False,
    )
    return PERF_EVENTS[0] in parse_perf(done.stderr)


def perf(program: str, arguments: list[str], allocator: Allocator) -> dict[str, float]:
    """Events per operation of one run, IPC and ops/s, from the hardware counters."""
    settings = [f"{k}={v}" for k, v in allocator.child_env().items()]
    binary = str(places.built(f"bench/workloads/{program}"))
    done = subprocess.run(
        ["perf", "stat", "-x,", "-e", ",".join(PERF_EVENTS), "env", *settings, binary, *arguments],
        env=BASE_ENV, capture_output=True, text=True, check=False,
    )
    numbers = parse_output(done.stdout, program)
    counts = parse_perf(done.stderr)
    if "ops" not in numbers or not counts:
        return {}
    found = {f"{event.split(':')[0]}/op": n / numbers["ops"] for event, n in counts.items()}
    if "instructions:u" in counts and counts.get("cycles:u"):
        found["IPC"] = counts["instructions:u"] / counts["cycles:u"]
    return {"ops/s": numbers["ops/s"], **found}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    allocators.add_arguments(p, "tcmalloc")
    p.add_argument("--path", default=",".join(PATHS), metavar="NAMES", help="default %(default)s")
    p.add_argument("--top", type=int, default=8, help="functions shown per library (default 8)")


def _cell(value: float | None, base: float | None) -> str:
    if value is None:
        return "-"
    change = f" ({value / base - 1:+.0%})" if base else ""
    return f"{value:.1f}{change}"


def print_entries(title: str, profiles: dict[str, Profile]) -> None:
    """Instructions per call, each allocator's difference to the first in percent; then what failed, and why."""
    entries = [e for e in ENTRIES if any(e in p.entry for p in profiles.values())]
    table = Table(title=title)
    table.add_column("instructions per", no_wrap=True)
    for entry in entries:
        table.add_column(entry, justify="right", no_wrap=True)
    first = next(iter(profiles.values()))
    for name, profile in profiles.items():
        base = None if profile is first else first
        table.add_row(name, *(
            "failed" if profile.error else _cell(profile.per_call(e), base and base.per_call(e)) for e in entries
        ))
    terminal.console.print(table)
    for name, profile in profiles.items():
        if profile.error:
            terminal.console.print(f"{name} does not run under callgrind: {profile.error}", markup=False)


def function_table(name: str, profile: Profile, top: int) -> Table:
    """Own instructions of the library's functions, per operation."""
    table = Table(title=f"{name}: own instructions")
    table.add_column("function", no_wrap=True)
    table.add_column("per malloc or free", justify="right")
    ranked = sorted(profile.own.items(), key=lambda item: -item[1])[:top]
    for function, cost in ranked:
        table.add_row(function, f"{cost / max(1, profile.operations):.2f}")
    return table


def _print_counters(program: str, arguments: list[str], found: list[Allocator]) -> None:
    rows = {a.name: perf(program, arguments, a) for a in found}
    table = Table(title="hardware counters")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    first = next(iter(rows.values()))
    for key in first:
        table.add_row(key, *(
            _cell(r.get(key), None if r is first else first[key]) for r in rows.values()
        ))
    terminal.console.print(table)


def run(options: argparse.Namespace) -> int:
    """Profiles every path under every allocator; status 1 when a run failed."""
    chosen = options.path.split(",")
    for path in chosen:
        if path not in PATHS:
            raise UserError(f"unknown path '{path}': known are {', '.join(PATHS)}")
    found = allocators.subjects(options.lib, options.lanes) + allocators.peers(options.peers, options.bazel)
    counters = has_counters()
    failed = False
    for path in chosen:
        program, arguments = PATHS[path]
        terminal.console.rule(f"{path}: {program} {arguments}")
        profiles = {a.name: callgrind(program, arguments.split(), a) for a in found}
        failed |= any(p.error for p in profiles.values())
        print_entries("callgrind", profiles)
        for name, profile in profiles.items():
            if not profile.error:
                terminal.console.print(function_table(name, profile, options.top))
        if counters:
            _print_counters(program, arguments.split(), found)
    if not counters:
        terminal.console.print("no hardware counters here: cycles and misses are left out")
    return 1 if failed else 0
