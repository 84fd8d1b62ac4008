"""The values of a tile program: arrays of rows and columns that stand for arrays with more axes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array

Axes = tuple[int | None, int | None]
Shape = tuple[int, ...]


class NotATile(Exception):
    """A function cannot run on tiles; the message says which operation and why."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """An argument of a tile program.

    Attributes:
      shape, dtype: of the array in the traced function.
      axes: which axis of `shape` becomes the rows of the matrix, and which becomes its columns;
        None if no axis does. All other axes have size 1.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, columns = (1 if axis is None else self.shape[axis] for axis in self.axes)
        return rows, columns


@dataclasses.dataclass(frozen=True)
class Tile:
    """A value of the traced function.

    Attributes:
      array: `[rows, columns]`, or a scalar. A size of 1 in place of a longer axis means equal
        entries along it.
      shape, axes: as in `Spec`.
    """

    array: Any
    shape: tuple[int, ...]
    axes: Axes

    def extent(self, slot: int) -> int:
        """The size of `array` along the rows (slot 0) or columns (1)."""
        size: int = self.array.shape[slot] if np.ndim(self.array) else 1
        return size

    def constant(self) -> Any:
        """The value of all entries where it is known while tracing, else None."""
        return (
            self.array
            if isinstance(self.array, np.generic | np.ndarray) and self.array.ndim == 0
            else None
        )


def natural(shape: tuple[int, ...], dtype: Any) -> Spec:
    """The `Spec` of an array whose last long axis lies along the columns, and the one before along
    the rows.
    """
    long = longer(shape)
    if len(long) > 2:
        raise NotATile(f"an array {list(shape)} has more than two axes longer than 1")
    rows, columns = (None, None, *long)[-2:]
    return Spec(shape, dtype, (rows, columns))


def longer(shape: Sequence[int]) -> list[int]:
    """The axes that are longer than 1."""
    return [axis for axis, size in enumerate(shape) if size > 1]


def place(tiles: Sequence[Tile], shape: Shape) -> Axes:
    """The rows and columns for operands of one shape: those of the fullest operand."""
    rows, columns = natural(shape, None).axes
    slots = [{x.axes[slot]: slot for slot in (0, 1) if x.extent(slot) > 1} for x in tiles]
    chosen = max(slots, key=len, default={})
    if rows is None:  # at most one long axis
        return (columns, None) if chosen.get(columns) == 0 else (None, columns)
    return (columns, rows) if chosen.get(rows) == 1 or chosen.get(columns) == 0 else (rows, columns)


def turned(x: Tile, axes: Axes) -> Any:
    """The array of a tile with its rows and columns along these axes."""
    if all(x.extent(slot) == 1 or x.axes[slot] == axes[slot] for slot in (0, 1)):
        return x.array
    if any(x.extent(slot) > 1 and x.axes[slot] not in axes for slot in (0, 1)):
        raise NotATile(f"an axis of {list(x.shape)} lies neither along rows nor columns")
    return x.array.T if min(x.array.shape) > 1 else x.array.reshape(x.array.shape[::-1])


def whole(x: Tile, axes: Axes | None = None) -> Array:
    """The array `[rows, columns]` with all its entries."""
    axes = x.axes if axes is None else axes
    size = tuple(1 if axis is None else x.shape[axis] for axis in axes)
    return jnp.broadcast_to(jnp.asarray(turned(x, axes), dtype_of(x)), size)


def dtype_of(x: Tile) -> Any:
    """The type of the entries."""
    return x.array.dtype


def is_constant(x: Tile, value: float) -> bool:
    """Returns whether all entries are known while tracing to have this value."""
    constant = x.constant()
    return constant is not None and bool(constant == value)


def moved(x: Tile, old: Sequence[int], shape: Sequence[int]) -> Tile:
    """The same entries in another shape, whose axis number n is the old axis `old[n]`."""
    rows, columns = (
        None if axis is None or axis not in old else old.index(axis) for axis in x.axes
    )
    return Tile(x.array, tuple(shape), (rows, columns))
