"""Gates of known causes: they open at one feature, at random features, and by the token."""

import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import head_scores
from cope_jax.evaluation.gates.inspect_text import features
from tests.models.cases import config, model, tokens

NUMBER = 800


@pytest.fixture(scope="module")
def text():
    """(features, tokens) of a made-up text, in which each token decides what it is."""
    words = np.array([" the", " lamp", "s", ".", "\n", " 7", " ("])
    tokens_N = np.random.default_rng(0).integers(0, len(words), NUMBER)
    return features(list(words[tokens_N])), tokens_N


def count_pairs(gates_N, has_N):
    pairs = [(a > b) + (a == b) / 2 for a in gates_N[has_N] for b in gates_N[~has_N]]
    return sum(pairs) / len(pairs)


def test_the_auc_is_the_share_of_pairs_ties_counted_half():
    rng = np.random.default_rng(1)
    for levels in (3, 1000):
        gates_N, has_N = rng.integers(0, levels, 60) / levels, rng.random(60) < 0.3
        assert head_scores.auc(gates_N, has_N) == pytest.approx(
            count_pairs(gates_N, has_N), abs=1e-12
        )
        times = rng.integers(0, 3, 60)
        again = count_pairs(np.repeat(gates_N, times), np.repeat(has_N, times))
        assert head_scores._aucs(gates_N, has_N, times[None].astype(float))[0] == pytest.approx(
            again, abs=1e-12
        )
    assert (
        np.isnan(head_scores.auc(gates_N, np.ones(60, bool)))
        and head_scores.auc(np.zeros(60), has_N) == 0.5
    )


def test_heads_are_ranked_by_what_they_follow(text):
    has, tokens_N = text
    rng = np.random.default_rng(2)
    newline = np.where(has["newline"], 0.9, 0.1 + 0.05 * rng.random(NUMBER))
    ends = 0.3 * has["sentence end"] + 0.3 * rng.random(NUMBER)
    drawn = rng.random(NUMBER)
    ranked = head_scores.rank(np.stack([[drawn, newline], [ends, drawn[::-1]]]), has, tokens_N, rng)
    first, second, *others = ranked
    assert (first.layer, first.head, first.best, first.aucs["newline"]) == (0, 1, "newline", 1.0)
    assert (
        first.interval == (1.0, 1.0)
        and first.mean_with == pytest.approx(0.9)
        and 0.1 < first.mean_without < 0.15
    )
    assert (second.layer, second.head, second.best) == (1, 0, "sentence end")
    assert second.interval[0] <= second.aucs["sentence end"] <= second.interval[1]
    bound = head_scores.chance(np.stack([drawn, newline, ends, drawn[::-1]]), has, rng)
    assert 0.5 < bound < 0.65 and second.interval[0] > bound
    assert all(head.aucs[head.best] < bound and abs(head.identity) < 0.05 for head in others)


def test_gates_that_know_nothing_rarely_exceed_what_chance_gives(text):
    has, _ = text
    exceeded = 0
    for seed in range(60):
        rng = np.random.default_rng([3, seed])
        drawn_HN = rng.random((2, NUMBER))
        best = max(head_scores.auc(row, has_N) for row in drawn_HN for has_N in has.values())
        exceeded += best > head_scores.chance(drawn_HN, has, rng, draws=100)
    # 5 in 100 are expected: 3 of 60, and 10 or more in one of a thousand such tests.
    assert exceeded < 10


def test_the_interval_of_a_known_auc_covers_it():
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng([4, seed])
        has_N = rng.random(NUMBER) < 0.3
        low, high = head_scores.bootstrap(rng.random(NUMBER), has_N, rng, draws=100)
        covered += low <= 0.5 <= high
    assert 83 <= covered  # of 95 expected, five standard deviations down


def test_draws_without_a_rare_feature_are_left_out_of_the_interval():
    gates_N, has_N = np.zeros(3 * head_scores.BLOCK), np.zeros(3 * head_scores.BLOCK, bool)
    gates_N[-1], has_N[-1] = 1, True  # a third of the blocks has it, so many draws have none
    assert head_scores.bootstrap(gates_N, has_N, np.random.default_rng(0)) == (1.0, 1.0)


def test_what_the_token_explains(text):
    _, tokens_N = text
    rng = np.random.default_rng(5)
    by_token, noise = np.linspace(0, 1, 7)[tokens_N], rng.normal(size=NUMBER)
    assert head_scores.identity(by_token, tokens_N) == pytest.approx(1.0)
    mixed = by_token + by_token.std() * noise / noise.std()
    assert head_scores.identity(mixed, tokens_N) == pytest.approx(0.5, abs=0.06)
    # Tokens that come twice: unadjusted, half would be explained.
    many = rng.integers(0, NUMBER // 2, NUMBER)
    assert abs(head_scores.identity(noise, many)) < 0.2
    assert np.isnan(head_scores.identity(noise, np.arange(NUMBER))) and np.isnan(
        head_scores.identity(np.ones(NUMBER), tokens_N)
    )


@pytest.mark.parametrize("window", [None, 3])
def test_mean_gates_are_those_of_the_queries_that_see_a_key(window):
    block, full = ({"window": window}, {"full_layers": (1,)}) if window else ({}, {})
    decoder, rows = model(config("cope(npos_max=4)", block, **full)), tokens()
    mean_gates = head_scores.mean_gates(decoder, rows)
    maps = np.asarray(decoder.maps(rows)["gates"], np.float64)
    assert mean_gates.shape == (2, 2, 2, 7)
    for layer, sees in enumerate((window or 7, 7)):
        for key in range(7):
            expected = maps[layer, ..., key : key + sees, key].mean(-1).T
            np.testing.assert_allclose(mean_gates[layer, ..., key], expected, rtol=1e-5)


def test_without_gates_one_line_tells():
    with pytest.raises(ConfigError, match=r"^the encoding of this model has no gates: give"):
        head_scores.mean_gates(model(config("rope")), tokens())
