"""Windows of sentences: what a model sees at once, and which words take their vectors from there."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Window:
    """What a model sees at once, a sentence or a part of one, and the words that take their vectors from there.

    Attributes:
      row: `[P, ...]`, the model's input at P places.
      words: `[W]`, places of the words in their sentence.
      spans: `[W, 2]`, of each of these words its first place in the row and the one after its last.
    """

    row: np.ndarray
    words: np.ndarray
    spans: np.ndarray


def whole(row: np.ndarray, begin: int = 0, end: int = 0) -> Window:
    """The window of a row with one place for each word, after `begin` and before `end` places of marks."""
    indices = np.arange(len(row) - begin - end)
    return Window(row, indices, np.stack([begin + indices, begin + indices + 1], axis=1))


def overlapping(sizes: Sequence[int], room: int) -> list[tuple[range, list[int]]]:
    """Cuts words of some sizes into windows that overlap by half.

    Each word is owned by the window in which it is farthest from a cut; the ends of the sentence are no cuts.

    Args:
      sizes: pieces of each word, from 1 to `room`.
      room: pieces of a window.

    Returns:
      The words of each window, and those that it owns, which may be none.

    >>> overlapping([1, 1, 1, 1, 1, 1], 4)
    [(range(0, 4), [0, 1, 2]), (range(2, 6), [3, 4, 5])]
    """
    ends = np.cumsum([0, *sizes])
    ranges, start = [], 0
    while True:
        stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
        ranges.append(range(start, stop))
        if stop == len(sizes):
            break
        half = int(np.searchsorted(ends, (ends[start] + ends[stop]) / 2))
        start = min(max(half, start + 1), stop)
    best = [(-1.0, -1)] * len(sizes)
    for number, words in enumerate(ranges):
        for word in words:
            left = np.inf if words.start == 0 else ends[word] - ends[words.start]
            right = np.inf if words.stop == len(sizes) else ends[words.stop] - ends[word + 1]
            if min(left, right) > best[word][0]:
                best[word] = (min(left, right), number)
    return [(words, [word for word in words if best[word][1] == number]) for number, words in enumerate(ranges)]


def pool(layers_JLD: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """The mean over the places of each span, `[J, W, D]`."""
    starts, stops = spans.T
    if np.all(stops - starts == 1):
        return layers_JLD[:, starts]
    sums = np.cumsum(layers_JLD, axis=1, dtype=np.float64)
    sums = np.pad(sums, ((0, 0), (1, 0), (0, 0)))
    return (sums[:, stops] - sums[:, starts]) / (stops - starts)[:, None]
