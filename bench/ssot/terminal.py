# SPDX-License-Identifier: Apache-2.0
"""What the user sees in the terminal: progress, the verdict table, the list of cases.

Called by: cli and its commands, gate, report. Owns: nothing.
"""

from __future__ import annotations

import os
from typing import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.ssot import results
from bench.ssot.allocators import PEER, SUBJECT, Allocator
from bench.ssot.registry import Case
from bench.ssot.runner import Plan

# Into a pipe or a file, rich would fold the table at 80 columns; with every peer and both lanes it takes 230.
console = Console(width=None if os.isatty(1) else 240)
STYLE = {"WIN": "green", "LOSS": "red", "TIE": "yellow", "FEW": "dim"}


class _Progress:
    """A bar on a terminal, which `_step` moves; elsewhere `_step` prints a line now and then."""

    def __init__(self, total: float | None = None):
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console,
            transient=True, disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> Callable[..., None]:
        self.bar.start()
        return self._step

    def __exit__(self, *_) -> None:
        self.bar.stop()


class DetailProgress(_Progress):
    """A bar over the separate runs of a kind on a terminal; one line per case elsewhere."""

    last = ("", "")

    def _step(self, kind: str, number: int, of: int, case: Case, allocator: Allocator) -> None:
        what = f"{kind}: {number} of {counted(of, 'separate run')}  {case.name}"
        if not console.is_terminal and self.last != (kind, case.name):
            console.print(what, highlight=False)
        self.last = (kind, case.name)
        self.bar.update(
            self.task, completed=number - 1, total=of, description=f"{what}  {allocator.name}"
        )


class RoundProgress(_Progress):
    """A bar over cells on a terminal; one line per round elsewhere."""

    def __init__(self, plan: Plan, title: str):
        self.cells = len(plan.cases) * len(plan.allocators)
        self.rounds, self.budget_s = plan.rounds, plan.budget_s
        self.title, self.last_round, self.done = title, -1, 0
        super().__init__(self.cells * (plan.rounds + 1))

    def _step(self, number: int, case: Case, allocator: Allocator, elapsed_s: float) -> None:
        what = "warm-up" if number == 0 else f"round {number} of at most {self.rounds}"
        if not console.is_terminal and number != self.last_round:
            console.print(f"{self.title}: {what} ({elapsed_s:.0f} s)", highlight=False)
        self.last_round = number
        share = elapsed_s / self.budget_s if self.budget_s else 0.0
        done = max(self.done / (self.cells * (self.rounds + 1)), share)
        self.bar.update(
            self.task,
            completed=done * self.cells * (self.rounds + 1),
            description=f"{self.title}: {what}  {case.name}  {allocator.name}",
        )
        self.done += 1


def si(value: float) -> str:
    """12345678 -> '12.3M'."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def counted(number: int, noun: str) -> str:
    """'1 case', '2 cases'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def plain(value: float | None) -> str:
    """1234.5 -> '1,234.5'; '–' where there is none."""
    return "–" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")


def alloc_ns(cell: dict) -> str:
    """Nanoseconds per op without those of the floor; '12.3 whole' where no floor was measured, '–' where no
    ops are counted."""
    if "allocator_ns_per_op" in cell:
        return f"{cell['allocator_ns_per_op']:.1f}"
    return f"{cell['ns_per_op']:.1f} whole" if "ns_per_op" in cell else "–"


def scatter(cell: dict) -> str:
    """The coefficient of variation in per cent; '–' for a single run, which has none."""
    return f"{100 * cell['cv']:.1f} %{' noisy' if cell['noisy'] else ''}" if "cv" in cell else "–"


def _verdict(comparison: dict | None, intervals: bool) -> str:
    if comparison is None:
        return "[dim]-[/]"
    c = comparison
    span = f" [dim]\\[{c['low']:.3f}–{c['high']:.3f}][/]" if intervals else ""
    style = STYLE[c["verdict"]]
    return f"[{style}]{c['ratio']:.3f}{span} [{style}]{c['verdict']}[/][/]"


def print_result(result: dict) -> None:
    """The table of results.rows, that of the memory cases, then geometric means and the control."""
    rows = results.rows(result)
    peers, subjects = results.named(result, PEER), results.named(result, SUBJECT)
    table = Table(title="subject ÷ peer (above 1: the subject is faster), worst first" if peers else None)
    for heading in ("case", "subject"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rate", "alloc ns/op", "CV", "peak RSS MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"vs {peer}", no_wrap=True)
    for row in rows:
        cell = row["cell"]
        table.add_row(
            cell["case"],
            cell["allocator"],
            si(cell["rate"]) + "/s",
            alloc_ns(cell),
            f"[red]{scatter(cell)}[/]" if cell["noisy"] else scatter(cell),
            f"{cell['peak_rss_kib'] / 1024:.1f}",
            *(_verdict(row["against"].get(p), len(peers) <= 3) for p in peers),
        )
    if rows:
        console.print(table)
    _print_memory(result)
    _print_footer(result, subjects)


def _print_memory(result: dict) -> None:
    found, names = results.memory(result), results.compared(result)
    if not found:
        return
    table = Table(title="memory over time, as each program prints it")
    for heading in ("case", "figure"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        table.add_row(row["case"], row["figure"], *(plain(row["values"].get(name)) for name in names))
    console.print(table)


def _print_standings(result: dict) -> None:
    found = results.standings(result)
    if len(found) < 2:
        return
    table = Table(title="geometric means over the cases, 1.00 the best of each case")
    table.add_column("allocator", no_wrap=True)
    for heading in ("time", "peak RSS"):
        table.add_column(heading, justify="right", no_wrap=True)
    for s in found:
        table.add_row(s["allocator"], f"{s['time']:.2f}×", f"{s['rss']:.2f}×")
    console.print(table)


def _print_footer(result: dict, subjects: list[str]) -> None:
    _print_standings(result)
    for m in results.summary(result):
        spread = f", spread over the cases {m['spread']}" if m["spread"] else ""
        console.print(
            f"geometric mean {m['subject']} ÷ {m['peer']} of {counted(m['cases'], 'case')}: "
            f"[bold]{m['ratio']:.3f}[/]{spread}",
            highlight=False,
        )
    if result["control_verdict"] != "none":
        style = "green" if result["control_verdict"] == "TIE" else "red"
        console.print(
            f"A/A control ({subjects[0]} against itself): [{style}]{result['control_verdict']}[/]"
        )
    if (foreign := results.foreign_cpus(result)) is not None:
        console.print(f"others used {foreign:.2f} processors in the busiest round", highlight=False)
    for a in result["allocators"]:
        if a["note"]:
            console.print(f"[dim]{a['name']} {a['note']}[/]")
    for cell in results.failed(result):
        console.print(
            f"[red]FAILED[/] {cell['case']} under {cell['allocator']}: {escape(cell['error'])}",
            highlight=False,
        )
    if missing := results.not_reached(result):
        console.print(f"not reached: {missing}", markup=False, highlight=False)


def print_cases(cases: list[Case], size: str) -> None:
    """The table of --list."""
    table = Table(title=f"{counted(len(cases), 'case')}, arguments of size '{size}'")
    for heading in ("case", "sets", "program and arguments", "unit", "what it stresses"):
        table.add_column(heading)
    for c in cases:
        sets = ",".join(s for s in ("quick", "default", "full") if s in c.sets)
        table.add_row(c.name, sets, f"{c.program} {c.sizes[size]}", c.unit, c.stresses)
    console.print(table)
