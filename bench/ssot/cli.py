# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmark tool.

Called by: __main__. Owns: the options and the course of one measurement.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import secrets
import shutil
import sys
import time
from datetime import datetime
from pathlib import Path

from bench.ssot import (
    ab,
    allocators,
    attribute,
    compare,
    contention,
    details,
    explain,
    gate,
    history,
    machine,
    places,
    programs,
    record,
    registry,
    report,
    results,
    stats,
    sweep,
    terminal,
)
from bench.ssot.allocators import Allocator
from bench.ssot.errors import UserError
from bench.ssot.runner import Plan, Session

COMMANDS = {
    "compare": compare,
    "history": history,
    "explain": explain,
    "record": record,
    "attribute": attribute,
    "sweep": sweep,
    "contention": contention,
}
# size -> (most rounds, seconds after which no new round starts, seconds for noisy cells)
EFFORT = {
    registry.QUICK: (15, 42.0, 5.0),
    registry.DEFAULT: (15, 200.0, 15.0),
    registry.FULL: (30, 0.0, 600.0),
}

EXAMPLE = """examples:
  bazel run //bench:ssot --config=scale                  the default table, at most 5 minutes
  bazel run //bench:ssot -- --quick                      a first answer within a minute
  bazel run //bench:ssot -- --filter 'mt_remote/t8' --peers all --rounds 10
  bazel run //bench:ssot -- --ab large_cache=off --gate 'guard>=-1%,main>=+3%'
  bazel run //bench:ssot -- --ab rev=HEAD~3 --quick      the checkout against an old revision
  .venv/bin/python -m bench.ssot --lib mine=/tmp/libmine.so --peers system --quick

further commands, each with --help: """ + ", ".join(COMMANDS)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="ssot",
        description="Measures allocators against each other and says how sure it is.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = p.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a few cases, at most 60 s")
    size.add_argument("--full", action="store_true", help="every case, 30 rounds: hours")
    p.add_argument("--list", action="store_true", help="list the cases and end")
    p.add_argument("--filter", default="", metavar="REGEX", help="cases whose name matches")
    p.add_argument("--threads", default="", metavar="1,8", help="only cases with these threads")
    p.add_argument("--rounds", type=int, metavar="N", help="exactly N timed rounds")
    allocators.add_arguments(p)
    p.set_defaults(peers=None)  # --ab has a peer of its own
    p.add_argument("--ab", default="", metavar="NAME=VALUE",
                   help="hz3 with this build setting against hz3 without, or rev=OLD[..NEW]; "
                   "other peers only if named")
    p.add_argument("--gate", default="", metavar="'guard>=-1%'",
                   help="bounds on geometric means over matching cases; exit status 3 if broken. "
                   "A gate does not know how certain a mean is: leave a margin for noise")
    p.add_argument("--no-control", action="store_true", help="leave the A/A control out")
    p.add_argument("--no-details", action="store_true",
                   help="leave the separate latency, memory and syscall runs out")
    p.add_argument("--seed", type=int, help="order of the runs (default: a new one)")
    p.add_argument("--out", default="", metavar="DIR", help="where the result folder is made")
    p.add_argument("--resume", default="", metavar="FOLDER", help="continue an interrupted run; "
                   "give the same options again, without --seed and --out")
    p.add_argument("--allow-busy", action="store_true", help="measure on a busy machine too")
    return p


def _ab_lane(options: argparse.Namespace) -> str:
    if options.lib:
        raise UserError("--ab builds hz3 itself: leave --lib out")
    lane, *others = allocators.lane_names(options.lanes)
    if others:
        raise UserError(f"--ab compares one lane: --lanes {lane} or --lanes {others[0]}")
    return lane


def _peers(options: argparse.Namespace) -> str:
    return options.peers or ("none" if options.ab else allocators.DEFAULT_PEERS)


def _peer_names(options: argparse.Namespace) -> list[str]:
    """What the peers will be called; a UserError for what would fail after minutes of building."""
    known = allocators.peer_names(_peers(options))
    return [ab.names(options.ab, _ab_lane(options))[1], *known] if options.ab else known


def _measured_allocators(options: argparse.Namespace, folder: Path) -> list[Allocator]:
    if options.ab:
        lane = _ab_lane(options)
        terminal.console.print(f"building hz3-{lane} twice")
        found = ab.pair(options.ab, options.bazel, lane, folder)
    else:
        found = allocators.subjects(options.lib, options.lanes)
    found += allocators.peers(_peers(options), options.bazel)
    if not options.no_control:
        found.append(allocators.control_of(found[0]))
    names = [a.name for a in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two allocators are called '{name}': name it once, or rename a --lib")
    return found + allocators.floors()


def _size(options: argparse.Namespace) -> str:
    return registry.QUICK if options.quick else registry.FULL if options.full else registry.DEFAULT


def _threads(options: argparse.Namespace) -> list[int]:
    try:
        return [int(t) for t in options.threads.split(",") if t]
    except ValueError as e:
        raise UserError(f"--threads '{options.threads}': write numbers, as in 1,8") from e


def _seed(options: argparse.Namespace, folder: Path) -> int:
    if options.resume:
        return results.planned_seed(folder)
    return secrets.randbelow(2**31) if options.seed is None else options.seed


def _timed(options: argparse.Namespace) -> list[registry.Case]:
    """The cases to time; says what is left out and why. A UserError when there is nothing to run at all."""
    selected = registry.select(_size(options), options.filter, _threads(options))
    cases, missing = programs.present(selected)
    timed = [c for c in cases if not c.memory]
    watched = [c for c in cases if c.memory]
    unwatched = [o for o, given in (("--quick", options.quick), ("--no-details", options.no_details)) if given]
    if unwatched:
        missing += [f"skipped {c.name}: leave out {' and '.join(unwatched)} to watch its memory" for c in watched]
        watched = []
    if not timed and not watched:
        raise UserError(f"nothing to run is left: {'; '.join(missing)}")
    for line in missing:
        terminal.console.print(line, highlight=False)
    return timed


def _plan(options: argparse.Namespace, folder: Path, gates: list[gate.Gate]) -> Plan:
    size = _size(options)
    timed = _timed(options)
    gate.refuse_unmatched(gates, [c.name for c in timed], _peer_names(options))
    rounds, budget_s, _ = EFFORT[size]
    return Plan(
        seed=_seed(options, folder),
        size=size,
        rounds=options.rounds or rounds,
        budget_s=0.0 if options.rounds else budget_s,
        cases=timed,
        allocators=_measured_allocators(options, folder),
    )


def _folder(options: argparse.Namespace, sha: str) -> Path:
    if options.resume:
        return Path(options.resume)
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    base = Path(options.out).expanduser() if options.out else places.ROOT
    return base / f"hz3_ssot_{sha.rstrip('+')}_{stamp}"


def facts() -> dict[str, str]:
    """Machine and revision; `git` ends in '+' when the checkout has uncommitted changes."""
    sha = places.git("rev-parse", "--short", "HEAD") or "unknown"
    dirty = "+" if places.git("status", "--porcelain", "--untracked-files=no") else ""
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"git": sha + dirty, "date": date, **machine.describe()}


def _quiet(allow_busy: bool) -> str:
    if allow_busy:
        return "not checked (--allow-busy)"
    readings = machine.check_quiet(say=terminal.console.print)
    return f"others used {readings['foreign_cpus']} processors"


def rerun_noisy(session: Session, seconds: float) -> None:
    """More rounds for every case in which some cell scatters, within the time given."""
    plan = session.plan
    rivals = [a for a in plan.allocators if a.role != allocators.FLOOR]
    noisy = [
        case
        for case in plan.cases
        if any(stats.noisy(list(session.measured(case, a.name).values())) for a in rivals)
    ]
    cells = [(c, a) for c in noisy for a in rivals if (c.name, a.name) not in session.broken]
    if cells and seconds and not session.interrupted:
        first = max(s.round for s in session.samples) + 1
        with terminal.RoundProgress(plan, "noisy cells again") as step:
            session.rerun(
                cells, itertools.count(first), time.monotonic() + seconds,
                lambda number, *rest: step(plan.rounds, *rest),
            )


def measure(options: argparse.Namespace) -> int:
    """The default command: one invocation from plan to report. Returns the exit status."""
    gates = gate.parse(options.gate)
    if options.rounds is not None and options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: give at least 1")
    if options.resume and (options.out or options.seed is not None):
        raise UserError("--resume goes on with the folder and the seed that the run has: leave --out and --seed out")
    size = _size(options)
    if options.list:
        terminal.print_cases(registry.select(size, options.filter or ".", _threads(options)), size)
        return 0
    known = facts()
    folder = _folder(options, known["git"])
    plan = _plan(options, folder, gates)
    if not options.resume:
        places.writable(folder.parent)
    # Last, when everything that could be wrong with the options is known to be right.
    known["quiet"] = _quiet(options.allow_busy)
    session = Session(folder, plan, known)
    session.start(resume=bool(options.resume))
    terminal.console.print(
        f"{terminal.counted(len(session.plan.cases), 'timed case')} × "
        f"{terminal.counted(len(session.plan.allocators), 'allocator')}, "
        f"order seed {session.plan.seed}, results in {folder}", highlight=False, soft_wrap=True,
    )
    with terminal.RoundProgress(session.plan, "timing") as step:
        session.run(step)
    rerun_noisy(session, EFFORT[size][2] if not options.rounds else 0.0)
    more = [] if options.no_details or session.interrupted else _details(session, options.filter)
    return finish(session, more, gates)


def _details(session: Session, pattern: str) -> list[dict]:
    with terminal.DetailProgress() as step:
        found = details.run(session, pattern, step)
    if not shutil.which("strace") and session.plan.size != registry.QUICK:
        terminal.console.print("no syscall counts: install the package strace")
    return found


def finish(session: Session, more: list[dict], gates: list[gate.Gate]) -> int:
    """Writes every file of the folder, prints the table; status 1 when a cell failed."""
    result = results.build(session, more)
    results.write(session.folder, result)
    terminal.print_result(result)
    subjects = results.named(result, allocators.SUBJECT) if not session.interrupted else []
    verdicts = [gate.check(g, subject, result) for g in gates for subject in subjects]
    for passed, text in verdicts:
        word = "[green]GO[/]" if passed else "[red]NO-GO[/]"
        terminal.console.print(f"{word} {text}", highlight=False)
    report.write(session.folder, result)  # last: where it fails, what was measured has been seen
    if session.interrupted:
        terminal.console.print(f"interrupted; continue with --resume {session.folder}")
    terminal.console.print(f"results: {session.folder}/report.html", highlight=False, soft_wrap=True)
    if session.interrupted:
        return 130
    if any(not passed for passed, _ in verdicts):
        return gate.NO_GO
    return 1 if results.failed(result) else 0


def _command(name: str, argv: list[str]) -> int:
    module = COMMANDS[name]
    p = argparse.ArgumentParser(
        prog=f"ssot {name}",
        description=module.__doc__.splitlines()[0],
        epilog=module.EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(p)
    return module.run(p.parse_args(argv))


def main(argv: list[str]) -> int:
    """Runs the tool; errors the user can fix are one line on stderr and status 2."""
    try:
        if argv and argv[0] in COMMANDS:
            return _command(argv[0], argv[1:])
        return measure(_parser().parse_args(argv))
    except UserError as e:
        print(f"ssot: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"ssot: no room left for results ({e.strerror}): make room, or give another --out", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ssot: interrupted", file=sys.stderr)
        return 130
