# SPDX-License-Identifier: Apache-2.0
"""`ssot compare OLD NEW`: two result folders against each other.

Called by: cli. Owns: nothing.
Invariant: runs of two invocations are not pairs, so they are compared as independent samples,
and what libraries with the same sha256 moved by is shown as the drift of the machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from rich.table import Table

from bench.ssot import results, stats, terminal
from bench.ssot.errors import UserError
from bench.ssot.runner import WARM_UP

EXAMPLE = "example: ssot compare hz3_ssot_1a2b3c4_20260101_120000 hz3_ssot_5d6e7f8_20260102_120000"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    p.add_argument("old", type=Path, help="result folder or results.json")
    p.add_argument("new", type=Path, help="result folder or results.json")


def _rates(result: dict) -> dict[tuple[str, str], list[float]]:
    metric = {c["name"]: c["metric"] for c in result["cases"]}
    up = {c["name"]: c["higher_is_better"] for c in result["cases"]}
    rivals = set(results.compared(result))
    # Of a cell that failed once nothing counts, as in the run itself.
    failed = {(s["case"], s["allocator"]) for s in result["samples"] if s["error"]}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for s in result["samples"]:
        cell = (s["case"], s["allocator"])
        if s["round"] != WARM_UP and cell not in failed and s["allocator"] in rivals:
            value = s["metrics"][metric[s["case"]]]
            found[cell].append(value if up[s["case"]] else 1 / value)
    return found


def compare(old: dict, new: dict) -> tuple[list[stats.Comparison], float | None]:
    """(judged new ÷ old of every common cell, geometric mean drift of unchanged libraries)."""
    sizes = dict(map(tuple, old["plan"]["cases"]))
    same_work = {name for name, args in new["plan"]["cases"] if sizes.get(name) == args}
    before, after = _rates(old), _rates(new)
    found = [
        stats.compare_independent(*key, before[key], after[key])
        for key in before.keys() & after.keys()
        if key[0] in same_work and min(len(before[key]), len(after[key])) >= 2
    ]
    if not found:
        raise UserError("the two results have no cell of the same work and allocator in common")
    stats.judge(found)
    shas = {a["name"]: a["sha256"] for a in old["allocators"]}
    unchanged = {a["name"] for a in new["allocators"] if shas.get(a["name"]) == a["sha256"]}
    steady = [c for c in found if c.subject in unchanged]
    drift = stats.geometric_mean(steady)[0] if steady else None
    return found, drift


def run(options: argparse.Namespace) -> int:
    """Prints the table, worst first."""
    old, new = results.read(options.old), results.read(options.new)
    found, drift = compare(old, new)
    for key in ("cpu", "cpus", "kernel", "glibc"):
        if old["facts"][key] != new["facts"][key]:
            terminal.console.print(
                f"[red]not the same machine[/]: {key} {old['facts'][key]} → {new['facts'][key]}"
            )
    table = Table(title=f"{new['facts']['git']} ÷ {old['facts']['git']}, worst first")
    for heading in ("case", "allocator", "new ÷ old", "95 % interval", "verdict"):
        table.add_column(heading, no_wrap=True)
    for c in sorted(found, key=lambda c: c.ratio):
        style = terminal.STYLE[c.verdict]
        table.add_row(c.case, c.subject, f"{c.ratio:.3f}", f"{c.low:.3f}–{c.high:.3f}",
                      f"[{style}]{c.verdict}[/]")
    terminal.console.print(table)
    if drift is not None:
        terminal.console.print(f"unchanged libraries moved by {drift - 1:+.2%}: the machine's drift")
    return 0
