"""Derivatives of streaming attention: reverse mode by a backward pass, forward mode by JAX.

JAX lets no function have both a `custom_vjp` and a forward mode. So `attend` has a `custom_jvp`,
whose rule is the primitive `dual`: one loop over pairs (value, tangent). Where JAX separates values
from tangents, as `jax.grad`, `jax.linearize` and `jax.checkpoint` do, `dual` becomes the forward
pass with residuals and the primitive `tangent`, whose transpose is the backward pass.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive, set_current_trace
from jax.extend.core.primitives import jit_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.linear_tangent import (
    Tangent,
    are_zero,
    has_tangent,
    is_float,
    jvp_of_some,
    tangent_p,
    tangent_transpose,
)

# Name of the forward results that the backward pass needs, for rematerialisation.
RESIDUALS = "attention"


class Passes(NamedTuple):
    """The passes of a backend, both with a forward mode.

    Attributes:
      forward: called with the arguments, a tree of arrays, and whether a gradient is needed;
        returns (out, *residuals), those that a rematerialised model may keep named `RESIDUALS`.
      backward: called with ((arguments, out, *residuals), cotangent of out); returns the cotangent
        of the arguments, without leaves where the arguments have no floating-point numbers.
    """

    forward: Callable[[PyTree, bool], Any]
    backward: Callable[[Any, Array], Any]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(passes: Passes, arguments: PyTree) -> Array:
    """Computes the output of the forward pass, with derivatives in both modes."""
    out: Array = passes.forward(arguments, False)[0]
    return out


@functools.partial(attend.defjvp, symbolic_zeros=True)
def _derivative(passes: Passes, primals: tuple[PyTree], tangents: tuple[PyTree]) -> Any:
    leaves, tree = jax.tree.flatten(primals[0])
    dleaves = jax.tree.leaves(tangents[0])
    moves = tuple(map(has_tangent, dleaves))
    dleaves = [x for x, moved in zip(dleaves, moves, strict=True) if moved]
    return _dual.bind(*leaves, *dleaves, rule=_Dual(passes, tree, moves))


def by_xla(kernel: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel` with the forward mode of `xla`, which computes the same."""
    with_forward_mode = jax.custom_jvp(kernel)
    with_forward_mode.defjvp(functools.partial(jax.jvp, xla))
    return with_forward_mode


class _Dual(NamedTuple):
    """The value of attention and its derivative by some arguments.

    Attributes:
      passes: those of the backend.
      tree: the structure of the arguments.
      moves: for each leaf of the arguments, whether it has a tangent.
    """

    passes: Passes
    tree: Any
    moves: tuple[bool, ...]

    @property
    def values(self) -> int:
        """The number of leaves of the arguments."""
        return len(self.moves)

    def alone(self, *arrays: Array) -> Array:
        """Returns out, whose type its tangent has; kernels need no forward mode for this."""
        out: Array = self.passes.forward(self.tree.unflatten(arrays[: self.values]), False)[0]
        return out

    def together(self, *arrays: Array) -> tuple[Array, Array]:
        """Returns out and its tangent, from all leaves and the tangents of those that move."""
        moved = iter(arrays[self.values :])
        tangents = [next(moved) if moves else None for moves in self.moves]
        pair: tuple[Array, Array] = jvp_of_some(self.alone, arrays[: self.values], tangents)
        return pair

    def apart(self, *arrays: Array) -> tuple[Array, Array]:
        """Returns the same, but a tangent that is computed by itself, from residuals."""
        out, kept, rule = self.linearized(arrays[: self.values])
        return out, tangent_p.bind(*kept, *arrays[self.values :], rule=rule)

    def linearized(self, leaves: Sequence[Array]) -> tuple[Array, list[Array], "Tangent"]:
        """Returns out, the arrays that the derivative reads, and the derivative."""
        out, *residuals = self.passes.forward(self.tree.unflatten(leaves), True)
        others, tree = jax.tree.flatten(residuals)

        def push(*arrays: Array) -> Array:
            return self.together(*arrays[1 : 1 + self.values], *arrays[rule.reads :])[1]

        def pull(kept: Sequence[Array], cotangent: Array) -> list[Array]:
            arguments = self.tree.unflatten(kept[1 : 1 + self.values])
            residuals: Any = jax.tree.unflatten(tree, kept[1 + self.values :])
            gradients = self.passes.backward((arguments, kept[0], *residuals), cotangent)
            floats = iter([x for x in jax.tree.leaves(gradients) if is_float(x)])
            each: list[Any] = [
                next(floats) if is_float(x) else None for x in kept[1 : 1 + self.values]
            ]
            return [x for x, moves in zip(each, self.moves, strict=True) if moves]

        kept = [out, *leaves, *others]
        rule = Tangent(push, pull, len(kept))
        return out, kept, rule


_dual = Primitive("attention_dual")
_dual.multiple_results = True
_dual.def_impl(lambda *arrays, rule: rule.together(*arrays))
_dual.def_abstract_eval(lambda *arrays, rule: 2 * jax.make_jaxpr(rule.alone)(*arrays).out_avals)
mlir.register_lowering(_dual, mlir.lower_fun(lambda *arrays, rule: rule.together(*arrays)))


def _dual_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rule: _Dual) -> Any:
    # If only tangents move, the result can be transposed.
    fixed = are_zero(tangents[: rule.values])
    return jvp_of_some(rule.apart if fixed else rule.together, primals, tangents)


def _dual_vmap(arrays: Sequence[Array], axes: Sequence[Any], *, rule: _Dual) -> Any:
    # Tangents of one point, as in `jax.jacfwd`, share the value.
    shared = all(axis is None for axis in axes[: rule.values])
    if shared:
        return jax.vmap(rule.apart, axes, (None, 0))(*arrays), (None, 0)
    return jax.vmap(rule.together, axes)(*arrays), (0, 0)


def _dual_transpose(cotangents: Sequence[Any], *arrays: Any, rule: _Dual) -> list[Any]:
    _, kept, derivative = rule.linearized(arrays[: rule.values])
    tangents = arrays[rule.values :]
    return [None] * rule.values + tangent_transpose(
        cotangents[1], *kept, *tangents, rule=derivative
    )[derivative.reads :]


def _dual_split(trace: Any, *tracers: Any, rule: _Dual) -> Any:
    with set_current_trace(trace):
        return rule.apart(*tracers)


def _dual_save(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """Splits `dual` in a rematerialised function, which may keep residuals."""
    apart = jax.jit(equation.params["rule"].apart)
    with equation.ctx.manager:
        (call,) = jax.make_jaxpr(apart)(*(x.aval for x in equation.invars)).eqns
    call = call.replace(invars=equation.invars, outvars=equation.outvars)
    return pe.partial_eval_jaxpr_custom_rules[jit_p](saveable, unknown, instantiated, call)


ad.primitive_jvps[_dual] = _dual_jvp
ad.primitive_transposes[_dual] = _dual_transpose
batching.primitive_batchers[_dual] = _dual_vmap
pe.custom_partial_eval_rules[_dual] = _dual_split
pe.partial_eval_jaxpr_custom_rules[_dual] = _dual_save
