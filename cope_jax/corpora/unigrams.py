"""How probable a word is where nothing is known of its context: the baseline of every language model."""

from collections.abc import Iterable, Mapping

import numpy as np

Batch = Mapping[str, np.ndarray]


def probabilities(batches: Iterable[Batch], vocab_size: int) -> dict[str, np.ndarray]:
    """p(w) = (n_w + 1)/(N + V), so that no word is impossible: prefix of a direction to float64 `[V]`.

    Args:
      batches: `targets` and `weights`, and those with `backward_` before their names where there are two directions.
      vocab_size: V.

    >>> batch = {"targets": np.array([[0, 0, 1]]), "weights": np.ones((1, 3))}
    >>> probabilities([batch], 2)[""].tolist()
    [0.6, 0.4]
    """
    counts: dict[str, np.ndarray] = {}
    for batch in batches:
        for prefix in (prefix for prefix in ("", "backward_") if f"{prefix}targets" in batch):
            targets = batch[f"{prefix}targets"][batch[f"{prefix}weights"] > 0]
            counts.setdefault(prefix, np.ones(vocab_size))
            counts[prefix] += np.bincount(targets, minlength=vocab_size)
    return {prefix: count / count.sum() for prefix, count in counts.items()}


def cross_entropy(known: Mapping[str, np.ndarray], batches: Iterable[Batch]) -> float:
    """−mean log p(w) over the words of all directions, in nats; `known` is from `probabilities`."""
    total = count = 0.0
    for batch in batches:
        for prefix, p_V in known.items():
            total -= float(batch[f"{prefix}weights"].ravel() @ np.log(p_V)[batch[f"{prefix}targets"].ravel()])
            count += float(batch[f"{prefix}weights"].sum())
    return total / count
