import dataclasses
import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import linear_probe
from cope_jax.evaluation.contextual.linear_probe import ProbeConfig, fit_probe
from cope_jax.evaluation.contextual.probing import (
    Probing,
    baselines,
    control_labels,
    probe_layers,
)

FAST = ProbeConfig(epochs=15, batch_size=64, learning_rate=2e-2)


def clusters(rng, count, noise=1.0, classes=3, width=6):
    """Vectors around one centre for each class, far from standardised, and the classes."""
    centres = np.random.default_rng(7).normal(size=(classes, width))
    y = rng.integers(0, classes, count)
    x = centres[y] + noise * rng.normal(size=(count, width))
    return (x * np.array([1, 10, 0.1, 3, 1, 1]) + np.array([0, 50, 0, -3, 0, 1])).astype(
        np.float32
    ), y


@pytest.mark.newest
def test_without_decay_the_probe_is_the_logistic_regression_of_scikit_learn(rng):
    x, y = clusters(rng, 400)
    config = ProbeConfig(epochs=600, batch_size=400, learning_rate=0.1, weight_decay=0.0)
    probe = fit_probe(x[:, None], y, 3, config)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    np.testing.assert_allclose((x - probe.mean_JD) / probe.std_JD, z, atol=1e-4)
    classifier = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000).fit(z, y)
    # softmax does not see what all classes have in common
    kernel = probe.kernel_DV - probe.kernel_DV.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        kernel, classifier.coef_.T - classifier.coef_.T.mean(axis=1, keepdims=True), atol=5e-3
    )
    np.testing.assert_array_equal(probe.predict(x[:, None], block=37), classifier.predict(z))
    assert probe.accuracy(x[:, None], y) == pytest.approx(classifier.score(z, y))


def test_minibatches_learn_what_generalises_and_always_the_same(rng):
    (x, y), (test_x, test_y) = clusters(rng, 2000), clusters(rng, 1000)
    probe, again = (fit_probe(x[:, None], y, 3, FAST) for _ in range(2))
    best = (
        LogisticRegression()
        .fit((x - x.mean(0)) / x.std(0), y)
        .score((test_x - x.mean(0)) / x.std(0), test_y)
    )
    assert abs(probe.accuracy(test_x[:, None], test_y) - best) < 0.02
    np.testing.assert_array_equal(probe.kernel_DV, again.kernel_DV)
    other = fit_probe(
        x[:, None], y, 3, ProbeConfig(epochs=15, batch_size=64, learning_rate=2e-2, seed=1)
    )
    assert np.abs(other.kernel_DV - probe.kernel_DV).max() > 0


def test_half_floats_and_constant_coordinates_do_no_harm(rng):
    x, y = clusters(rng, 600)
    x[:, 2] = 1234.0
    probes = [fit_probe(x[:, None].astype(kind), y, 3, FAST) for kind in (np.float16, np.float32)]
    accuracies = [probe.accuracy(x[:, None], y) for probe in probes]
    assert abs(accuracies[0] - accuracies[1]) < 0.02 and min(accuracies) > 0.6
    np.testing.assert_array_equal(probes[0].std_JD[0, 2], 1.0)
    assert all(np.isfinite(probe.kernel_DV).all() for probe in probes)


def test_the_mix_chooses_the_layer_that_knows(rng):
    x, y = clusters(rng, 1500)
    noise = rng.normal(size=x.shape).astype(np.float32)
    probe = fit_probe(np.stack([noise, x, noise[::-1]], axis=1), y, 3, FAST)
    assert probe.mix_J.sum() == pytest.approx(1) and probe.mix_J.argmax() == 1
    assert probe.mix_J[1] > 0.5 > 0.4 > max(probe.mix_J[[0, 2]])


def test_layers_baselines_and_control_task_of_a_made_up_language(rng):
    """Layer 0 knows the word, layer 1 the class; half of the words have a class of their own."""
    kinds = [f"w{number}" for number in range(20)]
    tables = {word: rng.normal(size=12) for word in kinds}

    def draw(count):
        words = [str(word) for word in rng.choice(kinds, count)]
        labels = [
            "ABC"[int(w[1:]) % 3] if int(w[1:]) < 10 else str(rng.choice(list("ABC")))
            for w in words
        ]
        low = np.stack([tables[word] for word in words])
        high = np.eye(12)[["ABC".index(label) for label in labels]]
        return (
            np.stack([low, high + 0.2 * rng.normal(size=high.shape)], axis=1).astype(np.float16),
            words,
            labels,
        )

    train, test = draw(1500), draw(600)
    test = (test[0], test[1], ["new", *test[2][1:]])  # a label that training does not have
    probing = probe_layers(
        "made up", ("words", "top"), train, test, ProbeConfig(epochs=25, batch_size=64)
    )
    assert probing.baselines == baselines(train[1:], test[1:])
    low, high = probing.scores
    assert high.accuracy > 0.97 and high.accuracy < 1 and low.accuracy < 0.8
    # Words can be learned by heart from layer 0 alone.
    assert low.control > 0.7 > 0.6 > high.control
    assert low.selectivity == low.accuracy - low.control < 0.1 < high.selectivity
    assert (
        probing.cumulative[0] == low.accuracy
        and probing.cumulative[1] == probing.mix_accuracy > 0.95
    )
    assert probing.mix[1] > probing.mix[0] and probing.centre_of_gravity == pytest.approx(
        probing.mix[1], abs=1e-6
    )
    assert probing.expected_layer == 1.0


def test_one_layer_has_no_mix_or_expected_layer(rng):
    x, y = clusters(rng, 90)
    data = (x[:, None], ["w"] * 90, [str(label) for label in y])
    probing = probe_layers("one", ("only",), data, data, FAST)
    assert (
        probing.mix == (1.0,) and probing.expected_layer is None and probing.centre_of_gravity == 0
    )


def test_baselines_by_hand():
    train = (["the", "play", "play", "play", "a"], ["D", "N", "V", "V", "D"])
    test = (["the", "play", "play", "new", "new"], ["D", "V", "N", "V", "D"])
    # D and V are as frequent: the first in the text counts
    assert baselines(train, test) == {"majority": 2 / 5, "majority of the word": 3 / 5}


def test_control_labels_are_fixed_by_word_and_drawn_as_often_as_the_real_ones():
    words = [f"word{number}" for number in range(20_000)]
    labels = ["A"] * 60 + ["B"] * 30 + ["C"] * 10
    drawn = control_labels(words, labels)
    shares = [drawn.count(label) / len(drawn) for label in "ABC"]
    # deviation of a share of 0.6 among 20,000: 0.0035
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.014)
    assert control_labels(words[5:9], labels) == drawn[5:9]  # whatever else is in the text
    changed = sum(
        a != b for a, b in zip(drawn, control_labels(words, labels, seed=1), strict=True)
    ) / len(drawn)
    assert changed == pytest.approx(1 - 0.36 - 0.09 - 0.01, abs=0.02)  # independent draws
    assert control_labels(["play"], ["X", "X"]) == ["X"]


def test_centre_of_gravity_and_expected_layer_by_explicit_sums(rng):
    weights = rng.dirichlet(np.ones(7))
    scores = [0.6, 0.8, 0.78, 0.9]
    gains = [0.2, -0.02, 0.12]
    expected = (1 * gains[0] + 2 * gains[1] + 3 * gains[2]) / sum(gains)
    probing = Probing("x", (), tuple(weights), 0.9, tuple(scores), {})
    assert probing.expected_layer == pytest.approx(expected)
    gravity = math.fsum(layer * s for layer, s in enumerate(weights))
    assert probing.centre_of_gravity == pytest.approx(gravity)
    assert dataclasses.replace(probing, cumulative=(0.7, 0.7)).expected_layer is None


def test_means_and_deviations_do_not_depend_on_the_blocks(rng):
    x = rng.normal(3, 2, (10, 2, 3))
    mean, std = linear_probe._moments(x, block=4)
    np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(std, x.std(axis=0), rtol=1e-6)


def test_wrong_input_is_named():
    x = np.zeros((4, 1, 2), np.float32)
    with pytest.raises(
        ConfigError, match=r"vectors \[N, J, D\] and labels \[N\], got \(4, 2\) and \(4,\)"
    ):
        fit_probe(x[:, 0], np.zeros(4, int), 2)
    with pytest.raises(ConfigError, match=r"got \(4, 1, 2\) and \(3,\)"):
        fit_probe(x, np.zeros(3, int), 2)
    with pytest.raises(ConfigError, match=r"labels must be in \[0, 2\), got 0 to 2"):
        fit_probe(x, np.array([0, 1, 2, 0]), 2)
    with pytest.raises(ConfigError, match=r"labels must be in \[0, 2\), got -1 to 1"):
        fit_probe(x, np.array([0, 1, -1, 0]), 2)
    with pytest.raises(ConfigError, match=r"probe.epochs must be at least 1"):
        ProbeConfig(epochs=0)
