"""Statistics over seeds and settings: shares that solve a task, differences, and ranks.

A seed is one observation. Errors of seeds are skewed, since some seeds solve a task and others do
not. No test may assume a distribution: the exact rank sum test on all seeds of both compares
encodings. With few seeds, only large and consistent differences can be shown. Errors near 0 or 1
often differ by the same few examples in every seed. A difference must therefore also be larger than
the choice of the test examples explains.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from cope_jax.errors import ConfigError

SOLVED = 0.01
"""The error below which a seed has solved a task."""

CONFIDENCE = 0.95

LEAST = 4
"""The fewest seeds that can show a difference: of 3 and 3, one order in ten is separated."""

TEST = "exact rank sum test over all seeds, false discovery rate 5 % in a column"
"""Name of the test that shows differences."""


@dataclasses.dataclass(frozen=True)
class Share:
    """The number of `count` seeds that solve a task; the share's exact Clopper-Pearson interval."""

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
    from scipy import special  # here and below, because a run that trains does without SciPy

    below, count = sum(error < bound for error in errors), len(errors)
    tail = (1 - CONFIDENCE) / 2
    low = float(special.betaincinv(below, count - below + 1, tail)) if below else 0.0
    high = float(special.betaincinv(below + 1, count - below, 1 - tail)) if below < count else 1.0
    return Share(below, count, low, high)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between the errors of two encodings.

    Attributes:
      mean: the difference of the mean errors.
      p: the probability of so large a difference by chance, not yet corrected for other
        comparisons.
      shown: whether the difference is shown, after that correction.
    """

    mean: float
    p: float
    shown: bool = False


STRETCHES = 6
"""The most stretches of a text that the paired test takes as independent."""


LIGHTEST = 0.25
"""The least weight of the lighter of two stretches: with less their difference says too little, and
intervals are too narrow; with three or more stretches they are not.
"""


@dataclasses.dataclass(frozen=True)
class Paired:
    """The mean paired difference of losses, its 95 % interval over the text, and its p."""

    mean: float
    low: float
    high: float
    p: float


def paired(first: np.ndarray, second: np.ndarray) -> Paired | None:
    """Compares two losses on the same blocks of text by the paired t test; None for one block.

    Neighbouring blocks may be of one chapter, so they are joined to at most `STRETCHES` stretches of
    about the same weight. Of two, the lighter must have the weight `LIGHTEST`, or the text counts
    as one block. With dᵢ the difference of the losses of stretch i and wᵢ its weight, the mean is
    d = Σwᵢdᵢ/Σwᵢ. Its squared standard error for n stretches is n/(n − 1) · Σ(wᵢ(dᵢ − d)/Σwᵢ)², and
    t has n − 1 degrees of freedom; with equal weights this is the paired t test. The stretches are a
    sample of the text, so the interval says what other text would give with the same trained models,
    not what other seeds would.

    >>> first, second = np.array([[2.0, 9], [3.0, 9], [4.0, 9]]), np.array([[1.5, 9], [2.0, 9], [3.5, 9]])
    >>> compared = paired(first, second)
    >>> round(compared.mean, 3), round(compared.low, 3), round(compared.high, 3), round(compared.p, 3)
    (0.667, -0.05, 1.384, 0.057)

    Args:
      first: the mean loss and the weight of each block, `[n, 2]`.
      second: the same of another model.

    Raises:
      ConfigError: the weights of the blocks differ, so they are not the same text.
    """
    from scipy import stats

    if not np.array_equal(first[:, 1], second[:, 1]):
        raise ConfigError(
            "paired losses need the same blocks, but their weights differ: measure both on the same text with the same "
            "evaluation.batch_size"
        )
    differences_N, weights_N = first[:, 0] - second[:, 0], first[:, 1] / first[:, 1].sum()
    middles_N = np.cumsum(weights_N) - weights_N / 2
    stretches_N = (min(STRETCHES, len(first)) * middles_N).astype(int)
    weights = np.bincount(stretches_N, weights_N)
    sums = np.bincount(stretches_N, weights_N * differences_N)
    mean, count = float(sums.sum()), int((weights > 0).sum())
    if (
        count < 2
        or (count == 2 and weights[weights > 0].min() < LIGHTEST)
        or not math.isfinite(mean)
    ):
        return None
    residuals = sums - weights * mean
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals))
    half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
    p = 2 * float(stats.t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    return Paired(mean, mean - half, mean + half, p)


def difference(
    first: Mapping[int, float],
    second: Mapping[int, float],
    examples: float | None = None,
    blocks: tuple[np.ndarray, np.ndarray] | None = None,
    sets: tuple[float, float] = (1, 1),
) -> Difference | None:
    """Compares the errors of two encodings; None with too few seeds or an error that is not finite.

    p is the larger of two: of `rank_sum`, and of the normal test whether both have the same
    expected error on test examples. Its variance is (p(1 − p)/s + q(1 − q)/t)/examples, where p and
    q are the mean errors, each with one more wrong and one more right example, and s and t the
    numbers of test sets in `sets`. Seeds with the same test examples may fail on the same ones, so
    they count as one. For losses the second is that of `paired`. p is 1 if the encoding of the lower
    mean has the higher ranks or the higher loss of blocks, or if there is a single block.

    >>> first, second = [0.5, 0.6, 0.55, 0.5], [0.1, 0.1, 0.12, 0.0]
    >>> compared = difference(dict(enumerate(first)), dict(enumerate(second)), examples=500, sets=(4, 4))
    >>> round(compared.mean, 4), round(compared.p, 3)
    (0.4575, 0.029)

    Args:
      first: the error of each seed, a share in [0, 1] if `examples` is given.
      second: the same of the other encoding.
      examples: the number of test examples of a seed; None for measures that are not shares.
      blocks: the losses of both on blocks of text, means over seeds, as for `paired`.
      sets: the number of test sets of each, as of `test_sets`.
    """
    values = [np.array(list(errors.values()), np.float64) for errors in (first, second)]
    seeds = np.array([len(errors) for errors in values])
    if seeds.min() < LEAST or not np.isfinite(np.concatenate(values)).all():
        return None
    means = np.array([errors.mean() for errors in values])
    mean = float(means[0] - means[1])
    shift, p = rank_sum(*values)
    p = p if shift * mean > 0 else 1.0
    if examples is not None and p < 1:
        counts = np.array(sets) * examples
        shares = (means * counts + 1) / (counts + 2)
        deviation = math.sqrt(float((shares * (1 - shares) / counts).sum()))
        p = max(p, math.erfc(abs(mean) / deviation / math.sqrt(2)))
    if blocks is not None:
        compared = paired(*blocks)
        p = max(p, compared.p) if compared and compared.mean * mean > 0 else 1.0
    return Difference(mean, p)


def test_sets(data_seeds: Iterable[Hashable]) -> float:
    """The number of test sets of runs with these seeds of their data.

    Runs with the same one have the same test examples. With cᵢ runs on set i, the number is
    (Σcᵢ)²/Σcᵢ², which gives the mean over runs its variance if all runs on a set fail together.

    >>> test_sets([0, 1, 2]), test_sets([7, 7, 7]), test_sets([0, 0, 1, 1])
    (3.0, 1.0, 2.0)
    """
    counts = Counter(data_seeds).values()
    return sum(counts) ** 2 / sum(count**2 for count in counts)


def rank_sum(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Wilcoxon's rank sum test: the first sum's excess over its expectation, and the two-sided p.

    Equal values share a rank. p is exact: the share of all assignments of the ranks to the samples
    whose sum is at least as far from its expectation.

    >>> rank_sum(np.array([3.0, 4.0, 5.0]), np.array([1.0, 2.0]))
    (3.0, 0.2)
    """
    from scipy import stats

    both = np.round(np.concatenate([first, second]), 12)  # errors that differ by rounding are equal
    # Equal values may share half a rank.
    doubled = np.rint(2 * stats.rankdata(both)).astype(np.int64)
    middle = len(first) * (len(both) + 1)
    shift = int(doubled[: len(first)].sum()) - middle
    counts = _rank_sums(tuple(sorted(doubled.tolist())), len(first))
    far = np.abs(np.arange(len(counts)) - middle) >= abs(shift)
    return shift / 2, float(counts[far].sum() / counts.sum())


@functools.lru_cache(maxsize=1000)
def _rank_sums(ranks: tuple[int, ...], chosen: int) -> np.ndarray:
    """In how many ways `chosen` of the ranks have each sum."""
    counts = np.zeros((chosen + 1, sum(ranks) + 1))
    counts[0, 0] = 1
    total = 0
    for number, rank in enumerate(ranks, start=1):  # of no rank so far is the sum above `total`
        size = min(number, chosen)
        counts[1 : size + 1, rank : total + rank + 1] += counts[:size, : total + 1]
        total += rank
    return counts[chosen].copy()  # without the rest, because it is kept


def differences(
    errors: Mapping[str, Mapping[int, float]],
    examples: float | None = None,
    blocks: Mapping[str, np.ndarray] | None = None,
    sets: Mapping[str, float] | None = None,
) -> dict[tuple[str, str], Difference]:
    """Compares all pairs of encodings that can be compared, by errors of encodings and seeds.

    `sets` has the number of test sets of each encoding; None means one, which all seeds share.
    Differences are shown if their false discovery rate is at most 5 % (Benjamini & Hochberg): of
    all differences that are shown, at most one in twenty is expected to be due to chance.
    """
    from scipy import stats

    pairs = itertools.combinations(errors, 2)
    compared_of = {
        (a, b): difference(
            errors[a],
            errors[b],
            examples,
            (blocks[a], blocks[b]) if blocks else None,
            (sets[a], sets[b]) if sets else (1, 1),
        )
        for a, b in pairs
    }
    tested = {pair: compared for pair, compared in compared_of.items() if compared}
    if not tested:
        return {}
    ps = [compared.p for compared in tested.values()]
    corrected = stats.false_discovery_control(ps, method="bh")
    return {
        pair: dataclasses.replace(compared, shown=bool(p <= 1 - CONFIDENCE))
        for (pair, compared), p in zip(tested.items(), corrected, strict=True)
    }


def indistinguishable(
    errors: Mapping[str, Mapping[int, float]],
    examples: float | None = None,
    blocks: Mapping[str, np.ndarray] | None = None,
    sets: Mapping[str, float] | None = None,
) -> set[str]:
    """The encodings that no other one is shown to be better than; empty if no difference is shown.

    An encoding counts if it can be compared with at least one other encoding.

    >>> errors = {name: {seed: base + seed / 100 for seed in range(5)} for name, base in (("a", 0.1), ("b", 0.5))}
    >>> indistinguishable(errors)
    {'a'}
    """
    shown = differences(errors, examples, blocks, sets)
    worse = {pair[compared.mean < 0] for pair, compared in shown.items() if compared.shown}
    return set(itertools.chain(*shown)) - worse if worse else set()


@dataclasses.dataclass(frozen=True)
class Rank:
    """The mean rank of an encoding over settings, 1 for the best, with its 95 % interval."""

    mean: float
    low: float
    high: float


def ranks(errors: Mapping[str, Mapping[str, float]], seed: int = 0) -> dict[str, Rank]:
    """Ranks encodings by their mean errors in each setting, by errors of settings and encodings.

    Only settings that have all encodings count. Equal errors share a rank. The interval is a
    bootstrap over settings, with the given seed: it says how much the rank depends on the choice of
    the settings.
    """
    from scipy import stats

    names = list(dict.fromkeys(name for row in errors.values() for name in row))
    rows = [[row[name] for name in names] for row in errors.values() if row.keys() >= set(names)]
    if not rows:
        return {}
    # An error that is not finite is last.
    table = stats.rankdata(np.nan_to_num(np.round(rows, 4), nan=np.inf), axis=1)
    by_name = {}
    for name, column in zip(names, table.T, strict=True):
        mean = float(column.mean())
        low = high = mean
        if len(column) > 1 and np.ptp(column) > 0:
            resampled = stats.bootstrap(
                (column,),
                np.mean,
                confidence_level=CONFIDENCE,
                method="percentile",
                rng=np.random.default_rng(seed),
            )
            low, high = map(float, resampled.confidence_interval)
        by_name[name] = Rank(mean, low, high)
    return by_name
