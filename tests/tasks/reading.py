"""Reads questions and answers out of batches, as text only."""

import numpy as np


def questions(task, split, n=64, seed=0):
    """Yields (question, answer) as lists of symbols. All of the answer counts; padding follows."""
    batch = task.sample(np.random.default_rng(seed), n, split)
    for inputs, targets, weights in zip(*batch.values(), strict=True):
        symbols = [*task.decode(inputs).split(" "), task.decode(targets[-1:])]
        question, rest = symbols[: symbols.index("=")], symbols[symbols.index("=") + 1 :]
        answer = rest[: rest.index("<pad>")] if "<pad>" in rest else rest
        assert set(rest[len(answer) :]) <= {"<pad>"}
        counted = np.flatnonzero(weights).tolist()
        assert counted == list(range(len(question), len(question) + len(answer)))
        yield question, answer


def sizes(task, split, size, n=200):
    """The smallest and the largest size of the questions, by the function `size`."""
    values = [size(question) for question, _ in questions(task, split, n)]
    return min(values), max(values)
