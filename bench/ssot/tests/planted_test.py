# SPDX-License-Identifier: Apache-2.0
"""A planted, calibrated 2 % delay must be found; no delay must read TIE. Wants a quiet machine.

Needs: what runner_test.py needs, and a minute without other work.
"""

import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.ssot import machine, registry, results, runner
from bench.ssot.allocators import CONTROL, PEER, SUBJECT
from bench.ssot.tests.runner_test import planted

CASES = [replace(registry.by_name(name), floor="") for name in ("tiny", "app", "small")]
PROBE_SPIN = 8000  # slows the case down several times, so that noise is small beside it


def calibrated_spin(case: registry.Case, share: float, runs: int = 7) -> int:
    """Turns of the planted loop that slow the case down by `share`; the fastest of
    interleaved runs counts, because it is the least disturbed."""
    best = {0: 1e9, PROBE_SPIN: 1e9}
    for number in range(runs):
        for spin in best:
            sample = runner.run_case(case, case.args("quick"), planted(SPIN=spin), number)
            best[spin] = min(best[spin], 1e9 / sample.metrics["ops/s"])
    return round(best[0] * share / ((best[PROBE_SPIN] - best[0]) / PROBE_SPIN))


def measured(spin: int, cases: list[registry.Case], rounds: int) -> dict:
    """A session of the library with a spin against the same library without."""
    mine = planted("mine", SUBJECT, SPIN=spin)
    rivals = [mine, planted("plain", PEER, SPIN=0), replace(mine, name="again", role=CONTROL)]
    with tempfile.TemporaryDirectory() as folder:
        plan = runner.Plan(11, "quick", rounds, 0.0, cases, rivals)
        session = runner.Session(Path(folder), plan, {"git": "x", **machine.describe()})
        session.start(resume=False)
        session.run(lambda *_: None)
        return results.build(session)


class Planted(unittest.TestCase):
    def setUp(self):
        machine.check_quiet(patience_s=60)

    def test_two_per_cent_are_found(self):
        case = CASES[0]
        result = measured(calibrated_spin(case, 0.02), [case], 60)
        found = result["comparisons"][0]
        self.assertEqual(found["verdict"], "LOSS", found)
        self.assertAlmostEqual(found["ratio"], 1 / 1.02, delta=0.01)
        self.assertEqual(result["control_verdict"], "TIE")

    def test_nothing_planted_is_a_tie(self):
        result = measured(0, CASES, 10)
        self.assertEqual({c["verdict"] for c in result["comparisons"]}, {"TIE"})
        self.assertEqual(result["control_verdict"], "TIE")

    def test_the_control_ties_in_19_of_20_invocations(self):
        verdicts = [measured(0, CASES[:1], 6)["control_verdict"] for _ in range(20)]
        self.assertGreaterEqual(int(np.sum([v == "TIE" for v in verdicts])), 19)


if __name__ == "__main__":
    unittest.main()
