"""The arrays that a kernel of tile programs reads and writes, block by block."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention.blocks import AXES, KeyBlock, QueryBlock
from cope_jax.attention.kernels.tile.tile_values import NotATile, Spec, natural


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array as the kernel reads or writes it, `[B or 1, heads, blocks, rows, columns]`.

    Attributes:
      array: the array in this form; for what exists only while a block of queries visits its keys,
        its shape; for a result, also the type that its reader takes, which may be narrower.
      spec: how one block looks to a tile program.
      side: "query": a program sees its own block; "key": it sees all blocks; "head": there is one
        block.
      axis: the axis of `spec.shape` that numbers queries or keys.
      turned: whether a block is stored as a row, although the tile program wants a column: on a TPU
        a column of single numbers would take 128 times its size.
      fill: the value of all entries, if the kernel need not read them; None if it must.
      by_token: whether the caller's array has the heads of a token side by side, so that a backend
        may read or write it like that without a copy.
    """

    array: Any
    spec: Spec
    side: str
    axis: int = 0
    turned: bool = False
    fill: float | None = None
    by_token: bool = False

    @property
    def given(self) -> bool:
        """True if a kernel reads it from an array."""
        return self.fill is None and not isinstance(self.array, jax.ShapeDtypeStruct)

    def blank(self, batch: int) -> "Argument":
        """A result of this form for each example."""
        shape = jax.ShapeDtypeStruct((batch, *self.array.shape[1:]), self.spec.dtype)
        return dataclasses.replace(self, array=shape)

    def read_as(self, dtype: Any) -> "Argument":
        """The same result for a reader that takes another type."""
        shape = jax.ShapeDtypeStruct(self.array.shape, dtype)
        return dataclasses.replace(self, array=shape)

    def widened(self, blocks: int) -> "Argument":
        """The same array, of which a program sees `blocks` neighbouring blocks of keys as one."""
        shape = tuple(n * blocks if a == self.axis else n for a, n in enumerate(self.spec.shape))
        return (
            dataclasses.replace(self, spec=dataclasses.replace(self.spec, shape=shape))
            if self.side == "key"
            else self
        )

    @property
    def interleaved(self) -> bool:
        """True if the heads of a token are neighbours in the array as a kernel in text has it, and
        not all blocks of a head.
        """
        heads: int = self.array.shape[1]
        return self.by_token and heads > 1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which a kernel in text has the array."""
        if not self.interleaved:
            return tuple(self.array.shape)
        batch, heads, blocks, *size = self.array.shape
        return batch, blocks * size[self.along], heads, size[1 - self.along]

    @property
    def stored(self) -> Array:
        """The array as a kernel in text reads it.

        XLA removes the changes of shape, as they undo those of the caller's array.
        """
        array = jnp.asarray(self.array)
        if not self.interleaved:
            return array
        batch, heads, _, _, width = array.shape
        return jnp.swapaxes(array.reshape(batch, heads, -1, width), 1, 2)

    def restored(self, array: Array) -> Array:
        """A result of a kernel in text as `[B, heads, blocks, rows, columns]`; tokens in columns are
        one block.
        """
        if not self.interleaved:
            return array
        if self.along == 1:
            return jnp.transpose(array, (0, 2, 3, 1))[:, :, None]
        return jnp.swapaxes(array, 1, 2).reshape(self.array.shape)

    @property
    def along(self) -> int:
        """The axis of a tile that numbers queries or keys: its rows (0) or its columns (1)."""
        return 0 if self.spec.axes[0] == self.axis else 1


def sequence(x: Any, axis: int, size: int, side: str, by_token: bool = False) -> Argument:
    """An array with a sequence axis: `[L]`, `[B, L]`, or `[B, heads, L, ...]`; `size` is the length
    of a block.
    """
    shape = x.shape
    if axis < 2:
        logical: tuple[int, ...] = (1, size) if axis else (size,)
        batch = shape[0] if axis else 1
        full = (batch, 1, shape[axis], 1)
    else:
        if len(shape) > 4:
            raise NotATile(f"features {list(shape)} have more than one axis for each token")
        logical = (1, 1, size, *shape[3:])
        full = (*shape[:3], *(shape[3:] or (1,)))
    batch, heads, length, width = full
    along_rows = side == "query" or width > 1
    axes = (axis if along_rows else None, (axis if not along_rows else (3 if width > 1 else None)))
    spec = Spec(logical, x.dtype, axes)
    turned = width == 1
    block = (1, size) if turned else (size, width)
    stored = (batch, heads, length // size, *block)
    array = (
        x.reshape(stored)
        if isinstance(x, jax.Array | np.ndarray)
        else jax.ShapeDtypeStruct(stored, x.dtype)
    )
    return Argument(array, spec, side, axis, turned and along_rows, by_token=by_token and width > 1)


def of_block(block: QueryBlock | KeyBlock, size: int, side: str) -> Any:
    """The arguments for the fields of a block of queries or keys, in a block of the same type."""

    def along(name: str) -> Any:
        argument = functools.partial(sequence, axis=AXES[name], size=size, side=side, by_token=True)
        return jax.tree.map(argument, getattr(block, name))

    return dataclasses.replace(
        block, **{field.name: along(field.name) for field in dataclasses.fields(block)}
    )


def rows(tree: PyTree, size: int, by_token: bool = False) -> PyTree:
    """The arguments for arrays `[B, heads, L, ...]` of the queries, with blocks of `size`."""
    return jax.tree.map(lambda x: sequence(x, 2, size, "query", by_token), tree)


def key_columns(x: Any, size: int) -> Argument:
    """The gradient of keys or values `[B, G, M, K]`, with the keys of a block along the columns."""
    batch, groups, length, width = x.shape
    spec = Spec((1, 1, width, size), accumulator_dtype(x.dtype), (2, 3))
    shape = jax.ShapeDtypeStruct((batch, groups, length // size, width, size), x.dtype)
    return Argument(shape, spec, "key", 3, by_token=True)


def of_head(x: Any, shape: tuple[int, ...]) -> Argument:
    """An array with one entry of this shape for each head, `[1 or B, H or 1, *shape]`."""
    spec = natural(shape, x.dtype)
    return Argument(x.reshape(*x.shape[:2], 1, *spec.size), spec, "head")


def specs(tree: PyTree) -> PyTree:
    """The `Spec` of each argument in a tree."""
    return jax.tree.map(lambda x: x.spec, tree, is_leaf=is_argument)


def leaves_of(tree: PyTree) -> list[Argument]:
    """The arguments in a tree."""
    return jax.tree.leaves(tree, is_leaf=is_argument)


def is_argument(x: Any) -> bool:
    """Returns whether x is a leaf of a tree of arguments."""
    return isinstance(x, Argument)
