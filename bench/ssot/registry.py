# SPDX-License-Identifier: Apache-2.0
"""Every benchmark case: program, arguments per size, unit, and what it stresses.

Called by: most modules. Owns: the list CASES; a new case is one more entry here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bench.ssot.errors import UserError

QUICK, DEFAULT, FULL = "quick", "default", "full"


@dataclass(frozen=True)
class Case:
    """One measurable cell row. `metric` is the key of the result line that is compared."""

    name: str
    program: str
    stresses: str
    sizes: dict[str, str]  # QUICK/DEFAULT/FULL -> argument string
    metric: str = "ops/s"
    higher_is_better: bool = True
    unit: str = "op"
    threads: int = 1
    sets: frozenset[str] = frozenset({DEFAULT, FULL})
    floor: str = ""  # the null allocator that measures this program's own cost
    memory: bool = False  # watched over time rather than timed
    details: bool = False  # the default run adds latency, syscall and settled-memory runs

    def args(self, size: str) -> list[str]:
        """Arguments of the program at QUICK, DEFAULT or FULL size."""
        return self.sizes[size].split()

    @property
    def has_latency(self) -> bool:
        """True when the program can time each of its operations."""
        return self.program in ("random_mixed", "random_mixed_dist", "mt_remote")

    @property
    def is_real(self) -> bool:
        """True for a real program (bench/ssot/programs.py) instead of a workload."""
        return self.program.startswith("real:")

    def header_fields(self, args: list[str]) -> dict[str, str]:
        """iters, ws and size of the log header, as far as the program has them."""
        given = dict(a.split("=", 1) for a in args if "=" in a)
        low, high = given.get("min", given.get("size", "-")), given.get("max")
        return {
            "iters": given.get("iters", "-"),
            "ws": given.get("ws", "-"),
            "size": f"{low}-{high}" if high else low,
        }


ALL_SETS = frozenset({QUICK, DEFAULT, FULL})
USUAL = frozenset({DEFAULT, FULL})
RARE = frozenset({FULL})
# Which null allocator measures the harness: bump where blocks stay untouched, lifo where one
# thread writes them. Work that writes blocks of other threads has none: no null allocator keeps
# its memory small there, and page faults would be counted as harness.
BUMP, LIFO, NO_FLOOR = "floor_bump", "floor_lifo", ""


def _sized(template: str, quick: str, default: str, full: str) -> dict[str, str]:
    return {s: template.format(n=n) for s, n in ((QUICK, quick), (DEFAULT, default), (FULL, full))}


def _mixed(
    name: str,
    stresses: str,
    low: int,
    high: int,
    sets: frozenset[str] = USUAL,
    ws: int = 400,
    default_iters: str = "6000000",
) -> Case:
    iters = ("4000000", default_iters, "20000000")
    return Case(
        name,
        "random_mixed",
        stresses,
        _sized(f"iters={{n}} ws={ws} min={low} max={high}", *iters),
        sets=sets,
        floor=BUMP,
    )


def _dist(name: str, stresses: str, high: int, mode: str) -> Case:
    return Case(
        name,
        "random_mixed_dist",
        stresses,
        _sized(
            f"iters={{n}} ws=400 min=16 max={high} seed=0x12345678 {mode}",
            "4000000",
            "8000000",
            "20000000",
        ),
        sets=ALL_SETS,
        floor=BUMP,
    )


SINGLE = [
    _mixed("uniform", "every size up to 32 KiB, one thread, 400 live slots", 16, 32768, ALL_SETS),
    _dist(
        "tiny",
        "the hit path of small objects only (16 to 256 B)",
        256,
        "trimix 16 256 100 257 2048 0 2049 32768 0",
    ),
    _dist("app", "sizes as applications ask: 80 % small, 15 % middle, 5 % to 32 KiB", 32768, "app"),
    _mixed("small", "small classes only, 16 to 2048 B", 16, 2048),
    _mixed("medium", "page runs of 4 to 32 KiB", 4096, 32768, default_iters="4000000"),
    _mixed("cold/100k", "100,000 live slots: block metadata no longer fits the caches", 16, 2048,
           ws=100_000, default_iters="2000000"),
    _mixed("cold/10m", "10,000,000 live slots: every access misses the caches", 16, 256, RARE,
           ws=10_000_000),
    Case("lifo/1", "lifo", "malloc and free of one size at once",
         _sized("pairs={n} size=64 depth=1", "4000000", "10000000", "40000000"), floor=BUMP),
    Case("lifo/64", "lifo", "stacks of 64 blocks: the cache of a thread is used to some depth",
         _sized("pairs={n} size=64 depth=64", "4000000", "10000000", "40000000"), floor=BUMP),
    Case("lifo/1600", "lifo", "stacks of 1600 blocks: every cache overflows and refills",
         _sized("pairs={n} size=64 depth=1600", "4000000", "8000000", "40000000"), floor=BUMP),
    Case("lifo/64/touch", "lifo", "the same stacks of 64, each block written",
         _sized("pairs={n} size=64 depth=64 touch=1", "4000000", "10000000", "40000000"),
         sets=RARE, floor=LIFO),
    Case("tree", "tree", "a binary tree of 32-byte nodes built and torn down, every node written",
         _sized("depth=18 rounds={n}", "5", "10", "40"), floor=LIFO),
    Case("tree/right", "tree", "the same, each right child torn down before the left one",
         _sized("depth=18 rounds={n} right=1", "5", "10", "40"), sets=RARE, floor=LIFO),
    # Short in every size: the first drops count. No floor: a null allocator has no use for the
    # blocks of one phase in the next.
    Case("phases", "phases", "a heap that is dropped and built up again with larger blocks",
         _sized("threads=1 rounds={n} phase_kib=10240", "4", "4", "4")),
    Case("glibc_simple/t1", "glibc_simple", "batches of 25 to 6400 equal blocks, one thread",
         _sized("threads=1 pairs={n}", "40000", "30000", "400000"), floor=BUMP),
    Case("large_blocks", "large_blocks", "zero-filled blocks of 5 to 25 MiB replacing each other",
         _sized("iters={n}", "40", "40", "2000")),
    Case("size_sweep", "size_sweep", "one size after the other, 8 B to 64 MiB; see ssot sweep",
         _sized("rounds={n}", "1", "2", "5"), sets=RARE),
    Case("realloc_grow", "realloc_grow", "vectors that grow by half and by 16 B up to full length",
         _sized("max={n} vectors=2 rounds=2", "1048576", "4194304", "67108864")),
]

RANGES = {"guard": (16, 2048), "main": (16, 32768), "cross128": (16, 131072)}
# What the default run measures of the matrix; --full measures all of it.
USUAL_REMOTE = {
    (1, 0, "guard"), (1, 50, "guard"), (2, 50, "guard"), (8, 50, "guard"), (8, 90, "guard"),
    (32, 50, "guard"), (2, 50, "main"), (8, 50, "main"), (32, 90, "main"), (8, 50, "cross128"),
}
QUICK_REMOTE = {(2, 50, "guard"), (8, 50, "guard")}
REMOTE_ITERS = {
    1: ("1000000", "2000000", "4000000"),
    2: ("500000", "500000", "1000000"),
    8: ("250000", "250000", "250000"),
    32: ("50000", "50000", "250000"),
}


def _remote(threads: int, remote: int, sizes: str, extra: str = "", suffix: str = "") -> Case:
    """One cell of the matrix. A ring holds whatever one producer can send while its consumer
    is off the processor, so that nothing falls back to a local free."""
    low, high = RANGES[sizes]
    key = (threads, remote, sizes)
    usual = key in USUAL_REMOTE if not suffix else key == (8, 50, "guard")
    sets = ALL_SETS if key in QUICK_REMOTE and not suffix else USUAL if usual else RARE
    what = {"": "", "touch": ", both ends of each touched", "bounded": ", waiting when 1024 are "
            "under way", "long": ", 2,000,000 iterations"}[suffix]
    ring = "" if suffix == "bounded" else "ring_slots=1048576"
    template = (
        f"threads={threads} iters={{n}} ws=400 min={low} max={high} remote_pct={remote} "
        f"{ring} {extra}"
    )
    quick, default, full = REMOTE_ITERS[threads]
    if sizes != "guard" and threads >= 8:
        default = str(int(default) // 3)  # big untouched blocks cost page faults, not arithmetic
    iters = ("2000000",) * 3 if suffix == "long" else (quick, default, full)
    return Case(
        f"mt_remote/t{threads}/r{remote}/{sizes}" + (f"/{suffix}" if suffix else ""),
        "mt_remote",
        f"{threads} threads, {remote} % of {low} to {high} B blocks freed by a neighbour{what}",
        _sized(" ".join(template.split()), *iters),
        threads=threads,
        sets=RARE if suffix == "long" else sets,
        floor=NO_FLOOR if suffix in ("touch", "bounded") else BUMP,
    )


def _remote_matrix() -> list[Case]:
    cells = [(t, r, s) for s in RANGES for t in (1, 2, 8, 32) for r in (0, 50, 90)]
    return (
        [_remote(*cell) for cell in cells]
        + [_remote(*cell, extra="touch=1", suffix="touch") for cell in cells]
        + [
            _remote(t, r, s, extra="ring_slots=1024 bounded=1", suffix="bounded")
            for t, r, s in cells
            if t > 1 and r > 0
        ]
        + [_remote(8, 50, s, suffix="long") for s in RANGES]
    )


FRAME_WAYS = {
    "ordered": ("freed in that order", "order=0"),
    "random": ("freed at random", "order=1"),
    "walked": ("written, read twice, freed at random", "order=1 walks=2"),
}


def _frames(size: int, blocks: int, way: str, threads: int) -> Case:
    what, form = FRAME_WAYS[way]
    frames = (1_000_000 if way == "walked" else 4_000_000) // blocks
    return Case(
        f"frames/{size}/{way}/t{threads}",
        "frames",
        f"batches of {size} B in each of {threads} thread(s), {blocks} blocks at most, {what}",
        _sized(f"threads={threads} frames={{n}} blocks={blocks} size={size} {form}",
               *(str(frames * times // 4) for times in (1, 2, 8))),
        threads=threads,
        sets=RARE,
    )


FRAMES = [
    _frames(size, blocks, way, threads)
    for ways, sizes in (
        (("ordered", "random"), ((64, 10_000), (256, 10_000), (512, 3000), (1024, 10_000),
                                 (2048, 3000), (4096, 1000), (16384, 1000), (262144, 100))),
        (("walked",), ((64, 20_000), (256, 10_000), (1024, 5000))),
        (("random",), ((128, 160_000), (1536, 100_000))),  # 20 and 150 MB
    )
    for size, blocks in sizes
    for way in ways
    for threads in (1, 2)
]

QUEUES = [
    Case(f"queue/{size}/{way}/t{threads}", "queue",
         f"{live} blocks of {size} B, the oldest goes first, while it {what}",
         _sized(f"threads={threads} pairs={{n}} live={live} size={size} {form}",
                *(str(live * rounds) for rounds in (4, 8, 24))),
         threads=threads, sets=RARE)
    for size, live in ((64, 400_000), (256, 100_000), (1024, 25_000))
    for way, what, form in (("tides", "falls and rises by 1,000", "swing=1000"),
                            ("grown", "does so after it has grown in use", "swing=1000 fill=1"),
                            ("floods", "falls and rises by a third", f"swing={live // 3}"),
                            ("random", "becomes shorter and longer at random", "swing=10000 way=1"),
                            ("stays", "falls and rises by 1,000, and one in ten stays longer", "swing=1000 stay=10"))
    for threads in (1, 2)
]

SPARSE = [
    Case(f"sparse/{size}/{written}/t{threads}", "sparse", f"{live} blocks of {size} B replaced at random, of which {written} B are written",
         _sized(f"threads={threads} rounds={{n}} live={live} size={size} written={written}",
                *(str(live * rounds) for rounds in (4, 10, 40))),
         threads=threads, sets=RARE)
    for size, live, written in ((200_000, 2000, 4096), (1_500_000, 500, 4096), (1_500_000, 100, 300_000))
    for threads in (1, 2)
]

BUFFERS = [
    Case(f"buffers/{name}/{way}/t{threads}", "buffers",
         f"64 blocks of {name} B that are written whole and read, {what} first to go",
         _sized(f"threads={threads} ops={{n}} least={least} most={most} order={order}",
                *(str(ops * rounds) for rounds in (1, 4, 20))),
         threads=threads, sets=RARE)
    for name, least, most, ops in (("4k-64k", 4096, 65_536, 60_000), ("16k-300k", 16_384, 307_200, 20_000),
                                   ("64k-1100k", 65_536, 1_126_400, 5_000))
    for order, (way, what) in enumerate((("random", "any of them"), ("queue", "the oldest"), ("stack", "the newest")))
    for threads in (1, 2)
]


def _drawn(seed: int) -> Case:
    threads = (1, 2, 1, 8)[seed % 4]
    return Case(f"drawn/{seed}/t{threads}", "drawn", f"what seed {seed} draws (drawn --help)",
                _sized(f"threads={threads} milliseconds={{n}} seed={seed}", "100", "250", "1000"),
                threads=threads, sets=RARE)


# The first seeds there are, whatever they draw: none was chosen, nor left out.
DRAWN = [_drawn(seed) for seed in range(1, 61)]

# One operation of `versions` is some twenty allocations, of the others a few.
CONTAINERS = [
    Case(f"containers/{kind}/t{threads}", "containers", stresses,
         _sized(f"threads={threads} iters={{n}} seed=1 {kind}",
                *(str(iters * times // (4 * threads)) for times in (1, 4, 16))),
         threads=threads, sets=RARE)
    for kind, iters, stresses in (
        ("documents", 1_000_000, "trees of strings, vectors and maps, the oldest dropped first"),
        ("hashes", 2_000_000, "hash tables that grow, and go when they are full"),
        ("strings", 400_000, "a sorted table of short strings"),
        ("sets", 1_500_000, "nodes of a balanced tree, the smallest dropped first"),
        ("lists", 800_000, "linked lists of 100,000 elements, sorted and split"),
        ("vectors", 4_000_000, "vectors that grow side by side by copying"),
        ("versions", 80_000, "shared pointers to versions of a tree, the oldest dropped first"),
    )
    for threads in (1, 2)
]

THREADED = [
    Case("producer_consumer/64", "producer_consumer", "one thread only allocates 64 B, one frees",
         _sized("pairs=1 iters={n} size=64 batch=256", "1000000", "2000000", "10000000"),
         threads=2),
    Case("producer_consumer/1024", "producer_consumer", "the same with 1 KiB blocks, four pairs",
         _sized("pairs=4 iters={n} size=1024 batch=256", "200000", "300000", "2000000"),
         threads=8),
    Case("mstress/t8", "mstress", "patterned blocks that move between threads re-made each round",
         _sized("threads=8 scale=20 rounds={n}", "4", "5", "25"), threads=8),
    Case("mstress/t32", "mstress", "the same with 32 threads",
         _sized("threads=32 scale=50 rounds={n}", "2", "2", "25"), threads=32, sets=RARE),
    Case("larson/t2", "larson", "a server: random replacement in arrays handed on to new threads",
         _sized("seconds={n} min=8 max=1000 blocks=5000 rounds=100 threads=2", "1", "1", "5"),
         threads=2, sets=RARE),
    Case("larson/t8", "larson", "the same with eight threads",
         _sized("seconds={n} min=8 max=1000 blocks=5000 rounds=100 threads=8", "1", "1", "5"),
         threads=8, sets=RARE),
    Case("thread_churn", "thread_churn", "short-lived threads that leave live blocks to others",
         _sized("threads={n} lifetime_ops=1000 concurrency=8", "500", "1000", "10000"),
         threads=8),
    Case("tasks/t2", "tasks", "work that passes from thread to thread, with what it has allocated",
         _sized("threads=2 steps={n} tasks=2000", "100000", "1000000", "10000000"), threads=2, sets=RARE),
    Case("tasks/t8", "tasks", "the same in eight threads",
         _sized("threads=8 steps={n} tasks=2000", "25000", "250000", "2500000"), threads=8, sets=RARE),
    Case("tasks/t2/swing", "tasks", "so many that the heap swings by hundreds of MiB",
         _sized("threads=2 steps={n} tasks=100000", "500000", "2000000", "10000000"), threads=2, sets=RARE),
    Case("glibc_simple/t8", "glibc_simple", "batches of equal blocks in eight threads",
         _sized("threads=8 pairs={n}", "3000", "3000", "50000"), threads=8),
    Case("phases/t4", "phases", "the same in four threads, each with a heap of its own",
         _sized("threads=4 rounds={n} phase_kib=10240", "4", "4", "4"), threads=4, sets=RARE),
    Case("cache_thrash", "cache_thrash", "active false sharing: two threads allocate and write",
         _sized("threads=2 iters={n} size=8 reps=10000", "500", "1000", "10000"), threads=2),
    Case("cache_scratch", "cache_scratch", "passive false sharing: blocks of another thread first",
         _sized("threads=2 iters={n} size=8 reps=10000", "500", "1000", "10000"), threads=2),
    Case("false_sharing", "false_sharing", "two threads updating own blocks of 8 to 64 B",
         _sized("threads=2 rounds={n} reps=10000", "25", "50", "200"), threads=2),
]

# Measured for memory over time, once each, in the memory part of a run.
MEMORY = [
    Case("burst_idle", "burst_idle", "is memory given back after a burst, without any call?",
         _sized("{n}", "threads=4 mib=256 idle=3", "threads=4 mib=512 idle=5",
                "threads=4 mib=1024 idle=10"), threads=4, sets=RARE, memory=True),
    Case("fragment", "fragment", "resident bytes per live byte while the size mix drifts",
         _sized("seconds={n} live_mib=100", "3", "6", "60"), sets=RARE, memory=True),
    Case("lru_cache", "lru_cache", "a cache whose values grow and shrink, what was used least goes",
         _sized("seconds={n} live_mib=100", "3", "20", "60"), sets=RARE, memory=True),
    Case("lru_cache/fast", "lru_cache", "a larger one that changes from small to large and back each second",
         _sized("seconds={n} live_mib=200 cycles={n} lookup_percent=0", "1", "3", "12"), sets=RARE, memory=True),
]

# Whole programs (bench/ssot/programs.py); the number is the size of the input.
REAL = [
    Case("real/redis", "real:redis", "a key-value server under pipelined sets, gets, lists and hashes",
         _sized("{n}", "20000", "50000", "500000"), unit="request", sets=RARE),
    Case("real/sqlite3", "real:sqlite3", "a database in memory: inserts, an index, sorts, updates",
         _sized("{n}", "50000", "100000", "500000"), "wall_s", False, "script", sets=RARE),
    Case("real/python3", "real:python3", "an interpreter that takes every object from malloc",
         _sized("{n}", "10000", "20000", "100000"), "wall_s", False, "script", sets=RARE),
    Case("real/gcc", "real:gcc", "a compiler on one large generated file",
         _sized("{n}", "300", "500", "2000"), "wall_s", False, "file", sets=RARE),
    Case("real/git_gc", "real:git_gc", "packing a generated repository, several threads",
         _sized("{n}", "1000", "2000", "8000"), "wall_s", False, "repository", sets=RARE),
]

DETAILED = {
    "app", "uniform", "large_blocks", "mstress/t8", "producer_consumer/64",
    "mt_remote/t2/r50/guard", "mt_remote/t8/r50/main",
}
CASES: list[Case] = [
    replace(case, details=case.name in DETAILED)
    for case in (*SINGLE, *FRAMES, *QUEUES, *SPARSE, *BUFFERS, *DRAWN, *CONTAINERS, *_remote_matrix(), *THREADED, *MEMORY, *REAL)
]


def select(size: str, pattern: str, threads: list[int]) -> list[Case]:
    """Cases of a size's set, or all that match `pattern`; `threads` limits further."""
    if pattern:
        try:
            cases = [c for c in CASES if re.search(pattern, c.name)]
        except re.error as e:
            raise UserError(f"--filter '{pattern}' is not a regular expression: {e}") from e
        if not cases:
            raise UserError(f"unknown case '{pattern}': see 'ssot --list'")
    else:
        cases = [c for c in CASES if size in c.sets]
    if threads:
        cases = [c for c in cases if c.threads in threads]
        if not cases:
            wanted = " or ".join(map(str, threads))
            raise UserError(f"no selected case has {wanted} threads: see 'ssot --list'")
    return cases


def by_name(name: str) -> Case:
    """The case of exactly this name."""
    for case in CASES:
        if case.name == name:
            return case
    raise UserError(f"unknown case '{name}': see 'ssot --list'")
