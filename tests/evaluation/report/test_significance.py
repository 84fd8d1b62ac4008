import itertools
import math

import numpy as np
import pytest
from scipy import stats

from cope_jax.errors import ConfigError
from cope_jax.evaluation.report import significance
from tests.oracle import text_losses


def test_the_interval_of_a_share_is_the_exact_one():
    """Clopper & Pearson: the ends are quantiles of beta distributions."""
    for below, count in ((0, 5), (3, 5), (25, 25), (7, 25)):
        share = significance.solved([0.0] * below + [0.5] * (count - below))
        assert (share.solved, share.count) == (below, count)
        assert share.low == pytest.approx(
            stats.beta.ppf(0.025, below, count - below + 1) if below else 0
        )
        assert share.high == pytest.approx(
            stats.beta.ppf(0.975, below + 1, count - below) if below < count else 1
        )


def test_an_error_at_the_bound_does_not_solve():
    assert significance.solved([0.01, 0.0099]).solved == 1
    assert significance.solved([0.04, 0.06], bound=0.05).solved == 1


def by_seed(errors):
    return dict(enumerate(errors))


def test_p_is_the_share_of_all_assignments_of_the_ranks():
    """Counted by brute force, with and without equal values."""
    rng = np.random.default_rng(0)
    for first, second in [(4, 4), (3, 6), (5, 5), (2, 7)] * 3:
        values = rng.integers(0, 4, first + second) / 7
        ranks = stats.rankdata(values)
        middle = first * (first + second + 1) / 2
        sums = np.array([sum(chosen) for chosen in itertools.combinations(ranks, first)]) - middle
        shift, p = significance.rank_sum(values[:first], values[first:])
        assert shift == pytest.approx(ranks[:first].sum() - middle)
        assert p == pytest.approx(np.mean(np.abs(sums) >= abs(shift) - 1e-9))


@pytest.mark.parametrize("seeds", [(5, 5), (25, 25), (25, 5), (40, 60)])
def test_p_is_scipys_without_equal_errors(seeds):
    rng = np.random.default_rng(0)
    first, second = rng.normal(5.0, 1.0, seeds[0]), rng.normal(5.5, 1.0, seeds[1])
    expected = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert significance.rank_sum(first, second)[1] == pytest.approx(expected)


def test_p_is_fishers_if_few_of_many_seeds_have_errors():
    """Five errors among 62 seeds, all of them in the second half."""
    errors = np.r_[np.zeros(31 + 26), np.arange(1, 6) / 100]
    expected = stats.fisher_exact([[31, 0], [26, 5]]).pvalue
    assert round(expected, 4) == 0.0525
    assert significance.rank_sum(errors[:31], errors[31:])[1] == pytest.approx(expected)


def test_all_seeds_of_both_count():
    """25 seeds without errors, five with some: only one or two of C(30, 5) orders are like this."""
    difference = significance.difference(
        dict.fromkeys(range(25), 0.0), by_seed([0.001, 0.0008, 0.003, 0.01, 0.096])
    )
    assert difference.mean == pytest.approx(-0.02216)
    # No other assignment of the ranks is as far.
    assert difference.p == pytest.approx(1 / math.comb(30, 5))
    other_seeds = {7: 0.1, 8: 0.2, 9: 0.3, 10: 0.4}
    difference = significance.difference({0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}, other_seeds)
    assert difference.p == pytest.approx(2 / math.comb(8, 4))


def test_few_seeds_and_errors_that_are_not_finite_are_not_compared():
    four, three = dict.fromkeys(range(4), 0.1), dict.fromkeys(range(3), 0.5)
    assert significance.difference(four, three) is None
    assert significance.difference(four, {**three, 3: math.nan}) is None
    errors = {
        "a": by_seed([0.1, 0.11, 0.1, 0.1, 0.12]),
        "b": by_seed([0.5, 0.52, 0.5, 0.51, 0.5]),
        "broken": by_seed([0.9, math.nan, 0.9, 0.9, 0.9]),
        "few": by_seed([0.0]),
    }
    assert significance.differences(errors, 500).keys() == {("a", "b")}
    assert significance.indistinguishable(errors, 500) == {"a"}
    ranks = significance.ranks({"one": {"a": 0.1, "b": math.nan}, "two": {"a": 0.1, "b": 0.3}})
    assert {name: rank.mean for name, rank in ranks.items()} == {"a": 1, "b": 2}
    same = dict.fromkeys(range(5), 0.5)
    assert significance.difference(same, same).p == 1


def test_ranks_that_contradict_the_means_show_nothing():
    """The mean of the first is lower, but in most seeds it has the higher error."""
    first, second = by_seed([0.1] * 19 + [0.2]), by_seed([0.0] * 17 + [0.9] * 3)
    assert (
        significance.rank_sum(np.array(list(first.values())), np.array(list(second.values())))[1]
        < 0.001
    )
    difference = significance.difference(first, second)
    assert (difference.mean < 0, difference.p) == (True, 1)


def test_a_difference_is_larger_than_the_choice_of_examples_explains():
    first, second = by_seed([0.02, 0.022, 0.024, 0.026]), by_seed([0.01, 0.012, 0.014, 0.016])
    few, many = (
        significance.difference(first, second, examples, sets=(4, 4)).p
        for examples in (200, 100_000)
    )
    share = (np.array([0.023, 0.013]) * 800 + 1) / 802
    deviation = np.sqrt((share * (1 - share)).sum() / 800)
    assert few == pytest.approx(2 * stats.norm.sf(0.01 / deviation))
    assert many == significance.difference(first, second).p == pytest.approx(2 / math.comb(8, 4))


def test_seeds_of_one_test_set_may_all_fail_on_the_same_examples():
    """Two of 1,000 examples in all of five seeds show a difference only if each seed had its own."""
    first, second = by_seed([0.002] * 5), by_seed([0.0] * 5)
    order = 2 / math.comb(10, 5)
    assert significance.difference(first, second, 1000, sets=(5, 5)).p == pytest.approx(order)
    share = np.array([3, 1]) / 1002
    deviation = np.sqrt((share * (1 - share)).sum() / 1000)
    expected = 2 * stats.norm.sf(0.002 / deviation)
    assert expected > 0.3
    assert significance.difference(first, second, 1000).p == pytest.approx(expected)
    few, many = ({"a": sets, "b": sets} for sets in (1, 5))
    errors = {"a": second, "b": first}
    assert significance.indistinguishable(errors, 1000, sets=few) == set()
    assert significance.indistinguishable(errors, 1000, sets=many) == {"a"}
    one_sided = significance.difference(first, second, 1000, sets=(1, 5)).p
    share = np.array([3 / 1002, 1 / 5002])
    deviation = np.sqrt((share * (1 - share) / [1, 5]).sum() / 1000)
    assert one_sided == pytest.approx(2 * stats.norm.sf(0.002 / deviation))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4,), (3, 1), (2, 2)])
def test_the_number_of_test_sets_gives_the_variance_of_the_mean(sizes):
    """Seeds of a test set have the same error here, so that the mean is one over test sets."""
    seeds = [number for number, size in enumerate(sizes) for _ in range(size)]
    drawn = np.random.default_rng(0).normal(size=(100_000, len(sizes)))
    variance = drawn[:, seeds].mean(axis=1).var()
    assert 1 / significance.test_sets(seeds) == pytest.approx(variance, rel=0.02)


def blocks_of(losses, weights=64.0):
    return np.stack([losses, np.broadcast_to(weights, np.shape(losses))], axis=1)


def test_paired_losses_of_blocks():
    """Scipy's paired t test for few blocks of equal weights; else the oracle's loops."""
    rng = np.random.default_rng(0)
    second = rng.normal(4.0, 1.0, 6)  # the blocks differ much more than the models
    first = second + 0.03 + rng.normal(0, 0.05, 6)
    for pair in ((first, second), (second, first)):
        compared, expected = significance.paired(*map(blocks_of, pair)), stats.ttest_rel(*pair)
        assert compared.mean == pytest.approx((pair[0] - pair[1]).mean())
        assert compared.p == pytest.approx(expected.pvalue)
        assert (compared.low, compared.high) == pytest.approx(expected.confidence_interval(0.95))
    for count in (2, 3, 12, 40, 130):
        text = np.cumsum(rng.normal(0, 0.1, count))
        weights = rng.integers(30, 90, count).astype(float)
        blocks = blocks_of(text + rng.normal(0, 0.05, count), weights), blocks_of(0 * text, weights)
        mean, error, stretches = text_losses.paired(*blocks)
        compared = significance.paired(*blocks)
        half = error * stats.t.ppf(0.975, stretches - 1)
        assert (compared.mean, compared.low, compared.high) == pytest.approx(
            (mean, mean - half, mean + half)
        )
        assert compared.p == pytest.approx(2 * stats.t.sf(abs(mean) / error, stretches - 1))


def test_a_short_last_block_is_no_block_of_its_own():
    losses, weights = np.array([0.1, 0.3, 0.2, 9.0]), np.array([8192, 8192, 8192, 328])
    blocks = blocks_of(losses, weights), blocks_of(0 * losses, weights)
    compared, (mean, error, stretches) = significance.paired(*blocks), text_losses.paired(*blocks)
    assert stretches == 3
    assert compared.p == pytest.approx(2 * stats.t.sf(mean / error, 2))


def test_paired_losses_need_the_same_blocks_and_more_than_one():
    losses = blocks_of(np.array([4.0, 5.0]))
    same = significance.paired(losses, losses)
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert significance.paired(losses, losses - [0.5, 0]).p == 0
    assert significance.paired(losses[:1], losses[:1]) is None
    for weights, known in (([3.0, 1.0], True), ([4.0, 1.0], False), ([1.0, 1024.0], False)):
        blocks = blocks_of(np.array([4.0, 5.0]), weights)
        assert bool(significance.paired(blocks, losses * [1, 0] + blocks * [0, 1])) == known
    assert significance.paired(losses, losses * [math.nan, 1]) is None
    for other in (blocks_of(np.array([4.0, 5.0]), 63.0), blocks_of(np.array([4.0, 5.0, 6.0]))):
        with pytest.raises(
            ConfigError, match="their weights differ: measure both on the same text"
        ):
            significance.paired(losses, other)


@pytest.mark.parametrize("tie, least", [(0.0, 0.93), (0.4, 0.9)])
def test_intervals_of_paired_losses_cover_the_difference(tie, least):
    """In 95 % of 1,000 texts of 25 blocks, and a little less often where neighbours are alike."""
    rng = np.random.default_rng(1)
    weights = np.array([1024.0] * 24 + [328.0])
    covered = 0
    for _ in range(1000):
        noise = rng.normal(0, 0.03, 25)
        for block in range(1, 25):
            noise[block] += tie * noise[block - 1]
        first, second = blocks_of(4.02 + noise, weights), blocks_of(4.0 + 0 * noise, weights)
        compared = significance.paired(first, second)
        covered += compared.low < 0.02 < compared.high
    assert least < covered / 1000 < 0.98


def test_a_difference_of_losses_is_larger_than_the_choice_of_the_text_explains():
    first, second = by_seed([4.02, 4.022, 4.024, 4.026]), by_seed([4.01, 4.012, 4.014, 4.016])
    seeds = 2 / math.comb(8, 4)
    text = np.linspace(3, 5, 6)
    firm, loose = (
        (blocks_of(text + 0.01 + noise * np.array([1, -1, 1, -1, 1, -1])), blocks_of(text))
        for noise in (0.001, 0.1)
    )
    assert significance.difference(first, second, blocks=firm).p == pytest.approx(seeds)
    assert significance.difference(first, second, blocks=loose).p == pytest.approx(
        significance.paired(*loose).p
    )
    assert significance.difference(first, second, blocks=(text[:1, None] * [1, 1],) * 2).p == 1
    turned = blocks_of(text), blocks_of(text + 0.01)
    assert significance.difference(first, second, blocks=turned).p == 1
    five = {name: by_seed(np.arange(5) / 1000 + mean) for name, mean in (("a", 4.0), ("b", 4.1))}
    for noise, shown in ((0.001, {"a"}), (1.0, set())):
        blocks = {"a": blocks_of(text), "b": blocks_of(text + 0.1 + noise * np.cos(7 * text))}
        assert significance.indistinguishable(five, blocks=blocks) == shown


def of_test_examples(error):
    return lambda rng, size: rng.binomial(500, error, size) / 500


NULLS = {
    "normal": lambda rng, size: rng.normal(0.3, 0.1, size),
    "heavy tail": lambda rng, size: np.exp(rng.normal(-4, 1.5, size)).clip(0, 1),
    "half of the seeds solve it": lambda rng, size: np.where(
        rng.random(size) < 0.5, 0, rng.normal(0.3, 0.02, size)
    ),
    "few seeds do not": lambda rng, size: np.where(
        rng.random(size) < 0.9, 0, rng.normal(0.3, 0.02, size)
    ),
    **{
        f"{100 * error:g} % of 500 examples": of_test_examples(error)
        for error in (0.002, 0.01, 0.2, 0.98)
    },
}
"""Errors of seeds whose distribution is the same for all encodings."""


@pytest.mark.parametrize("errors", NULLS.values(), ids=NULLS)
@pytest.mark.parametrize(
    ("encodings", "seeds", "grids"), [(2, 4, 100), (3, 5, 50), (10, 5, 12), (29, 5, 1)]
)
def test_equal_encodings_hardly_ever_differ(errors, encodings, seeds, grids):
    """Without any true difference, at most one grid in twenty shows one (to three deviations)."""
    rng, shown = np.random.default_rng(0), 0
    for values in errors(rng, (grids, encodings, seeds)):
        differences = significance.differences(
            {str(name): by_seed(row) for name, row in enumerate(values)}, 500
        )
        shown += any(pair.shown for pair in differences.values())
    assert shown <= 0.05 * grids + 3 * math.sqrt(0.05 * 0.95 * grids)


@pytest.mark.parametrize("name", ["normal", "half of the seeds solve it"])
@pytest.mark.parametrize("worse", [5, 1])
def test_of_the_differences_that_are_shown_few_are_by_chance(name, worse):
    """Some of ten encodings are worse by different amounts, others equal: pairs share encodings."""
    rng, shares, equal = np.random.default_rng(0), [], 10 - worse
    for values in NULLS[name](rng, (30, 10, 5)):
        values[equal:] += 0.3 * np.arange(1, worse + 1)[:, None]
        differences = significance.differences(
            {str(name): by_seed(row) for name, row in enumerate(values)}
        )
        shown = [pair for pair, difference in differences.items() if difference.shown]
        shares.append(sum(int(max(pair)) < equal for pair in shown) / max(1, len(shown)))
    assert np.mean(shares) < 0.05


@pytest.mark.parametrize(("p", "shown"), [(0.06, 0), (0.05, 3), (0.016, 3)])
def test_the_correction_is_for_all_pairs(p, shown, monkeypatch):
    """Benjamini & Hochberg: three equal p stay unchanged; a single small p counts three times."""
    monkeypatch.setattr(significance, "difference", lambda *_: significance.Difference(0.1, p))
    differences = significance.differences({name: {} for name in "abc"})
    assert sum(pair.shown for pair in differences.values()) == shown
    rest = iter([p, 0.9, 0.9])
    monkeypatch.setattr(
        significance, "difference", lambda *_: significance.Difference(0.1, next(rest))
    )
    differences = significance.differences({name: {} for name in "abc"})
    assert [pair.shown for pair in differences.values()] == [3 * p <= 0.05, False, False]


def test_all_pairs_are_compared():
    errors = {
        name: {seed: base + seed / 50 for seed in range(5)}
        for name, base in zip("abc", (0, 0.3, 0.6), strict=True)
    }
    differences = significance.differences(errors)
    assert differences.keys() == set(itertools.combinations("abc", 2))
    assert all(pair.shown and pair.mean < 0 for pair in differences.values())
    assert significance.differences({"a": {0: 0.1}}) == {}


def test_ranks():
    errors = {
        "one": {"a": 0.1, "b": 0.2, "c": 0.3},
        "two": {"a": 0.2, "b": 0.1, "c": 0.3},
        "three": {"a": 0.1, "b": 0.1, "c": 0.3},
        "partial": {"a": 0.9, "b": 0.1},
    }
    ranks = significance.ranks(errors)
    assert {name: rank.mean for name, rank in ranks.items()} == pytest.approx(
        {"a": 1.5, "b": 1.5, "c": 3}
    )
    assert (ranks["c"].low, ranks["c"].high) == (3, 3)
    assert 1 <= ranks["a"].low < 1.5 < ranks["a"].high <= 2
    assert significance.ranks({"one": {"a": 1.0}, "two": {"b": 1.0}}) == {}
