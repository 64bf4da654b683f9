# SPDX-License-Identifier: Apache-2.0
"""report.html, report.md and the pictures of a result folder.

Called by: cli, history, record, sweep. Owns: templates/.
Invariant: the page is one file, as is each picture; they load nothing, neither from the network nor from disk.
"""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from bench.ssot import plots, results
from bench.ssot.allocators import PEER
from bench.ssot.terminal import alloc_ns, counted, plain, scatter, si

IN_DOCUMENTS = ("scatter", "heat_map")  # also written as files: all allocators, all cases

_environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"], default=False),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_environment.filters["si"] = si
_environment.filters["counted"] = counted
_environment.filters["alloc_ns"] = alloc_ns
_environment.filters["plain"] = plain
_environment.filters["scatter"] = scatter
_environment.filters["mib"] = lambda kib: "–" if kib is None else f"{kib / 1024:.1f}"


def render(template: str, **values) -> str:
    """A page or text from a template of the folder templates/."""
    return _environment.get_template(template).render(**values)


def _details(result: dict, kind: str) -> dict[str, list[dict]]:
    by_case: dict[str, list[dict]] = {}
    for d in result["details"]:
        if d["kind"] == kind:
            by_case.setdefault(d["case"], []).append(d)
    order = [a["name"] for a in result["allocators"]]
    for found in by_case.values():
        found.sort(key=lambda d: order.index(d["allocator"]))
    return by_case


def _values(result: dict) -> dict:
    latency = _details(result, "latency")
    return {
        "result": result,
        "rows": results.rows(result),
        "summary": results.summary(result),
        "standings": results.standings(result),
        "foreign": results.foreign_cpus(result),
        "peers": results.named(result, PEER),
        "compared": [a for a in result["allocators"] if a["role"] in ("subject", "peer")],
        "settle": _details(result, "settle"),
        "syscalls": _details(result, "syscalls"),
        "latency": latency,
        "memory": results.memory(result),
        "cells": {(c["case"], c["allocator"]): c for c in result["cells"]},
        "failed": results.failed(result),
        "not_reached": results.not_reached(result),
    }


def _as_file(svg: str) -> str:
    """A picture of the page as a file of its own, for documents: with the theme that it had from the page."""
    start, _, rest = svg.partition(">")
    return render("picture.svg.j2", start=start, rest=rest)


def write(folder: Path, result: dict) -> None:
    """Writes report.html, report.md and the pictures of IN_DOCUMENTS into the folder."""
    values = _values(result)
    pairs = [(m["subject"], m["peer"]) for m in result["geometric_means"]]
    forests = [
        {"subject": s, "peer": p, "svg": Markup(plots.forest(result, s, p))} for s, p in pairs
    ]
    drawn = {
        "scatter": plots.scatter(result),
        "scaling": plots.scaling(result),
        "traces": plots.traces(result),
        "latency_curves": plots.latency(result),
        "heat_map": plots.heat_map(result),
    }
    pictures = {name: Markup(svg) for name, svg in drawn.items()}
    page = render("report.html.j2", forests=forests, **pictures, **values)
    (folder / "report.html").write_text(page, encoding="utf-8")
    for name in (n for n in IN_DOCUMENTS if drawn[n]):
        (folder / f"{name}.svg").write_text(_as_file(drawn[name]), encoding="utf-8")
    (folder / "report.md").write_text(render("report.md.j2", **values), encoding="utf-8")


def record(result: dict, options, folder: str) -> str:
    """Text of a decision record; `options` carries the answers of `ssot record`."""
    values = _values(result)
    runs = [c["runs"] for c in result["cells"] if not c["error"]]
    low, high = min(runs, default=0), max(runs, default=0)
    span = f"{low}" if low == high else f"{low} to {high}"
    return render("record.md.j2", o=options, folder=folder, runs=span, **values)
