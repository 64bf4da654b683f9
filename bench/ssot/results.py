# SPDX-License-Identifier: Apache-2.0
"""Turns the samples of a session into cells, comparisons and the files of the result folder.

Called by: cli, compare, gate, history, plots, record, report, terminal.
Owns: the schema of results.json (SCHEMA) and results.tsv.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy import stats as sps

from bench.ssot import stats
from bench.ssot.allocators import CONTROL, FLOOR, PEER, SUBJECT
from bench.ssot.errors import UserError
from bench.ssot.registry import Case
from bench.ssot.runner import WARM_UP, Session

SCHEMA = "hz3.ssot/1"
KEYS = frozenset(
    "facts plan allocators cases cells comparisons geometric_means control_verdict details samples".split()
)  # of a result, which what reads it relies on
NOT_REACHED = "not reached"  # the error of a cell that an interrupted run has no number for


def _floor_ns(session: Session, case: Case) -> float | None:
    """Nanoseconds per op of the harness itself, at its least disturbed; None without a floor."""
    rates = list(session.measured(case, case.floor).values())
    return 1e9 / max(rates) if rates else None


def _cell(session: Session, case: Case, allocator: str, floor_ns: float | None) -> dict:
    """Medians of one (case, allocator); rates per second, times in ns, memory in KiB."""
    rounds = session.measured(case, allocator)
    kept = [
        s
        for s in session.samples
        if s.case == case.name and s.allocator == allocator and (s.round != WARM_UP or not s.ok)
    ]
    cell: dict = {"case": case.name, "allocator": allocator, "runs": len(rounds), "error": ""}
    if not rounds:
        cell["error"] = next((s.error for s in kept if s.error), NOT_REACHED)
        return cell
    rates = list(rounds.values())
    ns = 1e9 / float(np.median(rates))
    cell["rate"] = float(np.median(rates))
    if len(rates) > 1:
        cell["cv"] = stats.cv(rates)
    cell["noisy"] = stats.noisy(rates)
    if case.metric == "ops/s":
        cell["ns_per_op"] = ns
        if floor_ns is not None:
            cell["floor_ns_per_op"] = floor_ns
            cell["allocator_ns_per_op"] = ns - floor_ns
    for key in kept[0].resources:
        cell[key] = float(np.median([s.resources[key] for s in kept if key in s.resources]))
    return cell


def compare_all(session: Session, subject: str, peer: str) -> list[stats.Comparison]:
    """One judged family: the subject against the peer in every case that both finished."""
    found = []
    for case in session.plan.cases:
        mine, theirs = session.measured(case, subject), session.measured(case, peer)
        common = sorted(mine.keys() & theirs.keys())
        if common:
            pairs = [(mine[r], theirs[r]) for r in common]
            found.append(
                stats.compare_pairs(case.name, subject, peer, pairs, session.plan.seed & 0x7FFFFFFF)
            )
    stats.judge(found)
    return found


def build(session: Session, details: list[dict] | None = None) -> dict:
    """The content of results.json."""
    plan = session.plan
    by_role = {
        role: [a.name for a in plan.allocators if a.role == role]
        for role in (SUBJECT, PEER, CONTROL)
    }
    cells = []
    for case in plan.cases:
        floor_ns = _floor_ns(session, case)
        for allocator in plan.allocators:
            if allocator.role != FLOOR:
                cells.append(_cell(session, case, allocator.name, floor_ns))
    pairs = [(s, p) for s in by_role[SUBJECT] for p in by_role[PEER]]
    families = [compare_all(session, s, p) for s, p in pairs]
    control = [
        c for name in by_role[CONTROL] for c in compare_all(session, by_role[SUBJECT][0], name)
    ]
    means = []
    for (subject, peer), family in zip(pairs, families):
        if family:
            mean, low, high = stats.geometric_mean(family)
            means.append(dict(subject=subject, peer=peer, ratio=mean, low=low, high=high))
    return {
        "schema": SCHEMA,
        "facts": session.facts,
        "plan": plan.fingerprint(),
        "interrupted": session.interrupted,
        "allocators": [a.as_dict() for a in plan.allocators],
        "cases": [
            dict(name=c.name, stresses=c.stresses, args=c.sizes[plan.size], unit=c.unit,
                 metric=c.metric, higher_is_better=c.higher_is_better, threads=c.threads)
            for c in plan.cases
        ],
        "cells": cells,
        "comparisons": [c.as_dict() for family in families for c in family],
        "geometric_means": means,
        "control": [c.as_dict() for c in control],
        "control_verdict": control_verdict(control),
        "details": details or [],
        "samples": [
            dict(case=s.case, allocator=s.allocator, round=s.round, error=s.error,
                 metrics=s.metrics, resources=s.resources)
            for s in session.samples
        ],
    }


def control_verdict(control: list[stats.Comparison]) -> str:
    """TIE when the same library against itself shows no difference anywhere."""
    judged = [c for c in control if c.verdict != "FEW"]
    if not judged:
        return "none"
    return "TIE" if all(c.verdict == "TIE" for c in judged) else "DIFFERENT"


def foreign_cpus(result: dict) -> float | None:
    """Processors' worth of work that others did in the busiest round; None where nobody looked. Of a round, not
    of a run: the kernel counts in ticks, which of a short run are more than what they are to measure."""
    used: dict[int, float] = defaultdict(float)
    wall: dict[int, float] = defaultdict(float)
    for s in result["samples"]:
        if s["round"] != WARM_UP and {"foreign_cpu_s", "wall_s"} <= s["resources"].keys():
            used[s["round"]] += s["resources"]["foreign_cpu_s"]
            wall[s["round"]] += s["resources"]["wall_s"]
    return max((used[number] / wall[number] for number in used), default=None)


def rows(result: dict) -> list[dict]:
    """One row per case and subject with a number, the worst ratio first; `against` is by peer."""
    against: dict[tuple[str, str], dict[str, dict]] = {}
    for c in result["comparisons"]:
        against.setdefault((c["case"], c["subject"]), {})[c["peer"]] = c
    subjects = named(result, SUBJECT)
    found = [
        {"cell": c, "against": against.get((c["case"], c["allocator"]), {})}
        for c in result["cells"]
        if c["allocator"] in subjects and not c["error"]
    ]
    # Without a peer there is no ratio, and the order stays that of the plan.
    return sorted(found, key=lambda r: min((c["ratio"] for c in r["against"].values()), default=math.inf))


UNTOLD = ("threads", "ops", "time")  # arguments of a memory case, and what its rate comes from


def memory(result: dict) -> list[dict]:
    """What the memory cases found: a row for each case and figure, as the program names it; `values` is by allocator."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for d in result["details"]:
        if d["kind"] == "memory" and not d["error"]:
            for figure, value in d["metrics"].items():
                if "." not in figure and figure not in UNTOLD:  # with a point: of another line than the program's own
                    found[d["case"], figure][d["allocator"]] = value
    return [{"case": case, "figure": figure, "values": values} for (case, figure), values in found.items()]


def has_failed(entry: dict) -> bool:
    """Whether the cell or detail ran and gave no number."""
    return entry["error"] not in ("", NOT_REACHED)


def failed(result: dict) -> list[dict]:
    return [entry for entry in result["cells"] + result["details"] if has_failed(entry)]


def not_reached(result: dict) -> str:
    """'tiny (system), app': what an interrupted run has no number for, whole cases by name alone."""
    missing: dict[str, list[str]] = {}
    for cell in result["cells"]:
        names = missing.setdefault(cell["case"], [])
        if cell["error"] == NOT_REACHED:
            names.append(cell["allocator"])
    rivals = len({c["allocator"] for c in result["cells"]})
    return ", ".join(
        case if len(names) == rivals else f"{case} ({', '.join(names)})"
        for case, names in missing.items() if names
    )


def summary(result: dict) -> list[dict]:
    """Geometric mean and counts of verdicts for every (subject, peer)."""
    found = []
    for m in result["geometric_means"]:
        verdicts = [
            c["verdict"]
            for c in result["comparisons"]
            if (c["subject"], c["peer"]) == (m["subject"], m["peer"])
        ]
        counts = {word: verdicts.count(word) for word in ("WIN", "TIE", "LOSS", "FEW")}
        spread = f"{m['low']:.3f}–{m['high']:.3f}" if len(verdicts) >= stats.MIN_CASES else ""
        found.append({**m, **counts, "cases": len(verdicts), "spread": spread})
    return found


def named(result: dict, *roles: str) -> list[str]:
    """The names of the allocators of these roles, in the order of the plan."""
    return [a["name"] for a in result["allocators"] if a["role"] in roles]


def compared(result: dict) -> list[str]:
    """The names of subjects and peers."""
    return named(result, SUBJECT, PEER)


def standings(result: dict) -> list[dict]:
    """Every subject and peer, fastest first: `points`, its (time, peak RSS) in each case as multiples
    of the best allocator of that case, and `time` and `rss`, their geometric means."""
    names = compared(result)
    by_case: dict[str, list[dict]] = defaultdict(list)
    for cell in result["cells"]:
        if not cell["error"] and cell["allocator"] in names and cell.get("peak_rss_kib"):
            by_case[cell["case"]].append(cell)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for cells in by_case.values():
        best_rate = max(c["rate"] for c in cells)
        best_rss = min(c["peak_rss_kib"] for c in cells)
        for c in cells:
            points[c["allocator"]].append((best_rate / c["rate"], c["peak_rss_kib"] / best_rss))
    found = []
    for name in (n for n in names if n in points):
        time, rss = sps.gmean(points[name])
        found.append({"allocator": name, "points": points[name], "time": float(time), "rss": float(rss)})
    return sorted(found, key=lambda s: s["time"])


TSV_COLUMNS = (
    "case allocator runs rate cv ns_per_op allocator_ns_per_op peak_rss_kib minor_faults "
    "major_faults voluntary_switches involuntary_switches error"
).split()


def write(folder: Path, result: dict) -> None:
    """Writes results.json and results.tsv into the folder."""
    (folder / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    rows = ["\t".join(TSV_COLUMNS)]
    for cell in result["cells"]:
        rows.append("\t".join(_tsv(cell.get(column, "")) for column in TSV_COLUMNS))
    (folder / "results.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _tsv(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read(folder: Path) -> dict:
    """results.json of a folder, its schema and keys checked."""
    file = folder / "results.json" if folder.is_dir() else folder
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        why = _why_no_result(result)
    except (OSError, ValueError) as e:
        why = str(e)
    if why:
        raise UserError(f"{file} is not a result of this tool ({why}): name the folder that a run has left behind")
    return result


def _why_no_result(content) -> str:
    if not isinstance(content, dict) or "schema" not in content:
        return "without a schema"
    if content["schema"] != SCHEMA:
        return f"of schema {content['schema']}, this tool reads {SCHEMA}"
    missing = sorted(KEYS - content.keys())
    return f"without '{missing[0]}'" if missing else ""


def planned_seed(folder: Path) -> int:
    """The order seed of an interrupted session."""
    try:
        return json.loads((folder / "plan.json").read_text(encoding="utf-8"))["plan"]["seed"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--resume {folder}: no plan.json of this tool in there") from e
