# SPDX-License-Identifier: Apache-2.0
"""The separate runs that must not disturb the timed ones: tails, memory after the frees, syscalls.

Called by: cli, explain. Owns: details.jsonl of the session folder.
Needs: strace for the syscall counts; without it that part is left out and said so.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Callable, Iterable

from bench.ssot import places, registry
from bench.ssot.allocators import CONTROL, FLOOR, Allocator
from bench.ssot.registry import Case
from bench.ssot.runner import Session, end_all, launch, run_case, stored

LATENCY, SETTLE, SYSCALLS, MEMORY = "latency", "settle", "syscalls", "memory"
SETTLE_S = 3
QUANTILES = ("p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9", "p99.99", "max")
# Sleeping processes do not disturb each other, so the waiting runs go side by side.
SIDE_BY_SIDE = 4


def parse_strace(text: str) -> dict[str, int]:
    """Calls by name from the table of `strace -c`."""
    calls = {}
    for line in text.splitlines():
        match = re.match(r"\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", line)
        if match and match[2] != "total":
            calls[match[2]] = int(match[1])
    return calls


def parse_trace(output: str, tag: str) -> list[list[float]]:
    """`[TAG] s:kib s:kib ...` as [[seconds, KiB], ...]."""
    for line in output.splitlines():
        if line.startswith(f"[{tag}] "):
            return [[float(x) for x in point.split(":")] for point in line.split()[1:]]
    return []


def _latency(case: Case, size: str, allocator: Allocator) -> dict:
    sample = run_case(case, ["--latency", *case.args(size)], allocator, 0)
    curves = {
        op: [sample.metrics.get(f"latency.{op}.{q}_ns") for q in QUANTILES]
        for op in ("malloc", "free")
    }
    return {"error": sample.error, "clock_ns": sample.metrics.get("latency.malloc.clock_ns")} | curves


def _settle(case: Case, size: str, allocator: Allocator) -> dict:
    sample = run_case(case, ["--settle", str(SETTLE_S), *case.args(size)], allocator, 0)
    keys = ("peak_rss_kib", "end_rss_kib", "settled_rss_kib")
    return {"error": sample.error} | {k: sample.metrics.get(f"resources.{k}") for k in keys}


def _memory(case: Case, size: str, allocator: Allocator) -> dict:
    sample = run_case(case, case.args(size), allocator, 0, sample_ms=50)
    trace = parse_trace(sample.output, "RSS_TRACE") or parse_trace(
        sample.output, "RSS_LIVE_TRACE"
    ) or [[ms / 1e3, kib] for ms, kib in sample.trace]
    return {"error": sample.error, "trace": trace, "metrics": sample.metrics}


def syscalls(case: Case, size: str, allocator: Allocator) -> dict:
    """System calls by name of one run, threads included."""
    with tempfile.NamedTemporaryFile("r", suffix=".strace", encoding="utf-8") as table:
        settings = [w for k, v in allocator.child_env().items() for w in ("-E", f"{k}={v}")]
        strace = [str(shutil.which("strace")), "-f", "-c", "-o", table.name, *settings]
        program = [str(places.built(f"bench/workloads/{case.program}")), *case.args(size)]
        # strace itself runs on the system's malloc; only its child is preloaded.
        bare = replace(allocator, path="", env={})
        output, _, _, error = launch([*strace, *program], bare)
        if "cannot be preloaded" in output:
            error = "the preload did not take effect"
        return {"error": error, "calls": parse_strace(table.read())}


MEASURES: dict[str, Callable[[Case, str, Allocator], dict]] = {
    LATENCY: _latency,
    SETTLE: _settle,
    SYSCALLS: syscalls,
    MEMORY: _memory,
}


def wanted(size: str, pattern: str) -> list[tuple[str, Case]]:
    """(kind, case) of every detail run: the marked cases, or all that --filter selects."""
    if size == registry.QUICK:
        return []
    cases = registry.select(registry.FULL, pattern, [])
    if not pattern and size == registry.DEFAULT:
        cases = [c for c in cases if c.details or c.memory]
    found = [(MEMORY, c) for c in cases if c.memory]
    for case in cases:
        if case.memory or case.is_real:
            continue
        found.append((SETTLE, case))
        if shutil.which("strace"):
            found.append((SYSCALLS, case))
        if case.has_latency:
            found.append((LATENCY, case))
    return found


HEED_S = 0.2  # a signal that arrives just before the main thread waits does not end its wait


def _run_all(calls: Iterable[Callable[[], None]], at_a_time: int, stopped: threading.Event) -> None:
    """Makes the calls in threads of their own. Ctrl-C arrives in this one alone, which then ends what they run."""
    with ThreadPoolExecutor(at_a_time) as pool:
        try:
            for one in [pool.submit(call) for call in calls]:
                while not wait([one], HEED_S).done:
                    pass
                one.result()
        except BaseException:
            ending = threading.Thread(target=partial(pool.shutdown, cancel_futures=True))
            ending.start()
            while ending.is_alive():  # a run that is just being started is ended the next time
                stopped.set()
                end_all()
                ending.join(0.02)
            raise


def run(
    session: Session, pattern: str, progress: Callable[[str, int, int, Case, Allocator], None]
) -> list[dict]:
    """All detail runs that are not in details.jsonl yet; Ctrl-C keeps what is done."""
    file = session.folder / "details.jsonl"
    done = stored(file)
    have = {(d["kind"], d["case"], d["allocator"]) for d in done}
    size = session.plan.size
    timed = {case.name for case in session.plan.cases}
    jobs = [
        (kind, case, allocator)
        for kind, case in wanted(size, pattern)
        if case.memory or case.name in timed
        for allocator in session.plan.allocators
        if allocator.role not in (CONTROL, FLOOR) and (kind, case.name, allocator.name) not in have
    ]

    stopped = threading.Event()

    def measure(number: int, of: int, kind: str, case: Case, allocator: Allocator) -> None:
        progress(kind, number, of, case, allocator)
        detail = {"kind": kind, "case": case.name, "allocator": allocator.name}
        detail |= MEASURES[kind](case, size, allocator)
        if stopped.is_set():
            return  # killed, which is no fault of the allocator
        done.append(detail)
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(detail) + "\n")

    try:
        for kind in (LATENCY, MEMORY, SYSCALLS, SETTLE):
            mine = [job for job in jobs if job[0] == kind]
            calls = [partial(measure, n, len(mine), *job) for n, job in enumerate(mine, 1)]
            _run_all(calls, SIDE_BY_SIDE if kind == SETTLE else 1, stopped)
    except KeyboardInterrupt:
        session.interrupted = True
    return done
