"""Measures the loss of every token of a text under a language model, in sliding windows.

A window of L tokens moves by a stride S. All tokens of the first window count. In each later
window, only the S new tokens count. So every token counts once, and every token after the first
window sees at least L − S earlier tokens. S = L is fastest, and gives tokens at the beginning of a
window little context. S = 1 gives each token its full context.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.corpora.packing import Pieces, cut, fit, lay_out
from cope_jax.errors import ConfigError
from cope_jax.generation.prompts import check_positions
from cope_jax.models.model import StaticGraphDef
from cope_jax.ops.losses import cross_entropy, is_wrong
from cope_jax.progress import Progress
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class Windows:
    """A text of N + 1 tokens, cut into windows, which share rows of W tokens.

    The first token of the text is not predicted.
    """

    tokens: np.ndarray  # int `[N + 1]`
    pieces: Pieces  # the windows over the N predicted entries
    rows: list[list[int]]  # the windows in each row
    width: int  # W

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Returns the arrays that `lay_out` makes of some rows.

        For each place in a row, `entries` has the index of its loss among the N losses, or −1 if
        the place has no loss.
        """
        return lay_out(self.tokens, self.pieces, [self.rows[row] for row in rows], self.width)

    def batches(self, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields the arrays of `size` rows at a time; rows without a loss pad the last batch."""
        blank = {"entries": -1, "segments": -1}
        for start in range(0, len(self), size):
            batch = self.take(range(start, min(start + size, len(self))))
            missing = ((0, size - len(batch["inputs"])), (0, 0))
            values = {name: blank.get(name, 0) for name in batch}
            yield {
                name: np.pad(x, missing, constant_values=values[name]) for name, x in batch.items()
            }


def sliding(
    tokens: np.ndarray,
    length: int,
    stride: int | None = None,
    width: int | None = None,
    bounds: np.ndarray | None = None,
) -> Windows:
    """Cuts a text into windows of `length` tokens, `stride` apart.

    Args:
      tokens: int `[N + 1]`.
      length: L, the number of tokens in a window.
      stride: S, at most L. If None, S = L.
      width: W, the number of tokens in a row. If None, W = L. Windows in one row do not see each
        other, so one compiled program serves windows of many lengths with little padding.
      bounds: the index of the first predicted token of each document, from 0 to N − 1, and then N.
        No window crosses a bound. If None, the text is one document.

    Raises:
      ConfigError: the text has fewer than two tokens, a number is too small, the stride is larger
        than L, or a window does not fit into a row.

    >>> windows = sliding(np.arange(7), 4, 2).take([0, 1])
    >>> windows["inputs"].tolist(), windows["entries"].tolist()
    ([[0, 1, 2, 3], [2, 3, 4, 5]], [[0, 1, 2, 3], [-1, -1, 4, 5]])
    """
    stride, width = stride or length, width or length
    check_at_least(1, "windows", length=length, stride=stride, width=width)
    count = len(tokens) - 1
    if count < 1:
        raise ConfigError(
            f"the text must have at least 2 tokens, one to read and one to predict, got {count + 1}: give a longer text"
        )
    if stride > length:
        raise ConfigError(
            f"a stride of {stride} leaves tokens out between windows of {length}: lower the stride"
        )
    bounds = np.array([0, count]) if bounds is None else bounds
    if width < min(length, np.diff(bounds).max()):
        raise ConfigError(
            f"rows of {width} tokens have no room for a window of {length}: give a larger width"
        )
    pieces = cut(bounds, length, stride)
    return Windows(tokens, pieces, fit(pieces.sizes.tolist(), width), width)


@dataclasses.dataclass(frozen=True)
class Losses:
    """The loss of every token of a text."""

    nats: np.ndarray  # float64 `[N]`, −log p(token | earlier tokens in its window)
    seen: np.ndarray  # int `[N]`, number of earlier tokens in its window

    def by_seen(self, most: int, bins: int = 16) -> tuple[np.ndarray, np.ndarray]:
        """Averages losses over at most `bins` equal ranges of tokens seen, 1 … `most`.

        Returns (the middle of each range, the mean loss in each range). Ranges without tokens are
        left out.

        >>> losses = Losses(np.array([4.0, 2.0, 1.0, 1.0]), np.array([1, 2, 3, 4]))
        >>> [x.tolist() for x in losses.by_seen(4, bins=2)]
        [[1.5, 3.5], [3.0, 1.0]]
        """
        edges = np.unique(np.linspace(0, most, bins + 1).round().astype(int))
        number = np.searchsorted(edges, self.seen, side="left") - 1
        sizes = np.bincount(number, minlength=len(edges) - 1)
        sums = np.bincount(number, self.nats, len(edges) - 1)
        there = sizes > 0
        return ((edges[1:] + edges[:-1] + 1) / 2)[there], (sums / np.maximum(sizes, 1))[there]


def losses(model: Any, windows: Windows, batch_size: int = 16, label: str = "loss") -> Losses:
    """Measures the loss of every token under a decoder, `batch_size` rows of windows at a time.

    `windows` are from `sliding`. `label` is the label of the progress bar. Raises ConfigError if a
    window is longer than a table of the encoding, or if a loss is not finite.
    """
    check_length(model, int(windows.pieces.sizes.max()))
    nats, seen, _ = measure(model, windows, batch_size, label)
    if not np.isfinite(nats).all():
        first = int(np.argmin(np.isfinite(nats)))
        raise ConfigError(
            f"the loss of token {first} is not finite: the model has diverged, use an earlier checkpoint"
        )
    return Losses(nats, seen)


def measure(
    model: Any, windows: Windows, batch_size: int, label: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The loss of each of N targets, the earlier tokens it sees, and if it is most probable.

    A target in no window has the loss NaN.
    """
    graph, state = nnx.split(model)
    count = len(windows.tokens) - 1
    nats, seen, best = np.full(count, np.nan), np.zeros(count, int), np.zeros(count, bool)
    with Progress(count, "token", label=label, leave=False) as progress:
        for batch in windows.batches(batch_size):
            counts = batch["entries"] >= 0
            entries = batch["entries"][counts]
            loss_BL, best_BL = _losses(StaticGraphDef(graph), state, batch)
            nats[entries] = np.asarray(loss_BL, np.float64)[counts]
            best[entries] = np.asarray(best_BL)[counts]
            seen[entries] = batch["positions"][counts] + 1
            progress.advance(len(entries))
    return nats, seen, best


def check_length(model: Any, length: int) -> None:
    """Raises ConfigError if windows of this length are longer than a table of the encoding."""
    mistake = f"windows of {length} tokens are too long"
    check_positions(model, length, mistake, "ask for shorter ones")


@functools.partial(jax.jit, static_argnums=0)
def _losses(graphdef: StaticGraphDef, state: Any, batch: dict[str, Array]) -> tuple[Array, Array]:
    model, targets = nnx.merge(graphdef.graph, state), batch["targets"]
    logits_BLV = model(
        batch["inputs"], positions_BL=batch["positions"], segment_ids_BL=batch["segments"]
    )
    return cross_entropy(logits_BLV, targets), ~is_wrong(logits_BLV, targets)
