"""What seeds and settings can show: shares that solve a task, differences between encodings, and ranks.

The methods are those of SciPy. A seed is one observation: the same seed of two encodings has the same data, so their
difference is one observation too. With few seeds, only large and consistent differences can be shown. Errors near 0 or
1 often differ by the same few examples in every seed, so a difference is taken to vary between seeds at least as much
as the choice of the test examples makes it vary.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special, stats

SOLVED = 0.01
"""The error below which a seed has solved a task."""

CONFIDENCE = 0.95

LEAST = 3
"""The smallest number of seeds that can show a difference."""


@dataclasses.dataclass(frozen=True)
class Share:
    """How many of `count` seeds solve a task, with the exact binomial interval (Clopper & Pearson) of the share."""

    solved: int
    count: int
    low: float
    high: float


def solved(errors: Sequence[float], bound: float = SOLVED) -> Share:
    """The share of seeds with an error below `bound`.

    >>> share = solved([0.0, 0.0, 0.2, 0.0, 0.0])
    >>> share.solved, share.count, round(share.low, 2), round(share.high, 2)
    (4, 5, 0.28, 0.99)
    """
    below = sum(error < bound for error in errors)
    interval = stats.binomtest(below, len(errors)).proportion_ci(CONFIDENCE, method="exact")
    return Share(below, len(errors), float(interval.low), float(interval.high))


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much higher the errors of one encoding are than those of another, with the same seeds.

    Attributes:
      mean: the mean difference.
      low: the lower end of the 95 % interval of the mean, by Student's t; −∞ with fewer than three seeds.
      high: its upper end.
      p: the probability of so large a difference by chance, not yet corrected for other comparisons.
      shown: whether the difference is shown, after that correction.
    """

    mean: float
    low: float
    high: float
    p: float
    shown: bool = False


def difference(first: Mapping[int, float], second: Mapping[int, float], examples: int | None = None) -> Difference:
    """Compares the errors of two encodings, by seed, on the seeds that both have, with Student's t.

    The standard deviation over seeds is s, or √((p(1 − p) + q(1 − q))/examples) if that is larger, where p and q are
    the mean errors, each with one more wrong and one more right example. It is what two independent samples of
    `examples` test examples would have.

    >>> found = difference({0: 0.5, 1: 0.6, 2: 0.55}, {0: 0.1, 1: 0.1, 2: 0.12, 3: 0.0}, examples=500)
    >>> round(found.mean, 3), found.p < 0.01
    (0.443, True)

    Args:
      first: the error of each seed, a share in [0, 1] if `examples` is given.
      second: the same of the other encoding.
      examples: the number of test examples of a seed; None for measures that are not shares.
    """
    seeds = sorted(first.keys() & second.keys())
    values = np.array([[first[seed], second[seed]] for seed in seeds], np.float64).reshape(-1, 2)
    both, n = values[:, 0] - values[:, 1], len(values)
    mean = float(both.mean()) if n else math.nan
    if n < LEAST or not np.isfinite(both).all():
        return Difference(mean, -math.inf, math.inf, 1.0)
    deviation = float(both.std(ddof=1))
    if examples is not None:
        means = (values.mean(axis=0) * n * examples + 1) / (n * examples + 2)
        deviation = max(deviation, math.sqrt(float((means * (1 - means)).sum()) / examples))
    if deviation == 0:
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0)
    error = deviation / math.sqrt(n)
    half = error * float(special.stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    return Difference(mean, mean - half, mean + half, 2 * float(special.stdtr(n - 1, -abs(mean) / error)))


def differences(
    errors: Mapping[str, Mapping[int, float]], examples: int | None = None
) -> dict[tuple[str, str], Difference]:
    """Compares all pairs of encodings; `errors` maps an encoding and a seed to an error, as in `difference`.

    Differences are shown if their false discovery rate is at most 5 % (Benjamini & Yekutieli): of all differences that
    are shown, at most one in twenty is expected to be due to chance. Pairs with too few seeds are not among them.
    """
    pairs = list(itertools.combinations(errors, 2))
    found = [difference(errors[first], errors[second], examples) for first, second in pairs]
    tested = [i for i, one in enumerate(found) if math.isfinite(one.low)]
    if tested:  # pairs that cannot be compared would only make the correction stricter
        corrected = stats.false_discovery_control([found[i].p for i in tested], method="by")
        for i, p in zip(tested, corrected, strict=True):
            found[i] = dataclasses.replace(found[i], shown=bool(p <= 1 - CONFIDENCE))
    return dict(zip(pairs, found, strict=True))


def indistinguishable(errors: Mapping[str, Mapping[int, float]], examples: int | None = None) -> set[str]:
    """The encodings that no other one is shown to be better than; empty if no difference is shown.

    An encoding counts if it has enough finite errors, and can be compared with at least one other encoding.

    >>> errors = {name: {seed: base + seed / 100 for seed in range(5)} for name, base in (("a", 0.1), ("b", 0.5))}
    >>> indistinguishable(errors)
    {'a'}
    """
    worse: set[str] = set()
    compared: set[str] = set()
    for pair, found in differences(errors, examples).items():
        compared |= set(pair) if math.isfinite(found.low) else set()
        if found.shown:
            worse.add(pair[found.mean < 0])
    return compared - worse if worse else set()


@dataclasses.dataclass(frozen=True)
class Rank:
    """The mean rank of an encoding over settings, 1 for the best, with its 95 % interval."""

    mean: float
    low: float
    high: float


def ranks(errors: Mapping[str, Mapping[str, float]], seed: int = 0) -> dict[str, Rank]:
    """Ranks encodings by their mean error in each setting; `errors` maps a setting and an encoding to an error.

    Only settings that have all encodings count. Equal errors share a rank. The interval is a bootstrap over settings,
    with the given seed: it says how much the rank depends on the choice of the settings.
    """
    names = list(dict.fromkeys(name for row in errors.values() for name in row))
    rows = [[row[name] for name in names] for row in errors.values() if row.keys() >= set(names)]
    if not rows:
        return {}
    table = stats.rankdata(np.nan_to_num(np.round(rows, 4), nan=np.inf), axis=1)  # an error that is not finite is last
    found = {}
    for name, column in zip(names, table.T, strict=True):
        mean = float(column.mean())
        low = high = mean
        if len(column) > 1 and np.ptp(column) > 0:
            resampled = stats.bootstrap(
                (column,), np.mean, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed)
            )
            low, high = map(float, resampled.confidence_interval)
        found[name] = Rank(mean, low, high)
    return found
