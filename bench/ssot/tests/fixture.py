# SPDX-License-Identifier: Apache-2.0
"""Sessions with invented samples, so that reports and tables are tested without measuring.

Called by: the tests of this folder. Owns: nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.ssot import details, machine, registry, results
from bench.ssot.allocators import CONTROL, PEER, SUBJECT, Allocator
from bench.ssot.runner import Plan, Sample, Session

SPEED = {"hz3-fast": 1.0, "hz3-scale": 0.97, "system": 0.4, "tcmalloc": 0.9, "hz3-fast=again": 1.0}


def allocators() -> list[Allocator]:
    """Two lanes, two peers and a control."""
    return [
        Allocator("hz3-fast", SUBJECT, "/x/libhz3_fast.so", "aa" * 32, "hz3 build: lane=fast", "fast"),
        Allocator("hz3-scale", SUBJECT, "/x/libhz3_scale.so", "bb" * 32, lane="scale"),
        Allocator("system", PEER, version="glibc 2.36"),
        Allocator("tcmalloc", PEER, "/x/libtcmalloc.so", "cc" * 32, note="a note <with> markup"),
        Allocator("hz3-fast=again", CONTROL, "/x/libhz3_fast.so", "aa" * 32),
    ]


def session(folder: Path, rounds: int = 8, seed: int = 1, speed: dict | None = None,
            noise: float = 0.004, limit: int | None = None) -> Session:
    """A finished session of the first `limit` default cases (all when None); rates are SPEED,
    changed by `speed`, with 0.4 % noise."""
    rng = np.random.default_rng(seed)
    cases = [c for c in registry.select(registry.DEFAULT, "", []) if not c.memory][:limit]
    plan = Plan(seed, registry.DEFAULT, rounds, 0.0, cases, allocators())
    facts = {"git": f"{seed:07x}", "date": f"2026-01-{seed:02d}T12:00:00+00:00", "quiet": "yes",
             **machine.describe()}
    made = Session(folder, plan, facts)
    made.start(resume=False)
    for number in range(rounds + 1):
        for case, allocator in plan.order(number):
            value = 1e7 * {**SPEED, **(speed or {})}[allocator.name] * np.exp(rng.normal(0, noise))
            made.record(
                Sample(case.name, allocator.name, number, metrics={case.metric: float(value)},
                       resources={"peak_rss_kib": 2000.0, "minor_faults": 500.0, "major_faults": 0.0,
                                  "voluntary_switches": 1.0, "involuntary_switches": 2.0}),
                case, allocator,
            )
    return made


def detail_list() -> list[dict]:
    """One detail of every kind and allocator."""
    found = []
    for a in allocators():
        if a.role == CONTROL:
            continue
        base = {"allocator": a.name, "error": ""}
        times = [10.0 * (i + 1) for i in range(len(details.QUANTILES))]
        found += [
            {"kind": "latency", "case": "app", "clock_ns": 12.0, "malloc": times, "free": times, **base},
            {"kind": "settle", "case": "app", "peak_rss_kib": 9e4, "end_rss_kib": 8e4,
             "settled_rss_kib": 1e4, **base},
            {"kind": "syscalls", "case": "app",
             "calls": {"mmap": 7, "madvise": 900 if a.name == "system" else 1}, **base},
            {"kind": "memory", "case": "burst_idle",
             "metrics": {"ops": 7.0, "peak_kib": 524288.0, "fall_s": 1.25, "resources.minor_faults": 3.0},
             "trace": [[0.0, 1e3], [1.0, 5e5], [2.0, 1e4]], **base},
        ]
    return found


def result(folder: Path, **options) -> dict:
    """Content of results.json of such a session, written into the folder."""
    made = results.build(session(folder, **options), detail_list())
    results.write(folder, made)
    return made
