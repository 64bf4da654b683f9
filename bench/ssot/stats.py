# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired benchmark samples: ratios, intervals, verdicts, means.

Called by: cli, compare, gate, history, plots, results. Owns: nothing, pure functions.
Every ratio is subject / peer of a rate, so above 1 the subject is faster.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Sequence

import numpy as np
from scipy import stats as sps

CONFIDENCE = 0.95
MIN_EFFECT = 0.01  # relative; smaller differences are called TIE however certain they are
MIN_PAIRS = 5  # below this no verdict is given: bursts of noise outlast three rounds
MIN_CASES = 5  # below this the spread of a geometric mean over its cases is not shown
FAMILY_ALPHA = 0.01  # chance of even one false WIN or LOSS in a table of equal libraries
SHIFT_ALPHA = 0.05  # chance of even one level shift found in a set of series that have none
NOISY_CV = 0.05
RESAMPLES = 2000
TRIM, TRIM_FROM = 0.2, 8  # share cut off at either end, once there are this many pairs


@dataclass
class Comparison:
    """Subject against peer in one case. `ratio`, `low`, `high`: subject rate / peer rate."""

    case: str
    subject: str
    peer: str
    pairs: int
    ratio: float
    low: float
    high: float
    p_value: float
    p_adjusted: float = 1.0
    verdict: str = "FEW"

    def as_dict(self) -> dict:
        return asdict(self)


def cv(values: Sequence[float]) -> float:
    """Coefficient of variation (standard deviation / mean) of rates; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / np.mean(values))


def noisy(values: Sequence[float]) -> bool:
    """True when the samples of one cell scatter by more than NOISY_CV."""
    return cv(values) > NOISY_CV


def bootstrap_interval(samples: Sequence[np.ndarray], statistic, seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap interval of `statistic` over independent samples (any unit)."""
    if min(map(len, samples)) < 2 or not any(map(np.ptp, samples)):
        value = float(statistic(*samples, axis=0))
        return value, value
    result = sps.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def paired_p_value(logs: np.ndarray) -> float:
    """Two-sided p that the centre of the log ratios is 0: a paired t test, from TRIM_FROM
    pairs on of trimmed means, so that a round disturbed by the machine does not hide an effect."""
    count = len(logs)
    if count < 2 or np.ptp(logs) == 0:
        return 0.0 if count >= MIN_PAIRS and logs[0] != 0 else 1.0
    if count < TRIM_FROM:
        return float(sps.ttest_1samp(logs, 0.0).pvalue)
    cut = int(TRIM * count)
    error = float(sps.mstats.trimmed_stde(logs, limits=(TRIM, TRIM)))
    if error == 0:
        return 0.0 if np.median(logs) != 0 else 1.0
    t = float(sps.trim_mean(logs, TRIM)) / error
    return float(2 * sps.t.sf(abs(t), count - 2 * cut - 1))


def compare_pairs(
    case: str, subject: str, peer: str, pairs: Sequence[tuple[float, float]], seed: int = 1
) -> Comparison:
    """Compares rates measured in the same rounds; `pairs` are (subject, peer) rates."""
    logs = np.log(np.array([s / p for s, p in pairs], dtype=float))
    low, high = bootstrap_interval([logs], np.median, seed)
    return Comparison(
        case=case,
        subject=subject,
        peer=peer,
        pairs=len(pairs),
        ratio=float(np.exp(np.median(logs))),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        p_value=paired_p_value(logs),
    )


def independent_p_value(a: np.ndarray, b: np.ndarray, equal_var: bool = False) -> float:
    """Two-sided p that two independent samples have one mean: Welch's t test, or Student's."""
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return float(a[0] == b[0])
    return float(sps.ttest_ind(a, b, equal_var=equal_var).pvalue)


def compare_independent(
    case: str, name: str, old: Sequence[float], new: Sequence[float]
) -> Comparison:
    """Compares rates of one allocator from two invocations, which are no pairs: new / old."""
    a, b = np.log(old), np.log(new)
    low, high = bootstrap_interval(
        [b, a], lambda x, y, axis: np.median(x, axis) - np.median(y, axis), seed=1
    )
    return Comparison(
        case=case,
        subject=name,
        peer=name,
        pairs=min(len(a), len(b)),
        ratio=float(np.exp(np.median(b) - np.median(a))),
        low=float(np.exp(low)),
        high=float(np.exp(high)),
        p_value=independent_p_value(a, b),
    )


def judge(comparisons: Sequence[Comparison]) -> None:
    """Sets adjusted p values and verdicts of one family (one subject against one peer).

    Holm's correction over the cells of the family keeps the chance of even one false WIN or
    LOSS among them at FAMILY_ALPHA, so that an A/A control reads TIE in 19 of 20 invocations
    with near certainty.
    """
    order = sorted(comparisons, key=lambda c: c.p_value)
    running = 0.0
    for rank, c in enumerate(order):
        running = max(running, min(1.0, c.p_value * (len(order) - rank)))
        c.p_adjusted = running
        if c.pairs < MIN_PAIRS:
            c.verdict = "FEW"
        elif c.low <= 1.0 <= c.high or abs(c.ratio - 1.0) < MIN_EFFECT or running >= FAMILY_ALPHA:
            c.verdict = "TIE"
        else:
            c.verdict = "WIN" if c.ratio > 1.0 else "LOSS"


def geometric_mean(comparisons: Sequence[Comparison], seed: int = 1) -> tuple[float, float, float]:
    """Geometric mean of the ratios and its 95 % bootstrap interval over the cases: how much the
    cases differ, not how certain the ratio of each is."""
    ratios = np.array([c.ratio for c in comparisons])
    return float(sps.gmean(ratios)), *bootstrap_interval([ratios], sps.gmean, seed)


def change_points(
    values: Sequence[float], alpha: float = SHIFT_ALPHA, min_effect: float = 0.03
) -> list[int]:
    """Indices at which a series of rates shifts level (binary segmentation, Student's t test). Of many
    series, each has its share of SHIFT_ALPHA for `alpha`."""
    logs = np.log(np.asarray(values, dtype=float))
    found: list[int] = []
    _segment(logs, 0, alpha, min_effect, found)
    return sorted(found)


def _segment(
    logs: np.ndarray, offset: int, alpha: float, min_effect: float, found: list[int]
) -> None:
    best, best_p = 0, 1.0
    for cut in range(2, len(logs) - 1):
        left, right = logs[:cut], logs[cut:]
        if abs(left.mean() - right.mean()) < min_effect:
            continue
        # Two equal values beside many others are next to certain for Welch's test, and common in noise.
        p = independent_p_value(left, right, equal_var=True)
        if p < best_p:
            best, best_p = cut, p
    # Every cut was a chance to be fooled: Bonferroni over the cuts tried.
    if best and best_p * max(1, len(logs) - 3) < alpha:
        _segment(logs[:best], offset, alpha, min_effect, found)
        found.append(offset + best)
        _segment(logs[best:], offset + best, alpha, min_effect, found)
