"""The operations of a tile program: the primitives of JAX on arrays of rows and columns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from cope_jax.array_types import Array
from cope_jax.attention.kernels.tile.tile_values import (
    NotATile,
    Tile,
    dtype_of,
    is_constant,
    longer,
    moved,
    natural,
    place,
    turned,
    whole,
)

Forms = Mapping[Any, Callable[..., Any]]

ELEMENTWISE = frozenset(
    "abs add add_any and ceil clamp convert_element_type cos div eq erf exp exp2 floor ge gt integer_pow is_finite le "
    "log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n shift_left shift_right_logical sign "
    "sin sqrt square sub tanh threefry2x32 xor".split()
)
REDUCTIONS: dict[str, Callable[..., Array]] = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
}
FOLDED: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "convert_element_type": lambda x: x,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "not": np.bitwise_not,
    "or": np.bitwise_or,
    "sub": np.subtract,
}
"""Operations on numbers that are known while tracing; they are done at once, and in NumPy, which
needs no device.
"""


def aval_of(var: Any) -> Any:
    """The shape and type of a variable of a traced function."""
    return var.aval


def elementwise(eqn: JaxprEqn, tiles: list[Tile]) -> list[Tile]:
    """An operation on each entry; those with zeros and ones that are known while tracing cost
    nothing.
    """
    name, out = eqn.primitive.name, aval_of(eqn.outvars[0])
    if name in FOLDED and all(x.constant() is not None for x in tiles):
        known = np.asarray(FOLDED[name](*(x.array for x in tiles)), out.dtype)
        return [Tile(known, out.shape, (None, None))]
    if name in ("add", "add_any", "sub") and is_constant(tiles[1], 0):
        return [_broadcast_to(tiles[0], out.shape)]
    if name in ("add", "add_any") and is_constant(tiles[0], 0):
        return [_broadcast_to(tiles[1], out.shape)]
    if name == "mul" and (is_constant(tiles[0], 1) or is_constant(tiles[1], 1)):
        return [_broadcast_to(tiles[1] if is_constant(tiles[0], 1) else tiles[0], out.shape)]
    if name == "mul" and (is_constant(tiles[0], 0) or is_constant(tiles[1], 0)):
        return [Tile(np.zeros((), out.dtype), out.shape, (None, None))]
    if name == "neg" and is_constant(tiles[0], 0):
        return tiles
    if name == "select_n" and tiles[0].constant() is not None:
        return [_broadcast_to(tiles[1 + int(tiles[0].array)], out.shape)]
    # Operands may be scalars, or have axes of size 1 that the result has not.
    axes = place([x for x in tiles if len(x.shape) == len(out.shape)], out.shape)
    arrays = [turned(x, axes) for x in tiles]
    size = np.broadcast_shapes(*(np.shape(x) for x in arrays))
    same = [
        jnp.broadcast_to(jnp.asarray(x, dtype_of(t)), size)
        for x, t in zip(arrays, tiles, strict=True)
    ]
    results = eqn.primitive.bind(*same, **_scalar(eqn.params))
    return [
        Tile(x, out.shape, axes) for x in (results if eqn.primitive.multiple_results else [results])
    ]


def _scalar(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if name == "sharding" else value for name, value in params.items()}


def reduce(name: str, x: Tile, reduced: Sequence[int]) -> Tile:
    """A sum, maximum or minimum along axes."""
    array, slots = x.array, list(x.axes)
    for axis in reduced:
        count = x.shape[axis]
        if count == 1:
            continue
        slot = slots.index(axis) if axis in slots else None
        if slot is not None and x.extent(slot) > 1:
            array = REDUCTIONS[name](array, axis=slot, keepdims=True)
        elif name == "reduce_sum":
            array = array * np.asarray(count, dtype_of(x))
        if slot is not None:
            slots[slot] = None
    left = [axis for axis in range(len(x.shape)) if axis not in reduced]
    return moved(
        dataclasses.replace(x, array=array, axes=(slots[0], slots[1])),
        left,
        [x.shape[a] for a in left],
    )


def _broadcast(
    shape: Any, tiles: list[Tile], /, *, broadcast_dimensions: Sequence[int], **_: Any
) -> Tile:
    (x,) = tiles
    slots = [
        None if a is None or x.extent(slot) == 1 else broadcast_dimensions[a]
        for slot, a in enumerate(x.axes)
    ]
    rest = [axis for axis in longer(shape) if axis not in slots]
    if len(rest) > slots.count(None):
        raise NotATile(f"an array {list(shape)} has more than two axes longer than 1")
    if len(rest) == 2:
        slots = list(rest)
    elif rest:
        slots[1 if slots[1] is None else 0] = rest[0]
    return Tile(x.array, tuple(shape), (slots[0], slots[1]))


def _broadcast_to(x: Tile, shape: Sequence[int]) -> Tile:
    return (
        x
        if x.shape == tuple(shape)
        else _broadcast(shape, [x], broadcast_dimensions=range(len(x.shape)))
    )


def _reshape(shape: Any, tiles: list[Tile], /, **_: Any) -> Tile:
    (x,) = tiles
    before, after = longer(x.shape), longer(shape)
    if [x.shape[axis] for axis in before] != [shape[axis] for axis in after]:
        raise NotATile(f"a reshape from {list(x.shape)} to {list(shape)} moves entries")
    new: dict[int | None, int] = dict(zip(before, after, strict=True))
    rows, columns = (new.get(axis) for axis in x.axes)  # None for an axis of size 1
    return Tile(x.array, tuple(shape), (rows, columns))


def _transpose(shape: Any, tiles: list[Tile], /, *, permutation: Sequence[int]) -> Tile:
    return moved(tiles[0], list(permutation), shape)


def _slice(
    shape: Any, tiles: list[Tile], /, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Tile:
    (x,) = tiles
    array, slots = x.array, list(x.axes)
    for slot, axis in enumerate(x.axes):
        if axis is not None and shape[axis] != x.shape[axis]:
            if x.extent(slot) > 1:
                step = 1 if strides is None else strides[axis]
                array = jax.lax.slice_in_dim(
                    array, start_indices[axis], limit_indices[axis], step, axis=slot
                )
            slots[slot] = axis if shape[axis] > 1 else None
    return Tile(array, tuple(shape), (slots[0], slots[1]))


def entry(x: Tile, axis: int, number: int) -> Tile:
    """One entry along an axis."""
    first = [number if a == axis else 0 for a in range(len(x.shape))]
    limit = [number + 1 if a == axis else size for a, size in enumerate(x.shape)]
    shape = [1 if a == axis else size for a, size in enumerate(x.shape)]
    single = _slice(shape, [x], start_indices=first, limit_indices=limit, strides=None)
    rest = [a for a in range(len(shape)) if a != axis]
    return moved(single, rest, [shape[a] for a in rest])


def _iota(shape: Any, tiles: list[Tile], /, *, dimension: int, dtype: Any, **_: Any) -> Tile:
    del tiles
    rows, columns = natural(tuple(shape), dtype).axes
    slot = 0 if dimension == rows else 1
    size = (shape[dimension], 1) if slot == 0 else (1, shape[dimension])
    return Tile(jax.lax.broadcasted_iota(dtype, size, slot), tuple(shape), (rows, columns))


def _product(
    shape: Any, tiles: list[Tile], /, *, dimension_numbers: Any, precision: Any, **params: Any
) -> Tile:
    """A product of two matrices, or of a column and a row."""
    ((x_summed, y_summed), (x_shared, y_shared)), dtype = (
        dimension_numbers,
        params["preferred_element_type"],
    )
    x, y = tiles
    x_free, x_sum, x_place = _side(x, x_summed, x_shared)
    y_free, y_sum, y_place = _side(y, y_summed, y_shared)
    # The axes of the result: shared ones, the free ones of x, then those of y.
    beside = len(x.shape) - len(x_summed) - len(x_shared)
    rows = None if x_place is None else len(x_shared) + x_place
    columns = None if y_place is None else len(x_shared) + beside + y_place
    if is_constant(x, 0) or is_constant(y, 0):
        return Tile(np.zeros((), dtype), tuple(shape), (None, None))
    if x_sum is None or y_sum is None:
        left, right = whole(x, (x_free, None)).astype(dtype), whole(y, (None, y_free)).astype(dtype)
        return Tile(left * right, tuple(shape), (rows, columns))
    # Either side as it lies: the matrix unit takes transposed operands.
    left_axes = x.axes if set(x.axes) == {x_free, x_sum} else (x_free, x_sum)
    right_axes = y.axes if set(y.axes) == {y_free, y_sum} else (y_sum, y_free)
    dimensions = (((left_axes.index(x_sum),), (right_axes.index(y_sum),)), ((), ()))
    product = jax.lax.dot_general(
        whole(x, left_axes),
        whole(y, right_axes),
        dimensions,
        precision=precision,
        preferred_element_type=dtype,
    )
    return Tile(product, tuple(shape), (rows, columns))


def _side(
    x: Tile, summed: Sequence[int], shared: Sequence[int]
) -> tuple[int | None, int | None, int | None]:
    """The long axis of a factor that is not summed, the one that is, and the place of the first
    among free axes.
    """
    free = [axis for axis in range(len(x.shape)) if axis not in summed and axis not in shared]
    long_free, long_summed, long_shared = (
        [a for a in axes if x.shape[a] > 1] for axes in (free, summed, shared)
    )
    if len(long_free) > 1 or len(long_summed) > 1 or long_shared:
        raise NotATile(f"a kernel has no product of an array {list(x.shape)} along several axes")
    free_axis = next(iter(long_free), None)
    return (
        free_axis,
        next(iter(long_summed), None),
        None if free_axis is None else free.index(free_axis),
    )


def _concatenate(shape: Any, tiles: list[Tile], /, *, dimension: int) -> Tile:
    if len(tiles) == 1:
        return tiles[0]
    axes = place(tiles, shape)
    if (
        any(x.shape[dimension] == 1 for x in tiles)
        and shape[dimension] > 1
        and len(longer(shape)) > 1
    ):
        axes = axes if dimension in axes else natural(tuple(shape), None).axes
    parts = [whole(x, axes) for x in tiles]
    return Tile(jnp.concatenate(parts, axis=axes.index(dimension)), tuple(shape), axes)


def _pad(shape: Any, tiles: list[Tile], /, *, padding_config: Any) -> Tile:
    """Puts single entries into an array of equal entries; the transpose of a slice."""
    x, filled = tiles
    axis = next(
        (axis for axis, config in enumerate(padding_config) if tuple(config) != (0, 0, 0)), None
    )
    if axis is None:
        return x
    if (
        x.shape[axis] != 1
        or shape[axis] == 1
        or any(a != axis and tuple(c) != (0, 0, 0) for a, c in enumerate(padding_config))
    ):
        raise NotATile(f"a pad of {list(x.shape)} to {list(shape)}")
    spread = _broadcast(shape, [x], broadcast_dimensions=range(len(shape)))
    slot = spread.axes.index(axis)
    size = (shape[axis], 1) if slot == 0 else (1, shape[axis])
    chosen = jax.lax.broadcasted_iota(jnp.int32, size, slot) == padding_config[axis][0]
    return dataclasses.replace(spread, array=jnp.where(chosen, spread.array, filled.array))


def _stack(shape: Any, tiles: list[Tile], /, *, axis: int, **_: Any) -> Tile:
    single = [1 if a == axis else size for a, size in enumerate(shape)]
    old = [a for a in range(len(shape)) if a != axis]
    parts = [_broadcast(tuple(single), [x], broadcast_dimensions=old) for x in tiles]
    return _concatenate(shape, parts, dimension=axis)


TRANSLATIONS: dict[str, Callable[..., Tile]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dot_general": _product,
    "expand_dims": _reshape,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}


def operation(eqn: JaxprEqn, tiles: list[Tile], forms: Forms) -> list[Tile]:
    """An operation of `cope_jax.ops` along the last axis, which becomes the columns."""
    arrays = []
    for x in tiles:
        last = len(x.shape) - 1
        others = [axis for axis in longer(x.shape) if axis != last]
        if len(others) > 1:
            raise NotATile(f"{eqn.primitive.name} of an array {list(x.shape)}")
        axes = next(iter(others), None), last if x.shape[last] > 1 else None
        arrays.append((turned(x, axes), x.shape[last], dtype_of(x)))
    # Equal rows stay one row, if all arrays have equal rows.
    rows = max(np.shape(array)[0] if np.ndim(array) else 1 for array, *_ in arrays)
    sizes = [
        (1 if len(x.shape) == 1 else rows, columns)
        for x, (_, columns, _) in zip(tiles, arrays, strict=True)
    ]
    given = [
        jnp.broadcast_to(jnp.asarray(x, dtype), size)
        for (x, _, dtype), size in zip(arrays, sizes, strict=True)
    ]
    out = forms[eqn.primitive](*given, **eqn.params) if eqn.primitive in forms else None
    if out is None:
        raise NotATile(f"a kernel has no {eqn.primitive.name}")
    results = []
    for x, var in zip(out if eqn.primitive.multiple_results else [out], eqn.outvars, strict=True):
        aval = aval_of(var)
        spec = natural(aval.shape, aval.dtype)
        results.append(Tile(x, spec.shape, spec.axes))
    return results
