# SPDX-License-Identifier: Apache-2.0
"""`ssot sweep`: nanoseconds per malloc and free over the size, 8 B to 64 MiB, and every step in it.

Called by: cli. Owns: sweep.tsv, sweep.html.
A cliff is a step between neighbouring sizes, 1 % apart, by more than --limit. The least time of all
runs counts, so that another program's turn on the processor is no step; a busy machine still may be.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from markupsafe import Markup
from rich.table import Table

from bench.ssot import allocators, places, plots, report, runner, terminal
from bench.ssot.allocators import Allocator
from bench.ssot.errors import UserError

EXAMPLE = """examples:
  ssot sweep --peers system,tcmalloc        writes sweep.html and sweep.tsv into a folder of its own
  ssot sweep --lib mine=/tmp/libmine.so --peers none --touch --max 4194304 --out /tmp/sweep"""
PROGRAM = "size_sweep"
SIZE_CLASSES = "hz3/base/size_class.h"

Curve = dict[int, float]  # bytes -> ns per pair


@dataclass(frozen=True)
class Step:
    """Neighbouring sizes whose times differ too much; `border`: where hz3's classes or boxes change."""

    allocator: str
    below: int
    above: int
    before_ns: float
    after_ns: float
    border: str

    @property
    def ratio(self) -> float:
        """How much slower the slower one is."""
        return max(self.after_ns, self.before_ns) / min(self.after_ns, self.before_ns)


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    allocators.add_arguments(p)
    p.add_argument("--min", type=int, default=8, help="smallest size in bytes (default 8)")
    p.add_argument("--max", type=int, default=64 << 20, help="largest size (default 64 MiB)")
    p.add_argument("--step", type=int, default=1, metavar="%", help="between sizes (default 1 %%)")
    p.add_argument("--depth", type=int, default=1, help="blocks live at a time (default 1)")
    p.add_argument("--touch", action="store_true", help="write a byte of each page of each block")
    p.add_argument("--runs", type=int, default=3, help="processes per allocator (default 3)")
    p.add_argument("--limit", type=float, default=2.0, help="steps above this are listed (default 2)")
    p.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: a new folder)")


def parse(output: str) -> Curve:
    """The [SIZE] lines of one run."""
    found = re.findall(r"^\[SIZE\] bytes=(\d+) ns=([\d.]+)$", output, re.MULTILINE)
    return {int(size): float(ns) for size, ns in found}


def least(curves: list[Curve]) -> Curve:
    """The least time of each size, over runs of the same sizes."""
    if len({tuple(c) for c in curves}) != 1:
        raise ValueError("curves of different sizes")
    return {size: min(c[size] for c in curves) for size in curves[0]}


def borders(header: str) -> tuple[list[int], dict[int, str]]:
    """(largest size of each class, largest size of each box with its name) out of size_class.h."""
    classes = [int(size) for size in re.findall(r"X\(\d+, \d+, (\d+), \d+, \d+\)", header)]
    last = {name: int(number) for name, number in re.findall(r"HZ3_(SMALL|TABLE)_CLASS_LAST = (\d+)", header)}
    if last.keys() != {"SMALL", "TABLE"} or len(classes) <= max(last.values()):
        raise UserError(f"{SIZE_CLASSES} no longer lists its classes and limits as sweep reads them")
    return classes, {  # class 1 is the first of the list
        classes[last["SMALL"] - 1]: "small | medium",
        classes[last["TABLE"] - 1]: "by table | computed",
        classes[-1]: "medium | large",
    }


def steps(name: str, curve: Curve, limit: float, classes: list[int], boxes: dict[int, str]) -> list[Step]:
    """Neighbours whose times differ by more than `limit`, the greatest step first."""
    found = []
    sizes = sorted(curve)
    for below, above in zip(sizes, sizes[1:]):
        between = [b for b in classes if below <= b < above]
        border = "".join(boxes.get(b, f"class of {b:,} B") for b in between[-1:])
        step = Step(name, below, above, curve[below], curve[above], border)
        if step.ratio > limit:
            found.append(step)
    return sorted(found, key=lambda s: -s.ratio)


def _arguments(options: argparse.Namespace) -> list[str]:
    return [f"min={options.min}", f"max={options.max}", f"step_percent={options.step}",
            f"depth={options.depth}", f"touch={int(options.touch)}"]


def _measure(options: argparse.Namespace, all_: list[Allocator]) -> dict[str, Curve]:
    program = str(places.built(f"bench/workloads/{PROGRAM}"))
    curves: dict[str, list[Curve]] = {a.name: [] for a in all_}
    for number in range(options.runs):
        for allocator in all_ if number % 2 == 0 else reversed(all_):
            terminal.console.print(f"run {number + 1} of {options.runs}: {allocator.name}", highlight=False)
            output, _, _, error = runner.launch([program, *_arguments(options)], allocator)
            if error:
                raise UserError(f"{PROGRAM} under {allocator.name}: {error}")
            curves[allocator.name].append(parse(output))
    return {name: least(found) for name, found in curves.items()}


def write(folder: Path, curves: dict[str, Curve], limit: float, about: str) -> list[Step]:
    """sweep.tsv and sweep.html; returns the steps."""
    classes, boxes = borders((places.ROOT / SIZE_CLASSES).read_text(encoding="utf-8"))
    found = [s for name, curve in curves.items() for s in steps(name, curve, limit, classes, boxes)]
    rows = [f"{size}\t{name}\t{ns:.2f}" for name, curve in curves.items() for size, ns in curve.items()]
    (folder / "sweep.tsv").write_text("\n".join(["bytes\tallocator\tns_per_pair", *rows]) + "\n", encoding="utf-8")
    page = report.render("sweep.html.j2", about=about, limit=limit, steps=found,
                         svg=Markup(plots.sweep(curves, classes, boxes, found)))
    (folder / "sweep.html").write_text(page, encoding="utf-8")
    return found


def _table(found: list[Step], limit: float) -> Table:
    table = Table(title=f"steps above {limit:g}× between neighbouring sizes")
    for heading in ("allocator", "from B", "to B", "ns before", "ns after", "step", "border of hz3"):
        table.add_column(heading, justify="left" if heading in ("allocator", "border of hz3") else "right")
    for s in found:
        table.add_row(s.allocator, f"{s.below:,}", f"{s.above:,}", f"{s.before_ns:,.1f}",
                      f"{s.after_ns:,.1f}", f"{s.ratio:.1f}×", s.border)
    return table


def run(options: argparse.Namespace) -> int:
    """Measures, writes the two files and lists the steps."""
    if not 0 < options.min <= options.max or min(options.runs, options.step, options.depth) < 1:
        raise UserError("--min, --runs, --step and --depth are at least 1, --max at least --min")
    if options.limit <= 1:
        raise UserError("--limit is a ratio above 1")
    all_ = allocators.subjects(options.lib, options.lanes) + allocators.peers(options.peers, options.bazel)
    sha = places.git("rev-parse", "--short", "HEAD") or "unknown"
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    folder = places.writable(options.out or places.ROOT / f"hz3_ssot_sweep_{sha}_{stamp}")
    about = f"revision {sha}, {PROGRAM} {' '.join(_arguments(options))}, least of {options.runs} runs"
    found = write(folder, _measure(options, all_), options.limit, about)
    terminal.console.print(_table(found, options.limit))
    terminal.console.print(f"{terminal.counted(len(found), 'step')}: {folder}/sweep.html", highlight=False, soft_wrap=True)
    return 0
