"""The operations of `cope_jax.ops` as primitives, for programs on one tile inside a kernel.

While `tracing()`, each operation that a kernel cannot run as it is becomes one primitive. Automatic
differentiation knows these primitives, but they have no implementation: the kernel replaces each of
them by the form of its backend. All of them act on the last axis.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad

from cope_jax.array_types import Array

_TRACING = contextvars.ContextVar("tracing", default=False)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Within this context, the operations bind the primitives of this module."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def is_tracing() -> bool:
    """Returns whether the program of a kernel is being traced."""
    return _TRACING.get()


def _primitive(name: str, abstract: Callable[..., Any], multiple: bool = False) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple
    primitive.def_abstract_eval(abstract)
    return primitive


def _like(x: Any, **_: Any) -> ShapedArray:
    return ShapedArray(x.shape, x.dtype)


def _rows(indices: Any, dy: Any, *, size: int, **_: Any) -> ShapedArray:
    return ShapedArray((*indices.shape[:-1], size), dy.dtype)


def _table(indices: Any, dy: Any, *, size: int) -> ShapedArray:
    del indices
    return ShapedArray((size,), dy.dtype)


def _linear_in_last(primitive: Primitive, transposed: Callable[..., Any]) -> None:
    """Gives a primitive (fixed, x), linear in x, `transposed(cotangent, fixed, aval, …)`."""

    def transpose(cotangent: Any, fixed: Any, x: Any, **params: Any) -> Any:
        return None, None if type(cotangent) is ad.Zero else transposed(
            cotangent, fixed, x.aval, **params
        )

    ad.primitive_transposes[primitive] = transpose
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        ad.Zero(tangents[1].aval)
        if type(tangents[1]) is ad.Zero
        else primitive.bind(primals[0], tangents[1], **params),
    )


# Sums along the last axis; `suffix` from each index to the end, else from the start to each index.
running_sum_p = _primitive("running_sum", _like)
ad.deflinear2(running_sum_p, lambda dy, _, *, suffix: [running_sum_p.bind(dy, suffix=not suffix)])

# (z, p): the interpolated entries of each row of z, and their slopes by p. `descending`: p descends
# along each row.
look_up_p = _primitive("look_up", lambda z, p, *, descending: [_like(p), _like(p)], multiple=True)

# (p, dz): the derivative of the interpolation in the direction dz; and (p, dy), its transpose.
spread_p = _primitive("spread", lambda p, dz, *, descending: ShapedArray(p.shape, dz.dtype))
gather_up_p = _primitive("gather_up", _rows)
_linear_in_last(
    spread_p,
    lambda dy, p, z, descending: gather_up_p.bind(p, dy, size=z.shape[-1], descending=descending),
)

# (indices, z): entries of each row of z; and (indices, dy), the transpose.
take_rows_p = _primitive("take_rows", lambda indices, z: ShapedArray(indices.shape, z.dtype))
add_rows_p = _primitive("add_rows", _rows)
_linear_in_last(take_rows_p, lambda dy, indices, z: add_rows_p.bind(indices, dy, size=z.shape[-1]))

# (indices, table): entries of one table for all rows; and (indices, dy), the transpose.
take_table_p = _primitive(
    "take_table", lambda indices, table: ShapedArray(indices.shape, table.dtype)
)
add_table_p = _primitive("add_table", _table)
_linear_in_last(
    take_table_p, lambda dy, indices, table: add_table_p.bind(indices, dy, size=table.shape[0])
)

# (z, x): for each entry of x, how many entries of its row of z, which ascend, are below.
count_below_p = _primitive("count_below", lambda z, x: ShapedArray(x.shape, jnp.int32))
ad.primitive_jvps[count_below_p] = lambda primals, _: (
    count := count_below_p.bind(*primals),
    ad.Zero(ShapedArray(count.shape, jax.dtypes.float0)),
)

PRIMITIVES = frozenset(
    (
        count_below_p,
        running_sum_p,
        look_up_p,
        spread_p,
        gather_up_p,
        take_rows_p,
        add_rows_p,
        take_table_p,
        add_table_p,
    )
)


def running_sum(x: Array, suffix: bool) -> Array:
    """Sums along the last axis, from each index to the end if `suffix`, else from the start."""
    result: Array = running_sum_p.bind(x, suffix=suffix)
    return result
