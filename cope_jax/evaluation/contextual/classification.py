"""Classifies messages as spam or ham: classical baselines, metrics, cross-validation and intervals.

Spam is 1, ham 0. The baselines are fitted with scikit-learn.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import unknown

Classify = Callable[[Sequence[str], np.ndarray, Sequence[str]], np.ndarray]
"""(training texts, their labels, test texts) → labels of the test texts."""


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of a spam classifier.

    tp is the number of spam messages found, fp of ham messages blocked, fn of spam messages missed,
    and tn of ham messages passed.
    """

    accuracy: float  # (tp + tn) / all
    # Matthews' correlation, (tp·tn − fp·fn) / √((tp+fp)(tp+fn)(tn+fp)(tn+fn)); 0 if that is 0/0.
    mcc: float
    f1: float  # of spam, 2 tp / (2 tp + fp + fn)
    spam_caught: float  # tp / (tp + fn)
    blocked_ham: float  # fp / (fp + tn); lower is better


def metrics(labels: Sequence[int] | np.ndarray, predictions: Sequence[int] | np.ndarray) -> Metrics:
    """Computes all metrics of some predictions and labels, which are 1 for spam and 0 for ham.

    >>> metrics([1, 1, 0, 0], [1, 0, 0, 0])
    Metrics(accuracy=0.75, mcc=0.577..., f1=0.666..., spam_caught=0.5, blocked_ham=0.0)
    """
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if not labels.size or not np.isin(labels, (0, 1)).all():
        raise ConfigError(
            "labels must be 1 for spam or 0 for ham, and at least one: give an array of 0 and 1"
        )
    counts = np.zeros((2, 2), int)
    np.add.at(counts, (labels.astype(int), predictions.astype(int)), 1)
    (tn, fp), (fn, tp) = counts.tolist()

    def ratio(above: float, below: float) -> float:
        return above / below if below else 0.0

    return Metrics(
        accuracy=(tp + tn) / labels.size,
        mcc=ratio(tp * tn - fp * fn, ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5),
        f1=ratio(2 * tp, 2 * tp + fp + fn),
        spam_caught=ratio(tp, tp + fn),
        blocked_ham=ratio(fp, fp + tn),
    )


def tfidf_svm(
    analyzer: Literal["char", "char_wb", "word"] = "char_wb", ngrams: tuple[int, int] = (2, 5)
) -> Classify:
    """A linear SVM on TF-IDF of n-grams, the baseline of BERT on short messages.

    The weight of an n-gram is w = (1 + log tf)·idf with idf = 1 + log((1 + n)/(1 + df)) for n
    training texts. The weights of a text are normalised to length 1. The loss is the squared hinge
    loss with L2 regularisation.

    Args:
      analyzer: "char" for n-grams of characters, "char_wb" for characters within words, or "word"
        for words.
      ngrams: the lengths of the shortest and the longest n-grams.
    """
    if analyzer not in ("char", "char_wb", "word"):
        raise unknown("analyzer", analyzer, ("char", "char_wb", "word"))

    def classify(texts: Sequence[str], labels: np.ndarray, tests: Sequence[str]) -> np.ndarray:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_pipeline
        from sklearn.svm import LinearSVC

        vectorizer = TfidfVectorizer(analyzer=analyzer, ngram_range=ngrams, sublinear_tf=True)
        pipeline = make_pipeline(vectorizer, LinearSVC(random_state=0))
        try:
            return pipeline.fit(texts, labels).predict(tests)
        except ValueError as error:
            if "empty vocabulary" not in str(error):
                raise
            raise ConfigError(
                "no text has a word of two letters: leave svm_words out of --systems"
            ) from error

    return classify


def majority(texts: Sequence[str], labels: np.ndarray, tests: Sequence[str]) -> np.ndarray:
    """The majority baseline: predicts the more frequent training label for every test text."""
    return np.full(len(tests), np.bincount(labels).argmax())


CLASSIFIERS = {
    "majority": majority,
    "svm_words": tfidf_svm("word", (1, 2)),
    "svm_characters": tfidf_svm("char_wb", (2, 5)),
}
"""The classical baselines."""


@dataclasses.dataclass(frozen=True)
class CrossValidation:
    """The predictions of one classifier on every fold."""

    # For each fold, the true labels of its test texts; the same for all classifiers.
    labels: Sequence[np.ndarray]
    predictions: Sequence[np.ndarray]  # for each fold, the predicted labels
    test_share: float  # number of test texts of a fold over its number of training texts

    def by_fold(self, metric: str) -> np.ndarray:
        """The values of one field of `Metrics`, one for each fold."""
        pairs = zip(self.labels, self.predictions, strict=True)
        return np.array([getattr(metrics(truth, guess), metric) for truth, guess in pairs])

    def pooled(self) -> Metrics:
        """The metrics over the test texts of all folds together."""
        return metrics(np.concatenate(self.labels), np.concatenate(self.predictions))

    def summary(self) -> dict[str, dict[str, float]]:
        """`mean` over folds, `low` and `high` of `corrected_interval` and `pooled`, by metric."""
        summaries = {}
        for metric, pooled in dataclasses.asdict(self.pooled()).items():
            mean, low, high = corrected_interval(self.by_fold(metric), self.test_share)
            summaries[metric] = {"mean": mean, "low": low, "high": high, "pooled": pooled}
        return summaries


def corrected_interval(
    values: Sequence[float] | np.ndarray, test_share: float
) -> tuple[float, float, float]:
    """The mean of a metric over repeated folds and its 95 % interval, as (mean, low, high).

    The corrected resampled t interval is mean ± t_{n−1} √((1/n + n_test/n_train) s²), where s² is
    the sample variance of the n values. Training sets of different folds overlap, so without
    n_test/n_train the interval would be far too narrow. Nadeau and Bengio 2003, "Inference for the
    generalization error"; Bouckaert and Frank 2004 for repeated folds.

    Args:
      values: one value for each fold of each repeat.
      test_share: n_test/n_train, which is 1/9 for 10 folds.
    """
    from scipy.stats import t

    x = np.asarray(values, np.float64)
    if x.size < 2:
        raise ConfigError(
            f"an interval needs at least 2 folds, got {x.size}: use more folds or repeats"
        )
    mean, variance = float(x.mean()), float(x.var(ddof=1))
    half = float(t.ppf(0.975, x.size - 1)) * ((1 / x.size + test_share) * variance) ** 0.5
    return mean, mean - half, mean + half
