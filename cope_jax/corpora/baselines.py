"""Baselines without context: frequencies of labels and words, and words that two texts share."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError

Batch = Mapping[str, np.ndarray]
FEATURES = (
    "weighted overlap",
    "cosine",
    "shared kinds",
    "log length of A",
    "log length of B",
    "log total length",
)


def majority_label(labels: Sequence[Any]) -> Any:
    """The most frequent label; among equally frequent labels, the smallest.

    >>> majority_label(["NOUN", "VERB", "ADJ", "VERB", "ADJ"])
    'ADJ'
    """
    count = Counter(labels)
    return min(count, key=lambda label: (-count[label], label))


def majority_by_word(
    words: Sequence[str], labels: Sequence[Any], tests: Sequence[str]
) -> list[Any]:
    """The commonest training label of each test word; of an unknown word, of all labels.

    >>> majority_by_word(["play", "play", "run"], ["NOUN", "NOUN", "VERB"], ["run", "play", "Kaunas"])
    ['VERB', 'NOUN', 'NOUN']
    """
    labels_of: dict[str, list[Any]] = defaultdict(list)
    for word, label in zip(words, labels, strict=True):
        labels_of[word].append(label)
    majority = {word: majority_label(mine) for word, mine in labels_of.items()}
    other = majority_label(labels)
    return [majority.get(word, other) for word in tests]


def unigram_probabilities(batches: Iterable[Batch], vocab_size: int) -> dict[str, np.ndarray]:
    """p(w) = (n_w + 1)/(N + V) of each of V words, where w occurs n_w times among N targets.

    The probability is never 0. A batch has the fields `targets` and `weights`. A batch with two
    directions also has these fields with the prefix `backward_`. Returns a dict from the prefix of
    a direction, "" or "backward_", to a float64 array `[V]`.

    >>> batch = {"targets": np.array([[0, 0, 1]]), "weights": np.ones((1, 3))}
    >>> unigram_probabilities([batch], 2)[""].tolist()
    [0.6, 0.4]
    """
    counts: dict[str, np.ndarray] = {}
    for batch in batches:
        for prefix in (prefix for prefix in ("", "backward_") if f"{prefix}targets" in batch):
            targets = batch[f"{prefix}targets"][batch[f"{prefix}weights"] > 0]
            counts.setdefault(prefix, np.ones(vocab_size))
            counts[prefix] += np.bincount(targets, minlength=vocab_size)
    return {prefix: count / count.sum() for prefix, count in counts.items()}


def unigram_cross_entropy(known: Mapping[str, np.ndarray], batches: Iterable[Batch]) -> float:
    """−mean log p(w) over the words of all directions, in nats, by `unigram_probabilities`."""
    total = count = 0.0
    for batch in batches:
        for prefix, p_V in known.items():
            weights, targets = (batch[f"{prefix}{name}"].ravel() for name in ("weights", "targets"))
            total -= float(weights @ np.log(p_V)[targets])
            count += float(batch[f"{prefix}weights"].sum())
    return total / count


def bags(batch: Batch, vocab_size: int, special: Sequence[int]) -> list[Any]:
    """Counts each piece, except `special` pieces, in the texts A and B of each example.

    A batch has the inputs of a model, `inputs`, `segments` and `mask` `[n, L]`, as in the task
    masked_lm. Returns two sparse arrays `[n, V]`, for A and for B.

    >>> batch = {"inputs": [[0, 3, 4, 1, 3, 1, 2]], "segments": [[0, 0, 0, 0, 1, 1, 0]], "mask": [[1] * 6 + [0]]}
    >>> a, b = bags({name: np.array(field) for name, field in batch.items()}, 5, special=[0, 1])
    >>> a.toarray().tolist(), b.toarray().tolist()
    ([[0.0, 0.0, 0.0, 1.0, 1.0]], [[0.0, 0.0, 0.0, 1.0, 0.0]])
    """
    # Imported here, like scikit-learn, because few commands need it.
    from scipy.sparse import coo_array

    counted_BL = (batch["mask"] == 1) & ~np.isin(batch["inputs"], list(special))
    counts = []
    for side in (0, 1):
        rows, indices = np.nonzero(counted_BL & (batch["segments"] == side))
        pieces = batch["inputs"][rows, indices]
        shape = (len(counted_BL), vocab_size)
        counts.append(coo_array((np.ones(len(rows)), (rows, pieces)), shape).tocsr())
    return counts


class BagOfWords:
    """Logistic regression on two bags of pieces: p(B does not follow A) = σ(w·f(A, B) + b).

    Sentences of one document share words, so much of next-sentence prediction needs no word order:
    Lan et al., "ALBERT", ICLR 2020, section 4.6.

    A and B are the two sides of an example. All training examples together have n sides, and n_v of
    these sides contain piece v. Let idf(v) = log((1 + n)/(1 + n_v)). The features f are:

    - Σ idf over the different pieces that both sides have;
    - the cosine of the bags weighted by idf;
    - the first sum divided by Σ idf over the different pieces of either side;
    - log(1 + length) of A, of B, and of both sides together.

    Features are standardised over the training examples. Pieces in `special` do not count.
    """

    def __init__(self, vocab_size: int, special: Sequence[int], *, seed: int = 0):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self._vocab_size, self._special = vocab_size, tuple(special)
        regression = LogisticRegression(max_iter=1000, random_state=seed)
        self._model = make_pipeline(StandardScaler(), regression)
        self.idf_V: np.ndarray | None = None

    def fit(self, batch: Batch) -> "BagOfWords":
        """Fits to examples with `next` `[n]`: 0 if B follows A, 1 if not. Returns self.

        Raises:
          ConfigError: all examples are of one kind.
        """
        if len(np.unique(batch["next"])) < 2:
            raise ConfigError(
                "the next-sentence baseline needs examples of both kinds: ask for more examples"
            )
        both = bags(batch, self._vocab_size, self._special)
        sides_V = sum(bag.sign().sum(axis=0) for bag in both)
        self.idf_V = np.log((1 + 2 * len(batch["next"])) / (1 + sides_V))
        self._model.fit(self.features(batch), batch["next"])
        return self

    def features(self, batch: Batch) -> np.ndarray:
        """The features of each example, `[n, F]`, in the order of `FEATURES`."""
        if self.idf_V is None:
            raise ConfigError("the next-sentence baseline is not fitted: call fit first")
        a_BV, b_BV = bags(batch, self._vocab_size, self._special)
        both_B = a_BV.sign().multiply(b_BV.sign()) @ self.idf_V
        either_B = (a_BV + b_BV).sign() @ self.idf_V
        product_B = a_BV.multiply(b_BV) @ self.idf_V**2
        norms_B = np.sqrt((a_BV.power(2) @ self.idf_V**2) * (b_BV.power(2) @ self.idf_V**2))
        lengths = a_BV.sum(axis=1), b_BV.sum(axis=1)
        logs = np.log1p([*lengths, sum(lengths)])
        return np.stack(
            [both_B, _ratio(product_B, norms_B), _ratio(both_B, either_B), *logs], axis=1
        )

    def accuracy(self, batch: Batch) -> float:
        """The share of examples with a correct prediction of whether B follows A."""
        return float(np.mean(self._model.predict(self.features(batch)) == batch["next"]))


def _ratio(above_B: np.ndarray, below_B: np.ndarray) -> np.ndarray:
    """The quotient, or 0 if the denominator is 0: sides without a counted piece share nothing."""
    return np.where(below_B > 0, above_B / np.where(below_B > 0, below_B, 1), 0)
