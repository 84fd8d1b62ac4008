"""Sequences that are held out of training, and the share of a test that training has seen.

The inputs of a sequence up to its last target that counts are its question. A hash of the question
decides whether it is held out: training and test agree without a list of questions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cope_jax.errors import ConfigError

if TYPE_CHECKING:
    from cope_jax.tasks.task import Batch, Task

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MOST_ROWS = 4096  # generated at a time, which limits memory
_TRIES = 20_000  # for each sequence that is kept
_FEWEST = 10  # questions of a test


class Seen(NamedTuple):
    """Shares of a test in [0, 1] that training has seen.

    Attributes:
      examples: the share of examples whose last target that counts is seen.
      predictions: the share of targets that count and are seen: training predicts one from the same
        inputs. Beginnings of sequences are short, so training sees many of them.
    """

    examples: float
    predictions: float


def contexts(batch: "Batch") -> np.ndarray:
    """Hashes of the inputs up to each position, uint64 `[n, L]`: equal for equal inputs."""
    inputs_LN = batch["inputs"].T.astype(np.uint64)
    contexts_LN = np.empty_like(inputs_LN)
    state_N = np.zeros(inputs_LN.shape[1], np.uint64)
    for position, tokens_N in enumerate(inputs_LN):
        state_N = (state_N ^ (tokens_N + np.uint64(1))) * _MULTIPLIER
        state_N ^= state_N >> np.uint64(32)
        contexts_LN[position] = state_N
    return contexts_LN.T


def questions(batch: "Batch") -> np.ndarray:
    """The number of each sequence's question, uint64 `[n]`."""
    counts = batch["weights"] > 0
    last = counts.shape[1] - 1 - np.argmax(counts[:, ::-1], axis=1)  # without any, the whole input
    return np.take_along_axis(contexts(batch), last[:, None], axis=1)[:, 0]


def is_held_out(batch: "Batch", share: float) -> np.ndarray:
    """The sequences that are held out, bool `[n]`, if `share` of all questions are."""
    mixed = questions(batch) * _MULTIPLIER
    return (mixed >> np.uint64(11)) * 2.0**-53 < share


def draw(generate: Callable[[int], "Batch"], n: int, share: float, held_out: bool) -> "Batch":
    """The first n generated sequences that are held out, or the first n that are not.

    `generate` returns as many sequences as it is asked for.

    Raises:
      ConfigError: nearly all of very many sequences are on the other side, or a test of at least
        100 has few questions.
    """
    odds = share if held_out else 1 - share
    chunks: list[Batch] = []
    missing, tries = n, 0
    while missing > 0 or not chunks:
        batch = generate(min(round(1.25 * missing / odds) + 8, _MOST_ROWS))
        kept = is_held_out(batch, share) == held_out
        chunks.append({name: field[kept] for name, field in batch.items()})
        missing, tries = missing - int(kept.sum()), tries + len(kept)
        if missing > 0 and tries > _TRIES * (n - missing + 1):
            side = "held out" if held_out else "left for training"
            count = f"{n - missing or 'none'} of {tries:,} sequences"
            raise ConfigError(
                f"{count} can be {side}: change held_out={share}, or choose a larger size"
            )
    drawn = {name: np.concatenate([chunk[name] for chunk in chunks])[:n] for name in chunks[0]}
    if held_out and n >= 100 and (number := len(np.unique(questions(drawn)))) < _FEWEST:
        raise ConfigError(
            f"only {number} of {n:,} test questions differ: raise held_out={share} or the size"
        )
    return drawn


def seen(
    task: "Task", training: int = 48_000, examples: int = 2_000, seed: int = 0
) -> dict[str, Seen]:
    """The shares of the first `examples` examples of each evaluation split that are in training.

    Training has `training` examples, by default 1,500 batches of 32.

    >>> from cope_jax import tasks
    >>> task = tasks.create("addition", digits=1)
    >>> seen(task, training=1000)["in_distribution"]
    Seen(examples=1.0, predictions=1.0)
    >>> seen(tasks.create("addition", digits=1, held_out=0.1), 1000)["in_distribution"].examples
    0.0
    """
    sizes = {start: min(1000, training - start) for start in range(0, training, 1000)}
    generators = ((np.random.default_rng([seed, start]), size) for start, size in sizes.items())
    chunks = [_predicted(task.sample(rng, size)) for rng, size in generators]
    known = np.unique(np.concatenate(chunks))
    shares = {}
    for split in task.evaluation_splits:
        test = task.dataset(split, examples, seed)
        shares[split] = Seen(*(_share(x, known) for x in (questions(test), _predicted(test))))
    return shares


def _share(numbers: np.ndarray, known: np.ndarray) -> float:
    """The share of `numbers` that are in the sorted `known`; np.isin would sort both again."""
    nearest = np.searchsorted(known, numbers).clip(max=len(known) - 1)
    return float((known[nearest] == numbers).mean())


def _predicted(batch: "Batch") -> np.ndarray:
    """The numbers of the inputs from which a target that counts is predicted."""
    return contexts(batch)[batch["weights"] > 0]
