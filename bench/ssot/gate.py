# SPDX-License-Identifier: Apache-2.0
"""GO/NO-GO conditions from the command line: --gate 'guard>=-1%,main>=+3%'. Every subject has to meet them.
The geometric mean decides as it is: how certain it is, a gate does not know.

Called by: cli. Owns: nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from scipy import stats as sps

from bench.ssot import results, stats, terminal
from bench.ssot.allocators import PEER
from bench.ssot.errors import UserError

_GATE = re.compile(r"^(?:(?P<peer>[\w.:=+-]+)@)?(?P<cases>[^<>]+?)(?P<op>>=|<=)(?P<percent>[+-]?(?:\d+\.?\d*|\.\d+))%$")
NO_GO = 3  # exit status


@dataclass(frozen=True)
class Gate:
    """Bound on the geometric mean of the cases that match; `bound` is a ratio (1.03 for +3 %)."""

    text: str
    peer: str
    cases: str
    at_least: bool
    bound: float

    def matches(self, case: str) -> bool:
        """True for the cases that the gate is about."""
        return self.cases == "all" or bool(re.search(self.cases, case))


def parse(spec: str) -> list[Gate]:
    """'[PEER@]CASES>=PERCENT%' parts separated by commas; CASES is a regular expression or 'all'."""
    gates = []
    for part in (p.strip() for p in spec.split(",") if p.strip()):
        match = _GATE.match(part)
        if not match:
            raise UserError(f"--gate '{part}': write it like guard>=-1% or tcmalloc@main>=+3%")
        try:
            re.compile(match["cases"])
        except re.error as e:
            raise UserError(f"--gate '{part}': '{match['cases']}' is no regular expression") from e
        gates.append(
            Gate(part, match["peer"] or "", match["cases"].strip(), match["op"] == ">=",
                 1.0 + float(match["percent"]) / 100.0)
        )
    return gates


def default_peer(peers: list[str]) -> str:
    """The first peer that is not the system's malloc, or the only one."""
    return next((p for p in peers if p != "system"), peers[0])


def refuse_unmatched(gates: list[Gate], cases: list[str], peers: list[str]) -> None:
    """A UserError when a gate matches no case or no peer of a plan."""
    if gates and not peers:
        raise UserError("--gate needs a peer to compare with: add --peers")
    for gate in gates:
        if gate.peer and gate.peer not in peers:
            raise UserError(f"--gate '{gate.text}': '{gate.peer}' is no peer here: {', '.join(peers)}")
        if not any(map(gate.matches, cases)):
            raise UserError(f"--gate '{gate.text}' matches no case that would be measured: see --list")


def check(gate: Gate, subject: str, result: dict) -> tuple[bool, str]:
    """(passed, one line of explanation). A failed cell among the cases fails the gate, and so does a run that
    finds the first subject different from itself."""
    peer = gate.peer or default_peer(results.named(result, PEER))
    about = f"{gate.text}: {subject} against {peer}"
    found = [
        c
        for c in result["comparisons"]
        if (c["subject"], c["peer"]) == (subject, peer) and gate.matches(c["case"])
    ]
    failed = [
        c["case"]
        for c in result["cells"]
        if c["error"] and c["allocator"] in (subject, peer) and gate.matches(c["case"])
    ]
    if failed:
        return False, f"{about}: {failed[0]} failed"
    if result["control_verdict"] == "DIFFERENT":
        return False, (f"{about}: the A/A control reads DIFFERENT, so this run is not to be trusted: "
                       "measure again on a quieter machine")
    few = [c["case"] for c in found if c["verdict"] == "FEW"]
    if few:
        return False, (f"{about}: {few[0]} has fewer than {stats.MIN_PAIRS} pairs, which decide "
                       "nothing: measure more --rounds")
    mean = float(sps.gmean([c["ratio"] for c in found]))
    passed = mean >= gate.bound if gate.at_least else mean <= gate.bound
    return passed, f"{about}: {mean - 1:+.2%} over {terminal.counted(len(found), 'case')}"
