from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, recall_score

from cope_jax import tasks
from cope_jax.errors import ConfigError, NonFiniteError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.evaluation.contextual.classification import (
    CLASSIFIERS,
    CrossValidation,
    corrected_interval,
    majority,
    metrics,
    tfidf_svm,
)

HAM = "see you at home|are you coming to dinner|call me when there|the bus is late again|ok good night".split(
    "|"
)
SPAM = "win a free prize now|claim your free cash prize|urgent call 0800 to win".split("|")


def messages(count=60, seed=0):
    """Every fourth one is spam; a number makes each unique."""
    rng = np.random.default_rng(seed)
    labels = np.array([int(number % 4 == 0) for number in range(count)])
    texts = [
        f"{rng.choice(SPAM if label else HAM)} {number}" for number, label in enumerate(labels)
    ]
    return texts, labels


def test_metrics_are_those_of_scikit_learn(rng):
    for _ in range(20):
        labels, predicted = rng.integers(0, 2, 30), (rng.random(30) < rng.random()).astype(int)
        ours = metrics(labels, predicted)
        assert ours.accuracy == pytest.approx(accuracy_score(labels, predicted))
        assert ours.mcc == pytest.approx(matthews_corrcoef(labels, predicted))
        assert ours.f1 == pytest.approx(f1_score(labels, predicted, zero_division=0))
        assert ours.spam_caught == pytest.approx(recall_score(labels, predicted, zero_division=0))
        assert ours.blocked_ham == pytest.approx(
            1 - recall_score(labels, predicted, pos_label=0, zero_division=1)
        )


def test_metrics_without_spam_or_without_answers_are_zero():
    none = metrics([0, 0, 1], [0, 0, 0])
    assert (none.mcc, none.f1, none.spam_caught, none.blocked_ham) == (0, 0, 0, 0)
    assert metrics([0, 0], [0, 0]).accuracy == 1


def by_thirds(classify):
    """Predictions for each third of 20 messages, 5 of them spam, after training on the others."""
    texts, labels = messages()
    third = np.arange(len(texts)) // 4 % 3
    parts = [
        (np.flatnonzero(third != number), np.flatnonzero(third == number)) for number in range(3)
    ]
    predictions = [
        classify([texts[i] for i in train], labels[train], [texts[i] for i in test])
        for train, test in parts
    ]
    return CrossValidation([labels[test] for _, test in parts], predictions, 20 / 40)


def test_rivals_learn_spam_and_the_majority_does_not():
    by_name = {name: by_thirds(classify).pooled() for name, classify in CLASSIFIERS.items()}
    assert by_name["majority"].accuracy == 0.75 and by_name["majority"].mcc == 0
    for name in ("svm_words", "svm_characters"):
        assert by_name[name].mcc > 0.9
    np.testing.assert_array_equal(
        majority(["a", "b", "c"], np.array([1, 1, 0]), ["x", "y"]), [1, 1]
    )


def test_texts_without_words_are_one_line():
    with pytest.raises(ConfigError, match="no text has a word of two letters: leave svm_words out"):
        tfidf_svm("word", (1, 2))(["+++", "---"], np.array([0, 1]), ["+"])


def test_only_character_ngrams_see_through_changed_spelling():
    texts, labels = messages(80)
    disguised = ["fr33 priize nooow", "c1aim yourr freee cashh"]
    assert set(tfidf_svm()(texts, labels, disguised)) == {1}
    assert set(tfidf_svm("word", (1, 1))(texts, labels, disguised)) == {0}


def test_corrected_interval_by_hand():
    mean, low, high = corrected_interval([0.9, 0.8, 1.0, 0.9], 1 / 3)
    # s² = 0.02/3, t(0.975, 3 degrees) = 3.18245
    half = 3.18245 * ((1 / 4 + 1 / 3) * 0.02 / 3) ** 0.5
    np.testing.assert_allclose([mean, low, high], [0.9, 0.9 - half, 0.9 + half], atol=1e-6)
    validation = by_thirds(tfidf_svm("word", (1, 1)))
    summary = validation.summary()["accuracy"]
    assert (summary["mean"], summary["low"], summary["high"]) == corrected_interval(
        validation.by_fold("accuracy"), 20 / 40
    )


def test_corrected_interval_holds_the_mean_as_often_as_it_says():
    """The correction assumes correlation ρ = n_test/(n_train + n_test) of folds, by shared data."""
    rng, hits, share = np.random.default_rng(0), 0, 1 / 9
    rho = share / (1 + share)
    for _ in range(2000):
        values = np.sqrt(rho) * rng.normal() + np.sqrt(1 - rho) * rng.normal(size=10)
        _, low, high = corrected_interval(values, share)
        hits += low < 0 < high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)  # three standard errors


def test_wrong_input_is_named():
    with pytest.raises(ConfigError, match="labels must be 1 for spam or 0 for ham"):
        metrics([0, 2], [0, 1])
    with pytest.raises(ConfigError, match="at least 2 folds"):
        corrected_interval([0.5], 0.1)
    with pytest.raises(ConfigError, match="unknown analyzer 'chars': did you mean 'char'"):
        tfidf_svm("chars")


class Ham(nnx.Module):
    """Stands for a classifier, with a logit for each example and class."""

    def __init__(self, logits_NC):
        self.logits_NC = nnx.Param(jnp.asarray(logits_NC))

    def __call__(self, inputs_BL, segments_BL, mask_BL):
        return self.logits_NC[: len(inputs_BL)]


def test_logits_that_are_not_finite_are_no_class(monkeypatch):
    logits_NC = np.tile([[0.0, 1.0]], (64, 1))
    task = tasks.create("spam", length=16)

    def classes():
        run = SimpleNamespace(task=task, model=lambda: Ham(logits_NC))
        monkeypatch.setattr(pretrained, "load_run", lambda folder: run)
        return pretrained.classify("runs/spam")

    assert (classes() == 1).all()
    logits_NC[3] = np.nan
    with pytest.raises(
        NonFiniteError, match=r"^the logits of example 3 of 'test' in runs/spam are not finite"
    ):
        classes()
