# SPDX-License-Identifier: Apache-2.0
"""The statistics find what is planted and nothing else; every seed is fixed."""

import unittest

import numpy as np

from bench.ssot import stats


def _pairs(rng, rounds: int, ratio: float, noise: float) -> list[tuple[float, float]]:
    """(subject, peer) rates: a common drift per round, independent noise per run."""
    drift = rng.normal(1e7, 3e5, rounds)
    subject = drift * ratio * np.exp(rng.normal(0, noise, rounds))
    return list(zip(subject, drift * np.exp(rng.normal(0, noise, rounds))))


def _family(seed: int, cells: int, rounds: int, ratio: float, noise: float) -> list:
    rng = np.random.default_rng(seed)
    found = [
        stats.compare_pairs(f"c{i}", "s", "p", _pairs(rng, rounds, ratio, noise), seed)
        for i in range(cells)
    ]
    stats.judge(found)
    return found


class Verdicts(unittest.TestCase):
    def test_planted_two_percent_is_found_in_both_directions(self):
        for ratio, word in ((0.98, "LOSS"), (1.02, "WIN")):
            for comparison in _family(1, 20, 15, ratio, 0.004):
                self.assertEqual(comparison.verdict, word)
                self.assertAlmostEqual(comparison.ratio, ratio, delta=0.005)

    def test_equal_libraries_tie_in_at_least_19_of_20_invocations(self):
        clean = sum(
            all(c.verdict == "TIE" for c in _family(seed, 20, 8, 1.0, 0.02)) for seed in range(20)
        )
        self.assertGreaterEqual(clean, 19)

    def test_disturbed_rounds_neither_hide_a_difference_nor_make_one(self):
        for ratio, word in ((1.03, "WIN"), (1.0, "TIE")):
            rng = np.random.default_rng(9)
            pairs = _pairs(rng, 15, ratio, 0.004)
            for i in (3, 11):
                pairs[i] = (pairs[i][0] * 0.6, pairs[i][1])
            family = [stats.compare_pairs("c", "s", "p", pairs, 9)]
            stats.judge(family)
            self.assertEqual(family[0].verdict, word)

    def test_the_p_value_keeps_its_promise(self):
        rng = np.random.default_rng(10)
        for rounds in (5, 8, 15):
            p = [stats.paired_p_value(rng.normal(0, 0.02, rounds)) for _ in range(2000)]
            self.assertLess(np.mean(np.array(p) < 0.01), 0.018, rounds)

    def test_certain_but_tiny_effect_is_a_tie(self):
        for comparison in _family(2, 5, 15, 1.005, 0.0005):
            self.assertGreater(comparison.low, 1.0)
            self.assertEqual(comparison.verdict, "TIE")

    def test_too_few_pairs_give_no_verdict(self):
        for comparison in _family(3, 3, stats.MIN_PAIRS - 1, 2.0, 0.001):
            self.assertEqual(comparison.verdict, "FEW")

    def test_interval_covers_the_truth_about_as_often_as_it_says(self):
        covered = sum(c.low <= 1.03 <= c.high for c in _family(4, 200, 15, 1.03, 0.02))
        self.assertGreater(covered, 0.88 * 200)
        self.assertLess(covered, 200)

    def test_adjusted_p_values_are_monotone_and_never_smaller(self):
        family = sorted(_family(5, 10, 8, 1.01, 0.01), key=lambda c: c.p_value)
        for earlier, later in zip(family, family[1:]):
            self.assertLessEqual(earlier.p_adjusted, later.p_adjusted)
        self.assertTrue(all(c.p_adjusted >= c.p_value for c in family))


class Independent(unittest.TestCase):
    def compared(self, old: list[float], new: list[float]) -> stats.Comparison:
        found = stats.compare_independent("c", "x", old, new)
        stats.judge([found])
        return found

    def test_constant_samples(self):
        same, slower = self.compared([5.0] * 6, [5.0] * 6), self.compared([5.0] * 6, [4.0] * 6)
        self.assertEqual((same.low, same.ratio, same.high, same.p_value), (1.0, 1.0, 1.0, 1.0))
        self.assertEqual((same.verdict, slower.verdict, slower.low), ("TIE", "LOSS", slower.high))
        self.assertAlmostEqual(slower.ratio, 0.8)

    def test_two_percent_are_found_and_nothing_is_a_tie(self):
        rng = np.random.default_rng(12)
        for ratio, word in ((0.98, "LOSS"), (1.0, "TIE"), (1.02, "WIN")):
            old, new = rng.normal(1.0, 0.004, 15), rng.normal(ratio, 0.004, 12)
            self.assertEqual(self.compared(old, new).verdict, word)
        # One of them may be constant.
        self.assertEqual(self.compared([1.0] * 15, new).verdict, "WIN")


class Means(unittest.TestCase):
    def test_geometric_mean_of_reciprocal_ratios_is_one(self):
        family = _family(6, 2, 8, 1.0, 0.01)
        family[0].ratio, family[1].ratio = 2.0, 0.5
        mean, low, high = stats.geometric_mean(family)
        self.assertAlmostEqual(mean, 1.0)
        self.assertTrue(low < 1.0 < high)

    def test_variation(self):
        self.assertEqual(stats.cv([5.0]), 0.0)
        self.assertTrue(stats.noisy([1.0, 1.2, 0.8]))
        self.assertFalse(stats.noisy([1.0, 1.01, 0.99]))


class ChangePoints(unittest.TestCase):
    def test_one_step_is_found_where_it_is(self):
        rng = np.random.default_rng(7)
        series = np.concatenate([rng.normal(100, 1, 12), rng.normal(110, 1, 10)])
        self.assertEqual(stats.change_points(series), [12])

    def test_noise_alone_has_none(self):
        rng = np.random.default_rng(8)
        self.assertEqual(stats.change_points(rng.normal(100, 1, 30)), [])

    def test_of_many_series_of_noise_one_has_a_shift_as_rarely_as_of_one(self):
        fooled = {1: 0, 60: 0}
        for seed in range(6):
            rng = np.random.default_rng(seed)
            noise = np.exp(rng.normal(0, 0.05, (60, 12)))
            for shares in fooled:
                fooled[shares] += any(stats.change_points(s, stats.SHIFT_ALPHA / shares) for s in noise)
        self.assertEqual(fooled, {1: 6, 60: 0})


if __name__ == "__main__":
    unittest.main()
