"""Cuts the tokens of texts into examples of one length and packs short ones, without any loss.

A text of n tokens has n *entries*. Each entry reads one token and predicts the next token of the
text. The first entry reads `end`.
"""

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least

Packing = Literal["stream", "documents"]


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """A sequence of documents: entry i reads `tokens[i]`, and `tokens[i + 1]` is its target.

    Attributes:
      tokens: int32 `[N + 1]`.
      bounds: `[D + 1]`, the entry at which each of the D documents begins, then N.
      counted: bool `[N]`, False where the target is an `end` that `join` added to the text.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.counted)


def join(documents: Iterable[np.ndarray], end: int) -> TokenStream:
    """Joins nonempty documents. `end` precedes the first, and follows each that lacks it.

    >>> entries = join([np.array([5, 6]), np.array([7, 0])], end=0)
    >>> entries.tokens.tolist(), entries.bounds.tolist(), entries.counted.tolist()
    ([0, 5, 6, 0, 7, 0], [0, 3, 5], [True, True, False, True, True])
    """
    parts, sizes, added = [np.array([end], np.int32)], [], []
    for document in documents:
        if not len(document):
            continue
        has_end = int(document[-1]) == end
        parts += [document] if has_end else [document, parts[0]]
        sizes.append(len(document) + (not has_end))
        added.append(not has_end)
    bounds = np.cumsum([0, *sizes])
    counted = np.ones(bounds[-1], bool)
    counted[bounds[1:][np.array(added, bool)] - 1] = False
    return TokenStream(np.concatenate(parts).astype(np.int32), bounds, counted)


class Pieces(NamedTuple):
    """The division of a text of N entries into P pieces. Every attribute is an array `[P]`.

    Attributes:
      starts: the first entry of each piece.
      sizes: the number of entries of each piece.
      context: the number of entries at the start of each piece that already count in an earlier
        piece.
    """

    starts: np.ndarray
    sizes: np.ndarray
    context: np.ndarray


def cut(bounds: np.ndarray, length: int, stride: int) -> Pieces:
    """Cuts entries between bounds into pieces of at most `length` that start `stride` apart."""
    sizes = np.diff(bounds)
    counts = np.where(sizes > 0, 1 + np.maximum(0, -(-(sizes - length) // stride)), 0)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + number * stride
    context = np.where(number == 0, 0, length - stride)
    return Pieces(starts, np.minimum(length, np.repeat(bounds[1:], counts) - starts), context)


def lay_out(
    tokens: np.ndarray, pieces: Pieces, rows: Sequence[Sequence[int]], width: int
) -> dict[str, np.ndarray]:
    """Writes pieces into rows; each field is int32 `[rows, width]`.

    Returns:
      A dict with these fields:

      - `inputs`;
      - `targets`: the token after each input;
      - `positions`: from 0 in each piece;
      - `segments`: the number of the piece in its row, and −1 after the last piece;
      - `entries`: the number of the entry in the text, and −1 in the context of a piece and after
        the last piece.
    """
    shape = (len(rows), width)
    fields = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "positions")}
    fields |= {name: np.full(shape, -1, np.int32) for name in ("segments", "entries")}
    for number, row in enumerate(rows):
        begin = 0
        for segment, piece in enumerate(row):
            start, size, context = (int(field[piece]) for field in pieces)
            here = number, slice(begin, begin + size)
            fields["inputs"][here] = tokens[start : start + size]
            fields["targets"][here] = tokens[start + 1 : start + size + 1]
            fields["positions"][here] = np.arange(size)
            fields["segments"][here] = segment
            counted = slice(begin + context, begin + size)
            fields["entries"][number, counted] = np.arange(start + context, start + size)
            begin += size
    return fields


def arrange(entries: TokenStream, length: int, packing: Packing) -> tuple[Pieces, np.ndarray]:
    """Decides which pieces of a stream form its examples: see `Packed`.

    Returns:
      The pieces in the order of the examples, and `[examples + 1]`, the first piece of each example
      and their number.

    Raises:
      ConfigError: `length` is less than 1.
    """
    check_at_least(1, "packing", length=length)
    bounds = entries.bounds if packing == "documents" else np.array([0, len(entries)])
    pieces = cut(bounds, length, length)
    rows = (
        fit(pieces.sizes.tolist(), length)
        if packing == "documents"
        else [[n] for n in range(len(pieces.sizes))]
    )
    order = np.array([piece for row in rows for piece in row], np.int64)
    return Pieces(*(field[order] for field in pieces)), np.cumsum([0, *map(len, rows)])


class Packed:
    """Cuts a `TokenStream` into examples of length L.

    With "stream", the examples are consecutive windows, which may cross documents. With
    "documents", each document fills as many windows as it can. The remainders of several documents
    are packed into one example if they fit. `segments` and `positions` separate the documents of an
    example. If a target is an `end` that `join` added, its weight is 1 if `every` is True, and 0
    otherwise.

    >>> entries = join([np.array([5, 6, 7, 8]), np.array([9]), np.array([3, 4])], end=0)
    >>> batch = Packed(entries, 3, "documents", every=True).take(np.arange(4))
    >>> print(*(batch[name].tolist() for name in ("inputs", "targets", "segments", "positions")), sep=chr(10))
    [[0, 5, 6], [7, 8, 0], [0, 9, 0], [0, 3, 4]]
    [[5, 6, 7], [8, 0, 0], [9, 0, 0], [3, 4, 0]]
    [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    [[0, 1, 2], [0, 1, 0], [0, 1, 0], [0, 1, 2]]
    """

    def __init__(self, entries: TokenStream, length: int, packing: Packing, *, every: bool):
        self._entries, self._length, self._packing, self._every = entries, length, packing, every
        self._pieces, self._rows = arrange(entries, length, packing)

    def __len__(self) -> int:
        return len(self._rows) - 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices`, with the fields `inputs`, `targets` and `weights` `[n, L]`.

        With "documents", there are also `segments` and `positions` `[n, L]`. Segments are numbered
        from 1 in each example. All fields are padded with 0.
        """
        bounds = ((self._rows[index], self._rows[index + 1]) for index in np.asarray(indices))
        rows = [range(int(begin), int(end)) for begin, end in bounds]
        fields = lay_out(self._entries.tokens, self._pieces, rows, self._length)
        names = ("entries", "segments", "positions")
        entries_BL, segments_BL, positions_BL = (fields.pop(name) for name in names)
        counts_BL = (entries_BL >= 0) & (self._every | self._entries.counted[entries_BL])
        batch = {**fields, "weights": counts_BL.astype(np.float32)}
        if self._packing == "stream":
            return batch
        return {**batch, "segments": segments_BL + 1, "positions": positions_BL}


def repeated_pairs(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """True where the pair (input, target) occurred before in its document and row, bool `[n, L]`.

    >>> batch = {"inputs": np.array([[5, 6, 5, 6]]), "targets": np.array([[6, 5, 6, 7]])}
    >>> repeated_pairs(batch).tolist()
    [[False, False, True, False]]
    """
    inputs_BL, targets_BL = batch["inputs"], batch["targets"]
    rows_BL = np.broadcast_to(np.arange(len(inputs_BL))[:, None], inputs_BL.shape)
    fields = rows_BL, batch.get("segments", rows_BL), inputs_BL, targets_BL
    _, first = np.unique(np.stack([x.ravel() for x in fields]), axis=1, return_index=True)
    repeated_BL = np.ones(inputs_BL.shape, bool)
    repeated_BL.flat[first] = False
    return repeated_BL


class Mixed:
    """The examples of several texts in one sequence: one text after the other, or spread evenly.

    If spread, example i of a text with n examples is at the fraction (i + 1/2)/n of the sequence.
    Any number of first examples then contains all texts in proportion to their sizes.

    >>> texts = [join([np.array(tokens)], end=0) for tokens in ([5, 5, 5, 0], [6, 0])]
    >>> mixed = Mixed([Packed(text, 1, "stream", every=True) for text in texts], spread=True)
    >>> mixed.take(np.arange(6))["targets"].ravel().tolist()
    [5, 6, 5, 5, 0, 0]
    """

    def __init__(self, parts: Sequence[Packed], *, spread: bool):
        self._parts = parts
        self._ends = np.cumsum([0, *map(len, parts)])
        self._order = None
        if spread and len(parts) > 1:
            places = np.concatenate([(np.arange(len(text)) + 0.5) / len(text) for text in parts])
            self._order = np.argsort(places, kind="stable")

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def ranges(self) -> list[range]:
        """The indices of the examples of each text. They are valid only without `spread`."""
        return [range(*self._ends[text : text + 2].tolist()) for text in range(len(self._parts))]

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `indices`, as of `Packed.take`. ConfigError for an index out of range."""
        for index in indices[(indices < 0) | (indices >= len(self))]:
            raise ConfigError(
                f"there is no example {index}: give an index of at least 0 and less than {len(self)}"
            )
        if self._order is not None:
            indices = self._order[indices]
        if len(self._parts) == 1 or not len(indices):
            return self._parts[0].take(indices)
        which = np.searchsorted(self._ends, indices, side="right") - 1
        within = indices - self._ends[which]
        chosen = zip(which, within, strict=True)
        rows = [self._parts[text].take(index[None]) for text, index in chosen]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Packs pieces by best-fit decreasing: longest first, into the fullest row with enough room.

    Ding et al., "Fewer truncations improve language modeling" (arXiv 2404.10830). Sizes are from 1
    to `length`. Returns the numbers of the pieces in each row, in ascending order. Rows are sorted
    by their first piece.

    >>> fit([2, 4, 1, 3, 2], 4)
    [[0, 4], [1], [2, 3]]
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # free room of rows that are not full, each number once, ascending
    having: dict[int, list[int]] = {}  # room -> rows with this room
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        size = sizes[piece]
        index = bisect.bisect_left(rooms, size)
        if index < len(rooms):
            room = rooms[index]
            row = having[room].pop()
            if not having[room]:
                rooms.pop(index)
        else:
            row, room = len(rows), length
            rows.append([])
        rows[row].append(piece)
        left = room - size
        if left:
            if not having.setdefault(left, []):
                bisect.insort(rooms, left)
            having[left].append(row)
    return sorted(sorted(row) for row in rows)
