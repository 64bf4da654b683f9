# SPDX-License-Identifier: Apache-2.0
"""`ssot record`: writes a decision record with the table that a result folder holds.

Called by: cli. Owns: docs/decisions/NNNN-title.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench.ssot import places, report, results, terminal
from bench.ssot.errors import UserError

EXAMPLE = """example: ssot record --id 0004 --title 'LTO on or off' --question 'Does LTO pay?' \\
           --predicted '+2 % geometric mean' --decision 'NO-GO: off' hz3_ssot_1a2b3c4_20260101_120000"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    p.add_argument("folder", nargs="?", type=Path, help="result folder (default: the newest)")
    p.add_argument("--id", required=True, metavar="NNNN", help="number of the record")
    p.add_argument("--title", required=True, help="a few words; also the file name")
    p.add_argument("--question", required=True, help="what was to be decided")
    p.add_argument("--predicted", required=True, help="the number expected before measuring")
    p.add_argument("--decision", required=True, help="GO or NO-GO and what follows")
    p.add_argument("--revisit", default="the workloads or the machine change", help="when to ask again")
    p.add_argument("--force", action="store_true", help="replace an existing record")


def newest() -> Path:
    """The latest result folder of the checkout."""
    found = sorted(places.ROOT.glob("hz3_ssot_*/results.json"), key=lambda f: f.stat().st_mtime)
    if not found:
        raise UserError("no result folder in the checkout: measure first, or name the folder")
    return found[-1].parent


def run(options: argparse.Namespace) -> int:
    """Writes the record and says where."""
    if not re.fullmatch(r"\d{4}", options.id):
        raise UserError(f"--id '{options.id}': write four digits, as in 0004")
    folder = options.folder or newest()
    result = results.read(folder)
    slug = re.sub(r"[^a-z0-9]+", "-", options.title.lower()).strip("-")
    target = places.ROOT / "docs" / "decisions" / f"{options.id}-{slug}.md"
    taken = [f for f in target.parent.glob(f"{options.id}-*.md") if f != target or not options.force]
    if taken:
        raise UserError(f"{taken[0].name} exists: take another --id, or --force for the same title")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report.record(result, options, folder.resolve().name), encoding="utf-8")
    terminal.console.print(f"wrote {target.relative_to(places.ROOT)}", highlight=False)
    return 0
