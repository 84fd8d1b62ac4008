import itertools

import numpy as np
import pytest
from scipy import stats

from cope_jax.evaluation.report import significance


def test_the_interval_of_a_share_is_the_exact_one():
    """Clopper & Pearson: the ends are quantiles of beta distributions."""
    for below, count in ((0, 5), (3, 5), (25, 25), (7, 25)):
        share = significance.solved([0.0] * below + [0.5] * (count - below))
        assert (share.solved, share.count) == (below, count)
        assert share.low == pytest.approx(stats.beta.ppf(0.025, below, count - below + 1) if below else 0)
        assert share.high == pytest.approx(stats.beta.ppf(0.975, below + 1, count - below) if below < count else 1)


def test_an_error_at_the_bound_does_not_solve():
    assert significance.solved([0.01, 0.0099]).solved == 1
    assert significance.solved([0.04, 0.06], bound=0.05).solved == 1


def test_intervals_of_differences_cover_the_truth():
    """Of 2,000 simulated pairs of encodings with five seeds, 95 % of the intervals contain the true difference."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.3, 0.1, (2000, 5)), rng.normal(0.2, 0.2, (2000, 5))
    inside = 0
    for a, b in zip(first, second, strict=True):
        found = significance.difference(dict(enumerate(a)), dict(enumerate(b)))
        inside += found.low < 0.1 < found.high
    assert 0.93 < inside / 2000 < 0.97


def test_differences_are_by_seed():
    """Equal seeds share their data, so a difference that is the same for each seed is shown although errors vary."""
    rng = np.random.default_rng(0)
    base = rng.uniform(0.1, 0.9, 5)
    errors = {
        "a": dict(enumerate(base)),
        "b": dict(enumerate(base + 0.02 + rng.normal(0, 0.001, 5))),
    }
    assert significance.differences(errors)["a", "b"].shown
    shuffled = {"a": errors["a"], "b": dict(zip(range(5), np.roll(list(errors["b"].values()), 1), strict=True))}
    assert not significance.differences(shuffled)["a", "b"].shown
    assert significance.indistinguishable(errors) == {"a"}
    assert significance.indistinguishable(shuffled) == set()
    few = errors | {"c": {0: 0.0}}
    assert significance.indistinguishable(few) == {"a"}  # one seed of c shows nothing


def test_only_seeds_that_both_have_count():
    found = significance.difference({0: 0.5, 1: 0.5, 2: 0.5, 7: 0.9}, {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.0})
    assert found.mean == pytest.approx(0.2)
    assert significance.difference({0: 0.5, 1: 0.5}, {0: 0.1, 1: 0.1}).p == 1  # too few seeds
    assert significance.difference({0: 0.5}, {0: 0.1}).p == 1
    assert np.isnan(significance.difference({0: 0.5}, {1: 0.1}).mean)
    same = dict.fromkeys(range(3), 0.5)
    assert significance.difference(same, same).p == 1


def test_student_by_scipy():
    first, second = np.random.default_rng(0).normal(5.0, 1.0, (2, 6))
    found = significance.difference(dict(enumerate(first)), dict(enumerate(second)))
    test = stats.ttest_rel(first, second)
    assert found.p == pytest.approx(test.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(test.confidence_interval(0.95)))


def test_a_difference_varies_at_least_as_much_as_the_choice_of_examples():
    """Seeds that all differ by the same: the standard deviation is that of two samples of 100 examples."""
    first, second = dict.fromkeys(range(4), 0.5), dict.fromkeys(range(4), 0.2)
    found = significance.difference(first, second, examples=100)
    share = (np.array([0.5, 0.2]) * 400 + 1) / 402
    error = np.sqrt((share * (1 - share)).sum() / 100 / 4)
    assert found.p == pytest.approx(2 * stats.t.sf(0.3 / error, 3))
    assert found.high - 0.3 == pytest.approx(error * stats.t.ppf(0.975, 3))
    assert significance.difference(first, second).p == 0  # for a measure that is no share


def test_errors_that_are_not_finite_show_nothing():
    errors = {
        "a": {0: 0.1, 1: 0.11, 2: 0.1, 3: 0.1},
        "b": {0: 0.5, 1: 0.52, 2: 0.5, 3: 0.51},
        "broken": {0: 0.9, 1: float("nan"), 2: 0.9, 3: 0.9},
        "apart": {7: 0.9, 8: 0.9, 9: 0.9},
    }
    assert significance.indistinguishable(errors, 500) == {"a"}
    ranks = significance.ranks({"one": {"a": 0.1, "b": float("nan")}, "two": {"a": 0.1, "b": 0.3}})
    assert {name: rank.mean for name, rank in ranks.items()} == {"a": 1, "b": 2}


def test_grids_without_differences_show_hardly_any():
    """The false discovery rate is at most 5 %: without any true difference, one grid in twenty may show one."""
    rng = np.random.default_rng(0)
    shown = 0
    for values in rng.normal(0.3, 0.1, (300, 5, 5)):
        errors = {name: dict(enumerate(row)) for name, row in zip("abcde", values, strict=True)}
        shown += any(found.shown for found in significance.differences(errors).values())
    assert shown / 300 < 0.05


@pytest.mark.parametrize("error", [0.002, 0.01, 0.2, 0.98])
@pytest.mark.parametrize("seeds", [3, 5])
def test_equal_encodings_with_few_wrong_examples_show_hardly_any(seeds, error):
    """29 encodings with the same expected error of 500 examples: small errors often differ by the same in all seeds."""
    rng, shown = np.random.default_rng(0), 0
    for values in rng.binomial(500, error, (40, 29, seeds)) / 500:
        errors = {str(name): dict(enumerate(row)) for name, row in enumerate(values)}
        shown += any(found.shown for found in significance.differences(errors, examples=500).values())
    assert shown <= 2


@pytest.mark.parametrize(("p", "shown"), [(0.04, False), (0.02, True)])
def test_the_correction_holds_for_dependent_differences(p, shown, monkeypatch):
    """Three equal p: Benjamini & Yekutieli multiply by 1 + 1/2 + 1/3, Benjamini & Hochberg not at all."""
    monkeypatch.setattr(significance, "difference", lambda *_: significance.Difference(0.1, 0.0, 0.2, p))
    found = significance.differences({name: {0: 0.1, 1: 0.2} for name in "abc"})
    assert [one.shown for one in found.values()] == [shown] * 3


def test_encodings_with_few_seeds_hide_no_difference():
    errors = {"a": dict(enumerate([0.1, 0.12, 0.11])), "b": dict(enumerate([0.2, 0.23, 0.25]))}
    p = significance.differences(errors)["a", "b"].p
    assert p * 4 < 0.05 < p * 100
    errors |= {f"few {i}": {0: 0.1, 1: 0.2} for i in range(20)}
    assert significance.differences(errors)["a", "b"].shown


def test_all_pairs_are_compared():
    errors = {
        name: {seed: base + seed / 50 for seed in range(5)} for name, base in zip("abc", (0, 0.3, 0.6), strict=True)
    }
    found = significance.differences(errors)
    assert found.keys() == set(itertools.combinations("abc", 2))
    assert all(one.shown and one.mean < 0 for one in found.values())
    assert significance.differences({"a": {0: 0.1}}) == {}


def test_ranks():
    errors = {
        "one": {"a": 0.1, "b": 0.2, "c": 0.3},
        "two": {"a": 0.2, "b": 0.1, "c": 0.3},
        "three": {"a": 0.1, "b": 0.1, "c": 0.3},
        "partial": {"a": 0.9, "b": 0.1},
    }
    ranks = significance.ranks(errors)
    assert {name: rank.mean for name, rank in ranks.items()} == pytest.approx({"a": 1.5, "b": 1.5, "c": 3})
    assert (ranks["c"].low, ranks["c"].high) == (3, 3)
    assert 1 <= ranks["a"].low < 1.5 < ranks["a"].high <= 2
    assert significance.ranks({"one": {"a": 1.0}, "two": {"b": 1.0}}) == {}
