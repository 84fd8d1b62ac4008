"""Targets that repeat a rare pair of the window, and the paired t test, token by token."""

import itertools
import math
from collections.abc import Mapping

import numpy as np


def repeated(
    batch: Mapping[str, np.ndarray], train: np.ndarray | None = None, share: float = 1.0
) -> np.ndarray:
    """1 where the pair (input, target) occurred before in its row and document, and makes up at
    most `share` of all pairs of neighbours in `train`, `[B, L]`.

    >>> repeated({"inputs": np.array([[5, 6, 5, 6]]), "targets": np.array([[6, 5, 6, 7]])}).tolist()
    [[0.0, 0.0, 1.0, 0.0]]
    """
    inputs, targets = batch["inputs"], batch["targets"]
    documents = batch.get("segments", np.ones(inputs.shape))
    marked = np.zeros(inputs.shape)
    counts: dict[tuple[int, int], int] = {}
    for pair in itertools.pairwise([] if train is None else train.tolist()):
        counts[pair] = counts.get(pair, 0) + 1
    for row, column in np.ndindex(inputs.shape):
        for before in range(column):
            if (
                documents[row, before] == documents[row, column]
                and inputs[row, before] == inputs[row, column]
                and targets[row, before] == targets[row, column]
            ):
                marked[row, column] = 1
        pair = int(inputs[row, column]), int(targets[row, column])
        if counts.get(pair, 0) > share * sum(counts.values()):
            marked[row, column] = 0
    return marked


def losses(
    logits: np.ndarray, batch: Mapping[str, np.ndarray], chosen: np.ndarray
) -> tuple[float, float]:
    """The sum of the losses of the chosen targets by their weights, and the sum of the weights."""
    total = weights = 0.0
    for at in np.ndindex(chosen.shape):
        weight = batch["weights"][at] * chosen[at]
        powers = sum(math.exp(logit) for logit in logits[at])
        total -= weight * math.log(math.exp(logits[at][batch["targets"][at]]) / powers)
        weights += weight
    return total, weights


def paired(first: np.ndarray, second: np.ndarray, most: int = 6) -> tuple[float, float, int]:
    """The weighted mean difference of blocks (loss, weight), its standard error over at most `most`
    stretches of neighbours of equal weight, and their number. A block is in the stretch in which its
    middle is.
    """
    total = sum(weight for _, weight in first)
    mean = sum(w * (a - b) for (a, w), (b, _) in zip(first, second, strict=True)) / total
    residuals, before = {}, 0.0
    for (a, weight), (b, _) in zip(first, second, strict=True):
        stretch = math.floor(min(most, len(first)) * (before + weight / 2) / total)
        residuals[stretch] = residuals.get(stretch, 0.0) + weight * (a - b - mean) / total
        before += weight
    squares, count = sum(residual**2 for residual in residuals.values()), len(residuals)
    return mean, math.sqrt(count / (count - 1) * squares), count
