# SPDX-License-Identifier: Apache-2.0
"""`ssot explain CELL`: why two allocators differ in one case, side by side.

Called by: cli. Owns: nothing. Needs: valgrind; strace for the system calls.
"""

from __future__ import annotations

import argparse
import re
import shutil

from rich.table import Table

from bench.ssot import allocators, attribute, details, registry, terminal
from bench.ssot.allocators import Allocator
from bench.ssot.errors import UserError
from bench.ssot.registry import QUICK, Case
from bench.ssot.runner import run_case

EXAMPLE = "example: ssot explain mt_remote/t8/r50/guard --peers tcmalloc"
SHORTER = 10  # callgrind runs some fifty times slower than the processor
SCALED = ("iters", "pairs", "rounds", "threads_total")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    p.add_argument("cell", help="name of a case, see --list")
    allocators.add_arguments(p, "tcmalloc")
    p.add_argument("--top", type=int, default=12, help="functions shown (default 12)")


def shorter(case: Case) -> list[str]:
    """Quick arguments with a tenth of the iterations, at least one."""

    def cut(match: re.Match) -> str:
        return f"{match[1]}={max(1, int(match[2]) // SHORTER)}"

    return [re.sub(rf"^({'|'.join(SCALED)})=(\d+)$", cut, arg) for arg in case.args(QUICK)]


def _resources(case: Case, both: list[Allocator]) -> Table:
    table = Table(title=f"one quick run of {case.name}")
    table.add_column("")
    runs = []
    for allocator in both:
        table.add_column(allocator.name, justify="right")
        sample = run_case(case, case.args(QUICK), allocator, 1)
        if sample.error:
            raise UserError(f"{case.name} under {allocator.name}: {sample.error}")
        runs.append({case.metric: sample.metrics[case.metric], **sample.resources})
    for key in runs[0]:
        if key not in ("exit", "signal", "loaded"):
            table.add_row(key, *(terminal.plain(r[key]) for r in runs))
    return table


def _syscalls(case: Case, both: list[Allocator]) -> Table | str:
    """The table, or why there is none."""
    if not shutil.which("strace"):
        return "no syscall counts: install the package strace"
    counted = [details.syscalls(case, QUICK, a) for a in both]
    for allocator, found in zip(both, counted):
        if found["error"]:
            return f"no syscall counts: under strace, {allocator.name}: {found['error']}"
    table = Table(title="system calls of one quick run")
    table.add_column("call")
    for allocator in both:
        table.add_column(allocator.name, justify="right")
    calls = [c["calls"] for c in counted]
    for name in sorted(set().union(*calls), key=lambda n: -max(c.get(n, 0) for c in calls)):
        table.add_row(name, *(str(c.get(name, 0)) for c in calls))
    return table


def run(options: argparse.Namespace) -> int:
    """Prints resources, system calls and instructions of both allocators."""
    case = registry.by_name(options.cell)
    if case.is_real:
        raise UserError(f"explain works on workloads; '{case.name}' is a real program")
    both = allocators.subjects(options.lib, options.lanes) + allocators.peers(options.peers, options.bazel)
    if len(both) != 2:
        names = ", ".join(a.name for a in both)
        raise UserError(f"explain compares two allocators, not {names}: use --lanes and --peers")
    terminal.console.print(_resources(case, both))
    terminal.console.print(_syscalls(case, both), markup=False)
    arguments = shorter(case)
    profiles = {a.name: attribute.callgrind(case.program, arguments, a) for a in both}
    attribute.print_entries("callgrind: " + " ".join(arguments), profiles)
    for name, profile in profiles.items():
        if not profile.error:
            terminal.console.print(attribute.function_table(name, profile, options.top))
    return 1 if any(p.error for p in profiles.values()) else 0
