# SPDX-License-Identifier: Apache-2.0
"""`ssot contention`: a model of the depot on machines with more cores than there are to measure on.

Called by: cli. Owns: nothing.
It simulates cache lines, not processors. A line serves one access at a time, first come first served;
an access by another core than the last costs a transfer. A core works, then loads the word of a stack,
reads the top magazine's `next` when it pops (a miss of its own), and swaps; the swap fails when the word
changed since. Upper bound: whoever waits gets the line between a load and its swap. Lower bound (`held`):
a core keeps the line until its swap is done, so none fails. In both, all cores use one class. Left out:
latency that depends on distance, other traffic, magazines that grow when a class is busy, and the stacks and
pools that each CPU has for itself since docs/decisions/0029: what is left is the worst case, in which every object changes threads.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from dataclasses import dataclass, replace

from rich.table import Table

from bench.ssot import terminal
from bench.ssot.errors import UserError

EXAMPLE = "example: ssot contention --cores 16,64,256 --objects 62,510 --ns 5,50 --transfer 100"
# The last two are for traffic in one direction: every fourth exchange takes empty magazines from a pool, or returns them.
LAYOUTS = ("1 shard", "sharded", "sharded, one-way", "sharded, one-way, pools too")
WARM_UP, ROUNDS = 5, 30  # exchanges per core, before and while it is counted


@dataclass(frozen=True)
class Machine:
    """One point of the model; times in ns."""

    cores: int
    shards: int
    op_ns: float = 5.0  # per malloc or free, with what the program does in between
    objects: int = 62  # of a magazine
    exchange: float = 1.0  # exchanges per magazine's worth of operations
    transfer_ns: float = 100.0
    hit_ns: float = 5.0  # an access to a line that the core still owns
    pop_share: float = 0.5
    pool_every: int = 0  # one-way traffic: every so many exchanges the common pool of empty magazines
    pool_shards: int = 1
    held: bool = False  # the lower bound

    @property
    def work_ns(self) -> float:
        """Between two exchanges of a core."""
        return self.op_ns * self.objects / self.exchange


class _Line:
    """A cache line with the word of one stack."""

    def __init__(self) -> None:
        self.owner, self.busy_until, self.version = -1, 0.0, 0

    def access(self, core: int, now: float, pops: bool, machine: Machine) -> float:
        """When the access that was asked for now is done. Calls come in order of `now`."""
        cost = machine.hit_ns if self.owner == core else machine.transfer_ns
        cost += (machine.hit_ns + machine.transfer_ns * pops) if machine.held else 0
        self.owner, self.busy_until = core, max(now, self.busy_until) + cost
        return self.busy_until


class _Model:
    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine, self.rng = machine, random.Random(seed)
        self.depot = [_Line() for _ in range(machine.shards)]
        self.pools = [_Line() for _ in range(machine.pool_shards)]
        self.events: list[tuple] = []  # (time, serial, core, line, pops, version seen or None)
        self.serial = self.done = 0
        self.exchanges = [0] * machine.cores
        self.began = [0.0] * machine.cores
        self.working_ns = self.lost_ns = 0.0  # of the cycles that are over

    def _at(self, time: float, core: int, line: _Line, pops: bool, seen: int | None) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, core, line, pops, seen))

    def _work(self, now: float, core: int) -> None:
        work_ns = self.machine.work_ns * self.rng.uniform(0.5, 1.5)
        self.lost_ns += now - self.began[core]
        self.working_ns += work_ns
        self.began[core] = now + work_ns
        self._begin(now + work_ns, core, self.depot)

    def _begin(self, now: float, core: int, lines: list[_Line]) -> None:
        line = lines[core * len(lines) // self.machine.cores]
        self._at(now, core, line, self.rng.random() < self.machine.pop_share, None)

    def _finish(self, now: float, core: int, line: _Line) -> None:
        every = self.machine.pool_every
        if line in self.pools:
            self._work(now, core)
            return
        self.exchanges[core] += 1
        self.done += 1
        if every and self.exchanges[core] % every == 0:
            self._begin(now, core, self.pools)
        else:
            self._work(now, core)

    def _step(self) -> float:
        now, _, core, line, pops, seen = heapq.heappop(self.events)
        after = line.access(core, now, pops, self.machine)
        if self.machine.held or seen == line.version:
            line.version += 1
            self._finish(after, core, line)
        else:  # a load, or a failed swap, which says what the word is now
            self._at(after + self.machine.transfer_ns * pops, core, line, pops, line.version)
        return after

    def run(self) -> float:
        """The share of the cores' time that the exchanges take."""
        machine = self.machine
        for core in range(machine.cores):
            self._work(0.0, core)
        while self.done < WARM_UP * machine.cores:
            self._step()
        self.working_ns = self.lost_ns = 0.0
        while self.done < (WARM_UP + ROUNDS) * machine.cores:
            self._step()
        return self.lost_ns / (self.lost_ns + self.working_ns)

    def exchange_ns(self) -> float:
        """Mean time from one exchange of the whole machine to the next; call it instead of run."""
        self.run()
        start, already = self.events[0][0], self.done
        now = start
        while self.done < already + ROUNDS * self.machine.cores:
            now = self._step()
        return (now - start) / (self.done - already)


def lost(machine: Machine, seed: int = 1) -> float:
    """Share of time lost, 0 to 1."""
    return _Model(machine, seed).run()


def exchange_ns(machine: Machine, seed: int = 1) -> float:
    """Nanoseconds per exchange of the whole machine."""
    return _Model(machine, seed).exchange_ns()


def without_contention(machine: Machine) -> float:
    """The closed form for lines that are always free, and always another core's."""
    pop = machine.transfer_ns * machine.pop_share
    each = machine.transfer_ns + machine.hit_ns + pop
    return each / (each + machine.work_ns)


def shards_of(cores: int, per_shard: int, most: int) -> int:
    """As hz3_remote_init."""
    return min(most, -(-cores // per_shard))


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of this command."""
    p.add_argument("--cores", default="16,32,64,128,256", metavar="N,…", help="of the machine")
    p.add_argument("--ns", default="5,50", metavar="N,…", help="per malloc or free with the program's own work")
    p.add_argument("--objects", default="62,510", metavar="N,…", help="of a magazine: 62 to 2,046")
    p.add_argument("--exchange", type=float, default=1.0, help="exchanges per magazine of operations "
                   "(default 1: every object changes threads)")
    p.add_argument("--transfer", default="100", metavar="NS,…", help="for a line of another core, 60 to 250")
    p.add_argument("--per-shard", type=int, default=8, help="CPUs per shard (default 8)")
    p.add_argument("--most-shards", type=int, default=64, help="MAX_SHARDS of remote.c (default 64)")


def _laid_out(one: Machine, layout: str, cores: int, options: argparse.Namespace) -> Machine:
    shards = shards_of(cores, options.per_shard, options.most_shards)
    machine = replace(one, cores=cores, shards=1 if layout == LAYOUTS[0] else shards)
    if layout in LAYOUTS[2:]:
        machine = replace(machine, pool_every=4, pool_shards=shards if layout == LAYOUTS[3] else 1)
    return machine


def _bounds(machine: Machine) -> str:
    return f"{100 * lost(replace(machine, held=True)):.1f}–{100 * lost(machine):.1f}"


def _numbers(text: str, kind: type = float) -> list:
    try:
        found = [kind(t) for t in text.split(",")]
    except ValueError as e:
        raise UserError(f"'{text}': write {'whole ' if kind is int else ''}numbers, as in 16,64") from e
    if not all(0 < number < math.inf for number in found):  # nan is neither
        raise UserError(f"'{text}': write numbers above 0, as in 16,64")
    return found


def run(options: argparse.Namespace) -> int:
    """Prints the share of time lost for every combination."""
    if not 0 < options.exchange <= 1 or options.per_shard < 1 or options.most_shards < 1:
        raise UserError("--exchange lies in (0, 1]; --per-shard and --most-shards are at least 1")
    table = Table(title="per cent of time in the depot, modelled: lower–upper bound")
    for heading in ("transfer ns", "ns per op", "objects", "depot", "no contention"):
        table.add_column(heading, justify="left" if heading == "depot" else "right")
    cores = _numbers(options.cores, int)
    for count in cores:
        table.add_column(f"{count} cores", justify="right")
    for transfer in _numbers(options.transfer):
        for op_ns in _numbers(options.ns):
            for objects in _numbers(options.objects, int):
                one = Machine(1, 1, op_ns, objects, options.exchange, transfer)
                free = f"{100 * without_contention(one):.1f}"
                for layout in LAYOUTS:
                    row = [_bounds(_laid_out(one, layout, count, options)) for count in cores]
                    table.add_row(f"{transfer:g}", f"{op_ns:g}", f"{objects:g}", layout, free, *row)
    terminal.console.print(table)
    return 0
