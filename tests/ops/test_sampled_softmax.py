"""The sampled softmax: the full one where all classes are drawn, and what is drawn otherwise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.ops.losses import cross_entropy, expected_count, sample_classes, sampled_cross_entropy

VOCAB, WIDTH = 12, 4
RNG = np.random.default_rng(0)
TABLE, BIAS = RNG.normal(size=(VOCAB, WIDTH)), RNG.normal(size=VOCAB)
X, TARGETS = RNG.normal(size=(2, 5, WIDTH)), RNG.integers(0, VOCAB, (2, 5), dtype=np.int32)
ARGUMENTS = X, TABLE, BIAS


def full(x, table, bias):
    return cross_entropy(jnp.einsum("BLD,VD->BLV", x, table) + bias[None, None], TARGETS)


@pytest.mark.newest
@pytest.mark.parametrize("num_sampled", [VOCAB, VOCAB + 5])
def test_all_classes_drawn_are_the_full_softmax(num_sampled, x64):
    """In value and gradient: the correction is then 0, and what is drawn twice counts once."""

    @jax.jit
    def run(*arguments):
        def sampled(*arguments):
            return sampled_cross_entropy(*arguments, TARGETS, jax.random.key(0), num_sampled).sum()

        def whole(*arguments):
            return full(*arguments).sum()

        return [
            jax.value_and_grad(loss, argnums=(0, 1, 2))(*arguments) for loss in (sampled, whole)
        ]

    actual, expected = run(*map(jnp.asarray, ARGUMENTS))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13), actual, expected
    )


def test_a_loss_is_the_formula_of_what_is_drawn(x64):
    @jax.jit
    def run(key):
        drawn, arrival = sample_classes(key, 5, VOCAB)
        counts = expected_count(jnp.arange(VOCAB, dtype=jnp.int32), arrival, VOCAB)
        return (
            drawn,
            counts,
            sampled_cross_entropy(*map(jnp.asarray, ARGUMENTS), jnp.asarray(TARGETS), key, 5),
        )

    drawn, counts, losses = map(np.asarray, run(jax.random.key(3)))
    counts = counts.astype(np.float64)
    assert set(TARGETS.ravel()) & set(drawn.tolist()), "one target is drawn"
    for at in np.ndindex(TARGETS.shape):
        scores = TABLE @ X[at] + BIAS - np.log(counts)
        target = TARGETS[at]
        candidates = {target, *drawn.tolist()}
        expected = np.log(sum(np.exp(scores[k]) for k in candidates)) - scores[target]
        np.testing.assert_allclose(losses[at], expected, rtol=2e-6)  # counts are float32


@functools.cache
def many(num_sampled, draws=20000):
    keys = jax.random.split(jax.random.key(1), draws)
    return jax.jit(jax.vmap(lambda key: sample_classes(key, num_sampled, VOCAB)))(keys)


def test_draws_differ_within_and_the_first_follows_zipfs_law():
    drawn = np.asarray(many(4)[0])
    assert all(len(set(row)) == 4 for row in drawn[:1000].tolist())
    rank = np.arange(1, VOCAB + 1)
    expected = np.log((rank + 1) / rank) / np.log(VOCAB + 1)
    assert expected.sum() == pytest.approx(1)
    share = np.bincount(drawn[:, 0], minlength=VOCAB) / len(drawn)
    error = np.sqrt(expected * (1 - expected) / len(drawn))
    assert (np.abs(share - expected) < 5 * error).all()


@pytest.mark.parametrize("num_sampled", [2, 6])
def test_the_corrected_sum_has_the_mean_of_the_full_one(num_sampled):
    """The mean of Σ e^s/Q over drawn classes is Σ e^s over all, to five standard errors."""
    drawn, arrival = many(num_sampled)
    counts = np.asarray(
        jax.vmap(lambda d, a: expected_count(d, a, VOCAB))(drawn, arrival), np.float64
    )
    values = np.exp(TABLE @ X[0, 0] + BIAS)
    sums = (values[np.asarray(drawn)] / counts).sum(axis=1)
    error = sums.std() / len(sums) ** 0.5
    assert abs(sums.mean() - values.sum()) < 5 * error
    assert error < 0.02 * values.sum(), "else the test could not fail"


@pytest.mark.parametrize("wrong", [-1, VOCAB, VOCAB + 7])
def test_a_target_outside_of_the_vocabulary_is_loud(wrong):
    """As in the full cross entropy; and the others keep their losses."""
    arguments = [jnp.asarray(value, jnp.float32) for value in ARGUMENTS]
    run = jax.jit(lambda targets: sampled_cross_entropy(*arguments, targets, jax.random.key(0), 5))
    targets = TARGETS.copy()
    targets[0, 1] = wrong
    broken, right = np.asarray(run(targets)), np.asarray(run(TARGETS))
    assert np.isnan(broken[0, 1])
    np.testing.assert_array_equal(np.isnan(broken), targets == wrong)
    np.testing.assert_array_equal(np.delete(broken.ravel(), 1), np.delete(right.ravel(), 1))


def test_bfloat16_is_read_and_summed_in_float32():
    """Scores of rounded numbers, with float32 products and sums: no rounding to 8 bits follows."""
    x, table = (jnp.asarray(value, jnp.bfloat16) for value in (X, TABLE))
    bias = BIAS.astype(np.float32)

    @jax.jit
    def run(x, table):
        return sampled_cross_entropy(
            x, table, jnp.asarray(bias), jnp.asarray(TARGETS), jax.random.key(0), 5
        )

    losses = run(x, table)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(
        losses, run(x.astype(np.float32), table.astype(np.float32)), rtol=1e-6, atol=1e-6
    )


def test_the_only_class_drawn_may_be_the_target():
    @jax.jit
    @jax.vmap
    def run(key):
        def loss(bias):
            target = jnp.zeros((1, 1), jnp.int32)
            return sampled_cross_entropy(
                jnp.ones((1, 1, 1)), jnp.ones((2, 1)), bias, target, key, 1
            )[0, 0]

        return sample_classes(key, 1, 2)[0][0], *jax.value_and_grad(loss)(jnp.zeros(2))

    drawn, value, gradient = map(np.asarray, run(jax.random.split(jax.random.key(0), 20)))
    assert not value[drawn == 0].any() and not gradient[drawn == 0].any()
    assert value[drawn == 1].all() and gradient[drawn == 1].all()
    assert 0 < drawn.mean() < 1
