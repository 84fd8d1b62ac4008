"""The arrays that the kernels of a TPU read and write, block by block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention.blocks import AXES, KeyBlock, QueryBlock
from cope_jax.attention.kernels.tile.tile_values import NotATile, Spec, natural

SUBLANES = 8  # a register has 8 rows of 32-bit numbers


@dataclasses.dataclass(frozen=True)
class Execution:
    """The choices by which the kernels run.

    Attributes:
      keys: how many keys are in fast memory at a time.
      gathers: whether the chip gathers within registers.
      head_axis: the axis of the current mesh that splits the heads; None if none does.
      interpret: run on any backend, slowly.
    """

    keys: int
    gathers: bool = True
    head_axis: str | None = None
    interpret: bool = False


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array as the kernel reads or writes it, `[B or 1, heads, blocks, rows, columns]`.

    Attributes:
      array: the array in this form; for a result, its shape.
      spec: how one block looks to a tile program.
      side: "query": a program sees its own block; "key": it sees all blocks; "head": there is one
        block.
      axis: the axis of `spec.shape` that numbers queries or keys.
      turned: whether a block is stored as a row, although the tile program wants a column: a column
        of single numbers would take 128 times its size.
      fill: the value of all entries, if the kernel need not read them; None if it must.
    """

    array: Any
    spec: Spec
    side: str
    axis: int = 0
    turned: bool = False
    fill: float | None = None

    def block_spec(self, heads: int, groups: int) -> pl.BlockSpec:
        """Returns the blocks that program (b, g, r, s) sees, among `heads` query heads and `groups`
        key heads.
        """
        batch, own_heads, *size = self.array.shape
        blocks, repeats = size[0] if self.side == "key" else 1, heads // groups

        def place(b: Array, g: Array, r: Array, s: Array, *_: Any) -> tuple[Any, ...]:
            head = 0 if own_heads == 1 else g * repeats + r if own_heads == heads else g
            return b if batch > 1 else 0, head, s if self.side == "query" else 0, 0, 0

        return pl.BlockSpec((None, None, blocks, *size[1:]), place)

    def partition(self, axis: str | None) -> PartitionSpec:
        """Returns the axes of the mesh that split the array."""
        return PartitionSpec(None, axis if self.array.shape[1] > 1 else None)

    def blank(self, batch: int) -> "Argument":
        """A result of this form for each example."""
        shape = jax.ShapeDtypeStruct((batch, *self.array.shape[1:]), self.spec.dtype)
        return dataclasses.replace(self, array=shape)

    def widened(self, blocks: int) -> "Argument":
        """The same array, of which a program sees `blocks` neighbouring blocks of keys as one."""
        shape = tuple(n * blocks if a == self.axis else n for a, n in enumerate(self.spec.shape))
        return (
            dataclasses.replace(self, spec=dataclasses.replace(self.spec, shape=shape))
            if self.side == "key"
            else self
        )

    def read(self, ref: Any, gathers: bool, first: Any = 0, blocks: int = 1) -> Array:
        """Reads blocks of keys from `first` on, or the own block of a query or head."""
        if self.fill is not None:
            return jnp.full(self.spec.size, self.fill, self.spec.dtype)
        parts = [ref[first + n] for n in range(blocks)] if self.side == "key" else [ref[0]]
        along = 0 if self.spec.axes[0] == self.axis else 1
        x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=along)
        return _turn(x, gathers) if self.turned else x

    def write(self, ref: Any, gathers: bool, x: Array, *, add: bool) -> None:
        """Writes the own block of a query or head."""
        x = (_turn(x, gathers) if self.turned else x).astype(ref.dtype)
        ref[0] = ref[0] + x if add else x

    def add_to_keys(self, ref: Any, first: Any, x: Array, blocks: int) -> None:
        """Adds to blocks of keys from `first` on."""
        along = 0 if self.spec.axes[0] == self.axis else 1
        size = x.shape[along] // blocks
        for n in range(blocks):
            ref[first + n] += jax.lax.slice_in_dim(x, n * size, (n + 1) * size, axis=along).astype(
                ref.dtype
            )


def _turn(x: Array, gathers: bool) -> Array:
    """A row as a column, or a column as a row.

    A chip that cannot gather transposes registers, which takes longer.
    """
    if gathers:
        return x.reshape(x.shape[::-1])
    return jnp.broadcast_to(x, tuple(max(n, SUBLANES) for n in x.shape)).T[
        : x.shape[1], : x.shape[0]
    ]


def sequence(x: Any, axis: int, size: int, side: str) -> Argument:
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
    return Argument(array, spec, side, axis, turned and along_rows)


def of_block(block: QueryBlock | KeyBlock, size: int, side: str) -> Any:
    """The arguments for the fields of a block of queries or keys, in a block of the same type."""

    def along(name: str) -> Any:
        return jax.tree.map(lambda x: sequence(x, AXES[name], size, side), getattr(block, name))

    return dataclasses.replace(
        block, **{field.name: along(field.name) for field in dataclasses.fields(block)}
    )


def rows(tree: PyTree, size: int) -> PyTree:
    """The arguments for arrays `[B, heads, L, ...]` of the queries, with blocks of `size`."""
    return jax.tree.map(lambda x: sequence(x, 2, size, "query"), tree)


def key_columns(x: Any, size: int) -> Argument:
    """The gradient of keys or values `[B, G, M, K]`, with the keys of a block along the columns."""
    batch, groups, length, width = x.shape
    dtype = accumulator_dtype(x.dtype)
    shape = jax.ShapeDtypeStruct((batch, groups, length // size, width, size), dtype)
    return Argument(shape, Spec((1, 1, width, size), dtype, (2, 3)), "key", 3)


def of_head(x: Any, shape: tuple[int, ...]) -> Argument:
    """An array with one entry of this shape for each head, `[1 or B, H or 1, *shape]`."""
    spec = natural(shape, x.dtype)
    return Argument(x.reshape(*x.shape[:2], 1, *spec.size), spec, "head")


def specs(tree: PyTree) -> PyTree:
    """The `Spec` of each argument in a tree."""
    return jax.tree.map(lambda x: x.spec, tree, is_leaf=is_argument)


def is_argument(x: Any) -> bool:
    """Returns whether x is a leaf of a tree of arguments."""
    return isinstance(x, Argument)
