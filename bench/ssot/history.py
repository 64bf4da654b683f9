# SPDX-License-Identifier: Apache-2.0
"""`ssot history DIR`: the trend over every result folder below DIR, as history.html.

Called by: cli. Owns: history.html.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from markupsafe import Markup

from bench.ssot import plots, report, results, stats, terminal
from bench.ssot.errors import UserError

EXAMPLE = "example: ssot history . (reads every hz3_ssot_*/results.json below, writes history.html)"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    p.add_argument("dir", type=Path, help="folder that holds result folders, or one of them")


def load(folder: Path) -> list[dict]:
    """All results in a result folder or below another, oldest first."""
    files = [f for f in sorted(folder.resolve().glob("**/results.json")) if f.parent.match("hz3_ssot_*")]
    if not files:
        raise UserError(f"no hz3_ssot_*/results.json below {folder}: measure something first")
    return sorted((results.read(f) for f in files), key=lambda r: r["facts"]["date"])


def series_of(found: list[dict]) -> dict[str, list[tuple[str, float, float, float]]]:
    """'subject ÷ peer' -> [(commit, geometric mean, low, high)] over the results."""
    series: dict[str, list[tuple[str, float, float, float]]] = defaultdict(list)
    for result in found:
        for m in result["geometric_means"]:
            point = (result["facts"]["git"], m["ratio"], m["low"], m["high"])
            series[f"{m['subject']} ÷ {m['peer']}"].append(point)
    return {name: points for name, points in series.items() if len(points) >= 2}


def changed_cases(found: list[dict]) -> list[dict]:
    """Level shifts of single cases: case, pair, commit, ratio before and after."""
    cells: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    for result in found:
        for c in result["comparisons"]:
            key = (c["case"], c["subject"], c["peer"])
            cells[key].append((result["facts"]["git"], c["ratio"]))
    changes = []
    for (case, subject, peer), points in cells.items():
        ratios = [ratio for _, ratio in points]
        for at in stats.change_points(ratios, stats.SHIFT_ALPHA / len(cells)):
            changes.append(
                {"case": case, "pair": f"{subject} ÷ {peer}", "commit": points[at][0],
                 "before": ratios[at - 1], "after": ratios[at]}
            )
    return sorted(changes, key=lambda c: c["after"] / c["before"])


def run(options: argparse.Namespace) -> int:
    """Writes history.html beside the results."""
    found = load(options.dir)
    series = series_of(found)
    changes = {
        name: stats.change_points([p[1] for p in pts], stats.SHIFT_ALPHA / len(series))
        for name, pts in series.items()
    }
    page = report.render(
        "history.html.j2",
        results=found,
        svg=Markup(plots.history(series, changes)),
        changed=changed_cases(found),
    )
    target = options.dir / "history.html"
    target.write_text(page, encoding="utf-8")
    terminal.console.print(f"{terminal.counted(len(found), 'result')}, "
                           f"{terminal.counted(sum(map(len, changes.values())), 'level shift')} "
                           f"of geometric means: {target}", highlight=False, soft_wrap=True)
    return 0
