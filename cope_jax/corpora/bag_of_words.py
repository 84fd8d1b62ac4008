"""Whether B follows A, from the words that both share alone: the floor of next-sentence prediction.

Sentences of one document share its words, so much of what next-sentence prediction asks for needs no order of words.
Lan et al., "ALBERT", ICLR 2020, section 4.6, on what the task learns.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from cope_jax.errors import ConfigError

FEATURES = ("weighted overlap", "cosine", "shared kinds", "log length of A", "log length of B", "log total length")


def bags(batch: Mapping[str, np.ndarray], vocab_size: int, special: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How often each piece stands in A, and in B: two arrays `[n, V]`, float32.

    Args:
      batch: `inputs`, `segments` and `mask` `[n, L]`, as of the task masked_lm: what a model reads, `[MASK]` included.
      vocab_size: V.
      special: pieces that do not count, such as `[CLS]`.

    >>> batch = {"inputs": [[0, 3, 4, 1, 3, 1, 2]], "segments": [[0, 0, 0, 0, 1, 1, 0]], "mask": [[1] * 6 + [0]]}
    >>> a, b = bags({name: np.array(field) for name, field in batch.items()}, 5, special=[0, 1])
    >>> a.tolist(), b.tolist()
    ([[0.0, 0.0, 0.0, 1.0, 1.0]], [[0.0, 0.0, 0.0, 1.0, 0.0]])
    """
    inputs_BL, segments_BL = batch["inputs"], batch["segments"]
    counted_BL = (batch["mask"] == 1) & ~np.isin(inputs_BL, list(special))
    found = []
    for side in (0, 1):
        counts_BV = np.zeros((len(inputs_BL), vocab_size), np.float32)
        rows, indices = np.nonzero(counted_BL & (segments_BL == side))
        np.add.at(counts_BV, (rows, inputs_BL[rows, indices]), 1)
        found.append(counts_BV)
    return found[0], found[1]


class BagOfWords:
    """Logistic regression on what two bags of pieces have in common: p(next | A, B) = σ(w·f(A, B) + b).

    With idf(v) = log((1 + n)/(1 + n_v)), where n_v of the n sides of the training examples have v, f has: Σ idf over
    the kinds that both have; the cosine of the bags weighted by idf; the share of that sum in Σ idf over the kinds of
    either; the lengths. Features are standardised over the training examples.

    Args:
      vocab_size: V.
      special: pieces that do not count.
      seed: of the solver.

    Attributes:
      idf_V: of each piece, once fitted.
    """

    def __init__(self, vocab_size: int, special: Sequence[int], *, seed: int = 0):
        from sklearn.linear_model import LogisticRegression  # here, since few commands need it
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self._vocab_size, self._special = vocab_size, tuple(special)
        self._model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, random_state=seed))
        self.idf_V: np.ndarray | None = None

    def fit(self, batch: Mapping[str, np.ndarray], block: int = 1024) -> "BagOfWords":
        """Learns from examples with `next` `[n]`, 0 where B follows A; returns itself.

        Raises:
          ConfigError: not both kinds of examples.
        """
        if len(np.unique(batch["next"])) < 2:
            raise ConfigError("the next-sentence floor needs examples of both kinds: draw more of them")
        sides_V, rows = np.zeros(self._vocab_size, np.float64), len(batch["next"])
        for start in range(0, rows, block):
            for counts_BV in bags(_rows(batch, start, block), self._vocab_size, self._special):
                sides_V += (counts_BV > 0).sum(axis=0)
        self.idf_V = np.log((1 + 2 * rows) / (1 + sides_V)).astype(np.float32)
        self._model.fit(self.features(batch), batch["next"])
        return self

    def features(self, batch: Mapping[str, np.ndarray], block: int = 1024) -> np.ndarray:
        """`[n, F]`, in the order of `FEATURES`."""
        if self.idf_V is None:
            raise ConfigError("the next-sentence floor has not seen any examples: fit it first")
        found = []
        for start in range(0, len(batch["inputs"]), block):
            a_BV, b_BV = bags(_rows(batch, start, block), self._vocab_size, self._special)
            both_B = np.minimum(a_BV > 0, b_BV > 0) @ self.idf_V
            either_B = np.maximum(a_BV > 0, b_BV > 0) @ self.idf_V
            weighted_a_BV, weighted_b_BV = a_BV * self.idf_V, b_BV * self.idf_V
            product_B = (weighted_a_BV * weighted_b_BV).sum(axis=1)
            norms_B = np.linalg.norm(weighted_a_BV, axis=1) * np.linalg.norm(weighted_b_BV, axis=1)
            lengths_B2 = np.stack([a_BV.sum(axis=1), b_BV.sum(axis=1)], axis=1)
            logs_B3 = np.log1p(np.concatenate([lengths_B2, lengths_B2.sum(axis=1, keepdims=True)], axis=1))
            shares_B2 = np.stack([_ratio(product_B, norms_B), _ratio(both_B, either_B)], axis=1)
            found.append(np.concatenate([both_B[:, None], shares_B2, logs_B3], axis=1))
        return np.concatenate(found).astype(np.float64)

    def accuracy(self, batch: Mapping[str, np.ndarray]) -> float:
        """The share of examples of which it tells rightly whether B follows A."""
        return float(np.mean(self._model.predict(self.features(batch)) == batch["next"]))


def _rows(batch: Mapping[str, np.ndarray], start: int, count: int) -> dict[str, np.ndarray]:
    return {name: batch[name][start : start + count] for name in ("inputs", "segments", "mask")}


def _ratio(above_B: np.ndarray, below_B: np.ndarray) -> np.ndarray:
    """0 where nothing is below: two sides without a piece that counts share nothing."""
    return np.where(below_B > 0, above_B / np.where(below_B > 0, below_B, 1), 0)
