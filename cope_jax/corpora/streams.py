"""Cuts long sequences into windows, for models that carry state from one window to the next."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least, checked

Fields = Mapping[str, np.ndarray]


class Stream(Sequence[dict[str, np.ndarray]]):
    """Cuts sequences of N entries into batches of B windows of length L.

    Row r of batch i + 1 continues row r of batch i. Row r has the r-th of B equal parts of each
    sequence, so every entry is in exactly one batch. The last row and the last batch are padded
    with zeros. Every batch has `reset`, float32 `[B]`: 1 in batch 0 and 0 in others. When a batch
    is read, `finish` adds fields that are too large to store.

    Raises:
      ConfigError: B or L is below 1, or N is 0.

    >>> stream = Stream({"inputs": np.arange(1, 8)}, batch_size=2, length=3)
    >>> len(stream), stream[1]["inputs"].tolist(), stream[1]["reset"].tolist()
    (2, [[4, 0, 0], [0, 0, 0]], [0.0, 0.0])
    """

    def __init__(
        self,
        fields: Fields,
        batch_size: int,
        length: int,
        finish: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda batch: batch,
    ):
        check_at_least(1, "stream", batch_size=batch_size, length=length)
        size = len(next(iter(fields.values())))
        if not size:
            raise ConfigError("a split has no words: give files with text")
        row_size = -(-size // batch_size)
        self._len = -(-row_size // length)
        self._length, self._finish = length, finish
        self._rows = {}
        for name, entries in fields.items():
            rows = np.pad(entries, (0, batch_size * row_size - size)).reshape(batch_size, row_size)
            self._rows[name] = np.pad(rows, ((0, 0), (0, self._len * length - row_size)))
        self._batch_size = batch_size

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: Any) -> Any:
        number = range(self._len)[index]  # IndexError beyond the end, which ends a loop
        window = slice(number * self._length, (number + 1) * self._length)
        batch = self._finish({name: rows[:, window] for name, rows in self._rows.items()})
        return {**batch, "reset": np.full(self._batch_size, number == 0, np.float32)}


def windows(fields: Fields, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """The windows `[n, L]` of each field from `starts` `[n]` on, with zeros after the end.

    >>> windows({"inputs": np.arange(1, 5)}, np.array([0, 2]), 3)["inputs"].tolist()
    [[1, 2, 3], [3, 4, 0]]
    """
    indices = starts[:, None] + np.arange(length)
    return {name: np.pad(entries, (0, length))[indices] for name, entries in fields.items()}


def first(n: int, size: int, owner: str) -> np.ndarray:
    """The indices of the first n of the `size` examples of `owner`.

    Raises ConfigError if n is negative or too large.
    """
    _check_number(n)
    if n > size:
        raise ConfigError(f"{owner} has {size} examples, not {n}: ask for at most {size}")
    return np.arange(n)


def drawn(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Samples n indices below `size`, independently. Raises ConfigError if n is negative."""
    check_request(rng, n)
    return rng.integers(0, size, n)


def check_request(rng: np.random.Generator, n: int) -> None:
    """ConfigError unless `rng` is a generator of NumPy and n a number of examples."""
    checked(rng, np.random.Generator, "rng")
    _check_number(n)


def _check_number(n: int) -> None:
    if checked(n, int, "the number of examples") < 0:
        raise ConfigError(f"the number of examples must be at least 0, got {n}")
