"""Primitives of derivatives that JAX does not have: a linear function that knows its transpose, and
one that has none.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError


class Tangent(NamedTuple):
    """A derivative, as a linear function of tangents.

    Attributes:
      push: called with what it reads and the tangents, returns the tangent of out. What it reads
        begins with out.
      pull: called with (what it reads, cotangent of out), returns the cotangents.
      reads: the number of arrays that it reads.
    """

    push: Callable[..., Array]
    pull: Callable[[Sequence[Array], Array], list[Array]]
    reads: int


def is_float(x: Any) -> bool:
    """Returns whether an array has floating-point numbers, and so a tangent."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def has_tangent(tangent: Any) -> bool:
    """Returns whether a tangent is neither of integers nor known to be 0."""
    return not isinstance(tangent, SymbolicZero | ad.Zero) and is_float(tangent)


def jvp_of_some(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Computes `jax.jvp` by the arguments that have a tangent; others have None or a zero."""
    moves = [t is not None and has_tangent(t) for t in tangents]

    def of_moving(*moving: Array) -> Any:
        moved = iter(moving)
        pairs = zip(primals, moves, strict=True)
        return function(*(next(moved) if moves else x for x, moves in pairs))

    moving, dmoving = (
        tuple(x for x, moved in zip(each, moves, strict=True) if moved)
        for each in (primals, tangents)
    )
    return jax.jvp(of_moving, moving, dmoving)


def are_zero(tangents: Sequence[Any]) -> bool:
    """Returns whether all tangents are known to be 0."""
    return all(type(t) is ad.Zero for t in tangents)


def _push(*arrays: Array, rule: Tangent) -> Array:
    return rule.push(*arrays)


tangent_p = Primitive("attention_tangent")
tangent_p.def_impl(_push)
tangent_p.def_abstract_eval(lambda out, *_, rule: out)
mlir.register_lowering(tangent_p, mlir.lower_fun(_push, multiple_results=False))


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rule: Tangent) -> Any:
    if not are_zero(tangents[: rule.reads]):
        return jvp_of_some(rule.push, primals, tangents)
    moved = [ad.instantiate_zeros(t) for t in tangents[rule.reads :]]
    kept = primals[: rule.reads]
    return tangent_p.bind(*primals, rule=rule), tangent_p.bind(*kept, *moved, rule=rule)


def _tangent_vmap(arrays: Sequence[Array], axes: Sequence[Any], *, rule: Tangent) -> Any:
    (size,) = {x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None}

    def first(x: Array, axis: Any) -> Array:
        if axis is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, axis, 0)

    kept, tangents = arrays[: rule.reads], arrays[rule.reads :]
    tangents = [first(x, axis) for x, axis in zip(tangents, axes[rule.reads :], strict=True)]
    # The first is out, of which the result has the shape.
    kept, axes_kept = (first(kept[0], axes[0]), *kept[1:]), (0, *axes[1 : rule.reads])
    push = jax.vmap(rule.push, (*axes_kept, *([0] * len(tangents))))
    pull = jax.vmap(rule.pull, (axes_kept, 0))
    return tangent_p.bind(*kept, *tangents, rule=Tangent(push, pull, rule.reads)), 0


def tangent_transpose(cotangent: Any, *arrays: Any, rule: Tangent) -> list[Any]:
    """Returns the cotangents of all arrays: those of what is read are None."""
    kept = tuple(arrays[: rule.reads])
    nothing = [None] * (len(arrays) - rule.reads)
    pulled = nothing if type(cotangent) is ad.Zero else rule.pull(kept, cotangent)
    return [None] * rule.reads + pulled


ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_vmap


@jax.custom_jvp
def never_reversed(tree: PyTree) -> PyTree:
    """Returns its argument, whose tangent raises ConfigError if JAX transposes it."""
    return tree


@functools.partial(never_reversed.defjvp, symbolic_zeros=True)
def _never_reversed_jvp(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    def marked(dx: Any) -> Any:
        return _untransposed.bind(dx) if has_tangent(dx) else dx

    return primals[0], jax.tree.map(marked, tangents[0])


def _refuse(cotangent: Any, x: Any) -> Any:
    raise ConfigError(
        "attention in blocks has no reverse mode of its derivatives: take jax.jvp of jax.grad, or "
        "choose implementation='full'"
    )


_untransposed = Primitive("attention_untransposed")
_untransposed.def_impl(lambda x: x)
_untransposed.def_abstract_eval(lambda x: x)
mlir.register_lowering(_untransposed, lambda _, x: [x])
ad.deflinear2(_untransposed, _refuse)
batching.defvectorized(_untransposed)
