"""Word sense disambiguation by nearest neighbours of contextual vectors, without training.

Each layer is measured separately. The baseline is the most frequent sense of each lemma.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from cope_jax.corpora.word_sense_corpora import CORPORA, Occurrence
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.embedders import occurrence_vectors
from cope_jax.evaluation.contextual.word2vec import normalise
from cope_jax.models.embedder import Embedder
from cope_jax.registry import check_at_least

# Cosines that differ by less count as equal, because sums of equal vectors differ by rounding.
TIE = 1e-5


@dataclasses.dataclass(frozen=True)
class SenseScore:
    """The number of correct predictions of one method on one layer, for each lemma."""

    method: str  # "most frequent", "nearest mean" or "k nearest"
    layer: str  # name of the layer; empty for the baseline
    right: dict[str, int]  # lemma → number of its test occurrences with the correct sense
    total: dict[str, int]  # lemma → number of its test occurrences

    @property
    def by_word(self) -> dict[str, float]:
        """Accuracy for each lemma."""
        return {lemma: self.right[lemma] / self.total[lemma] for lemma in self.total}

    @property
    def micro(self) -> float:
        """Accuracy over all occurrences."""
        return sum(self.right.values()) / sum(self.total.values())

    @property
    def macro(self) -> float:
        """The mean of the lemmas' accuracies."""
        return float(np.mean(list(self.by_word.values())))

    def interval(
        self, *, macro: bool = False, confidence: float = 0.95, draws: int = 10_000, seed: int = 0
    ) -> tuple[float, float]:
        """Percentile bootstrap interval of `micro` or `macro`, resampling within lemmas.

        If a share p of n occurrences is correct, n draws with replacement have Binomial(n, p)
        correct occurrences. So the code samples this number directly. Efron and Tibshirani 1993,
        chapter 13. If all occurrences of each lemma are right or all wrong, such draws do not differ;
        then each lemma draws as if it had two more right and two more wrong ones, and the draws are
        shifted to have the mean that was measured. Agresti and Coull 1998.
        """
        rng = np.random.default_rng(seed)
        total = np.array(list(self.total.values()))
        right = np.array([self.right[lemma] for lemma in self.total])
        weights = 1 / (len(total) * total) if macro else np.full(len(total), 1 / total.sum())
        more = 0 if (right * (total - right)).any() else 2
        share = (right + more) / (total + 2 * more)
        drawn = rng.binomial(total, share, size=(draws, len(total)))
        values = drawn @ weights + (right - total * share) @ weights
        ends = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2]).clip(0, 1)
        return float(ends[0]), float(ends[1])


def cap(occurrences: Sequence[Occurrence], most: int, *, seed: int = 0) -> list[Occurrence]:
    """Chooses at most `most` random occurrences of each lemma, and keeps their order."""
    check_at_least(1, "senses", cap=most)
    rng = np.random.default_rng(seed)
    kept = [
        indices if len(indices) <= most else rng.choice(indices, most, replace=False)
        for _, indices in sorted(_places(occurrences).items())
    ]
    chosen = sorted(int(index) for indices in kept for index in indices)
    return [occurrences[index] for index in chosen]


def read_occurrences(
    corpus: str, data_dir: str | None, train: int, test: int
) -> tuple[list[Occurrence], list[Occurrence]]:
    """Reads at most `train` training and `test` test occurrences of each lemma of a corpus.

    Lemmas with fewer than two senses in training are left out, because they need no disambiguation.
    """
    occurrences = CORPORA[corpus](data_dir)
    senses = senses_by_frequency([o for o in occurrences if o.split == "train"])
    ambiguous = [o for o in occurrences if len(senses.get(o.lemma, ())) > 1]
    sides = {split: [o for o in ambiguous if o.split == split] for split in ("train", "test")}
    chosen = [cap(sides["train"], train), cap(sides["test"], test)]
    if not all(chosen):
        raise ConfigError(
            f"{corpus} has no lemma with two senses or more in both training and test: give the complete corpus"
        )
    return chosen[0], chosen[1]


def senses_by_frequency(train: Sequence[Occurrence]) -> dict[str, list[str]]:
    """Maps lemmas to their senses, the most frequent first; among equals, the earliest first."""
    counts: dict[str, Counter[str]] = {}
    for occurrence in train:
        counts.setdefault(occurrence.lemma, Counter())[occurrence.sense] += 1
    return {lemma: [sense for sense, _ in senses.most_common()] for lemma, senses in counts.items()}


def most_frequent(train: Sequence[Occurrence], test: Sequence[Occurrence]) -> list[str | None]:
    """The baseline: predicts the most frequent sense in training of each occurrence's lemma.

    If the lemma is not in training, the prediction is None, which always counts as an error.
    """
    senses = senses_by_frequency(train)
    return [senses[o.lemma][0] if o.lemma in senses else None for o in test]


def nearest_mean(
    train: Sequence[Occurrence],
    train_ND: np.ndarray,
    test: Sequence[Occurrence],
    test_MD: np.ndarray,
) -> list[str | None]:
    """Predicts the sense whose mean vector over the training occurrences has the highest cosine.

    ŝ(x) = argmax_s cos(x, mean_{i: s_i = s} x_i). Of equally near senses, the prediction is the
    most frequent. If all occurrences of a lemma have the same static vector, all its senses are
    equally near. Peters et al. (arXiv 1802.05365), section 5.3; Melamud et al. 2016.
    """

    def predict(
        own_ND: np.ndarray, labels: np.ndarray, senses: int, queries_MD: np.ndarray
    ) -> np.ndarray:
        groups = (own_ND[labels == sense].astype(np.float64) for sense in range(senses))
        means = np.stack([group_ND.mean(axis=0) for group_ND in groups])
        return _first_best(normalise(queries_MD) @ normalise(means).T)

    return _by_lemma(train, train_ND, test, test_MD, predict)


def k_nearest(
    train: Sequence[Occurrence],
    train_ND: np.ndarray,
    test: Sequence[Occurrence],
    test_MD: np.ndarray,
    k: int = 5,
) -> list[str | None]:
    """Predicts the commonest sense among the k nearest training occurrences of the lemma.

    Occurrences with the same cosine as the k-th nearest also vote. Of senses with equally many
    votes, the prediction is the most frequent.
    """
    check_at_least(1, "senses", k=k)

    def predict(
        own_ND: np.ndarray, labels: np.ndarray, senses: int, queries_MD: np.ndarray
    ) -> np.ndarray:
        cosines = normalise(queries_MD) @ normalise(own_ND).T
        last = min(k, len(labels))
        bound = np.partition(cosines, -last, axis=1)[:, -last, None]
        kinds = np.eye(senses, dtype=np.float32)[labels]
        votes = (cosines >= bound - TIE).astype(np.float32) @ kinds
        return _first_best(votes)

    return _by_lemma(train, train_ND, test, test_MD, predict)


def disambiguate(
    embedder: Embedder,
    train: Sequence[Occurrence],
    test: Sequence[Occurrence],
    *,
    k: int = 5,
    label: str | None = None,
) -> list[SenseScore]:
    """Scores the baseline `most_frequent`, then `nearest_mean` and `k_nearest`, on each layer.

    For `label`, see `embed`.
    """
    if not train or not test:
        raise ConfigError(
            "senses need occurrences in training and test: give a corpus that has both splits"
        )
    train_NJD, test_MJD = (
        occurrence_vectors(
            embedder, [o.words for o in occurrences], [o.index for o in occurrences], label=label
        )
        for occurrences in (train, test)
    )
    scores = [score("most frequent", "", test, most_frequent(train, test))]
    for number, layer in enumerate(embedder.layers):
        vectors = train_NJD[:, number], test_MJD[:, number]
        scores.append(
            score("nearest mean", layer, test, nearest_mean(train, vectors[0], test, vectors[1]))
        )
        scores.append(
            score("k nearest", layer, test, k_nearest(train, vectors[0], test, vectors[1], k))
        )
    return scores


def score(
    method: str, layer: str, test: Sequence[Occurrence], senses: Sequence[str | None]
) -> SenseScore:
    """Counts the correct predictions for each lemma; lemmas are in alphabetical order."""
    lemmas = sorted({occurrence.lemma for occurrence in test})
    right, total = dict.fromkeys(lemmas, 0), dict.fromkeys(lemmas, 0)
    for occurrence, sense in zip(test, senses, strict=True):
        total[occurrence.lemma] += 1
        right[occurrence.lemma] += sense == occurrence.sense
    return SenseScore(method, layer, right, total)


def _places(occurrences: Sequence[Occurrence]) -> dict[str, list[int]]:
    """The indices of the occurrences of each lemma."""
    places: dict[str, list[int]] = {}
    for index, occurrence in enumerate(occurrences):
        places.setdefault(occurrence.lemma, []).append(index)
    return places


def _first_best(values_MS: np.ndarray) -> np.ndarray:
    """The index of the first entry of each row within `TIE` of the row's maximum."""
    return np.argmax(values_MS >= values_MS.max(axis=1, keepdims=True) - TIE, axis=1)


def _by_lemma(
    train: Sequence[Occurrence],
    train_ND: np.ndarray,
    test: Sequence[Occurrence],
    test_MD: np.ndarray,
    predict: Callable[[np.ndarray, np.ndarray, int, np.ndarray], np.ndarray],
) -> list[str | None]:
    """Predicts a sense of each test occurrence, by `predict` for each lemma; None if unknown.

    `predict` maps (training vectors, their sense numbers, number of senses, test vectors) to sense
    numbers. The senses of a lemma are numbered from 0 by descending frequency.
    """
    rows, queries = _places(train), _places(test)
    predicted: list[str | None] = [None] * len(test)
    for lemma, senses in senses_by_frequency(train).items():
        if lemma in queries:
            labels = np.array([senses.index(train[row].sense) for row in rows[lemma]])
            best = predict(train_ND[rows[lemma]], labels, len(senses), test_MD[queries[lemma]])
            for row, sense in zip(queries[lemma], best, strict=True):
                predicted[row] = senses[sense]
    return predicted
