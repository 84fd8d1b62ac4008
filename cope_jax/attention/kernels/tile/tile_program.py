"""Turns a traced function of one tile into a program on two axes, rows and columns, which a kernel
can run.

The hooks of an encoding compute arrays such as `[B, H, L, M]`. On one tile of one head B = H = 1,
so at most two axes are longer than 1. Here each array becomes `[rows, columns]`, and axes of size 1
disappear: reshapes, broadcasts and transposes of such axes cost nothing, and a row's own numbers
always lie along the rows. This is what a TPU runs fast; and what its compiler can lower at all.

`TileProgram` traces a function, and translates its operations one by one. An operation that it
cannot translate raises `NotATile`, with the reason.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from cope_jax.array_types import Array, PyTree
from cope_jax.attention.kernels.tile.tile_operations import (
    ELEMENTWISE,
    REDUCTIONS,
    TRANSLATIONS,
    Forms,
    aval_of,
    elementwise,
    entry,
    operation,
    reduce,
)
from cope_jax.attention.kernels.tile.tile_values import (
    NotATile,
    Spec,
    Tile,
    is_constant,
    natural,
    whole,
)
from cope_jax.ops import tile

INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}
IDENTITIES = frozenset(("copy", "copy_p", "optimization_barrier", "reshard", "stop_gradient"))


class TileProgram:
    """A function of tiles, translated to two axes.

    Args:
      forms: the implementation of each primitive of `cope_jax.ops.tile` on arrays
        `[rows, columns]`.
      function: called with the arguments as arrays of their `Spec.shape`.
      args: a tuple of trees of `Spec`, one for each argument.
      results: a tree of `Spec` like the result, which says how the results lie.

    Attributes:
      constants: the arrays that the function closes over, each `[rows, columns]`.
      used: for each leaf of the arguments, whether the result depends on it.
      results: the `Spec` of each leaf of the result; None for a leaf that is always 0.
      sizes: size and type of each constant, and of each argument that is used.
      two_axes: the traced program on these, which gives the results that are not 0.
      text: the traced program without its constants, to compare programs.

    Raises:
      NotATile: see the module.
    """

    def __init__(self, forms: Forms, function: Callable[..., Any], args: PyTree, results: PyTree):
        leaves, tree = jax.tree.flatten(args, is_leaf=_is_spec)
        self._args: Any = tree
        self._forms = forms
        structure: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            result, tree = jax.tree.flatten(function(*jax.tree.unflatten(self._args, values)))
            structure.append(tree)
            return result

        with tile.tracing():
            closed = jax.make_jaxpr(flat)(
                *(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in leaves)
            )
        self._jaxpr, self.text = closed.jaxpr, str(closed.jaxpr)
        live = needed(self._jaxpr)
        self.used = tuple(var in live for var in self._jaxpr.invars)
        self._given = [
            (var, spec) for var, spec in zip(self._jaxpr.invars, leaves, strict=True) if var in live
        ]
        consts = [
            (var, x)
            for var, x in zip(self._jaxpr.constvars, closed.consts, strict=True)
            if var in live
        ]
        self._hoisted = [(var, natural(np.shape(x), x.dtype)) for var, x in consts]
        self.constants = [
            np.asarray(x).reshape(spec.size)
            for (_, x), (_, spec) in zip(consts, self._hoisted, strict=True)
        ]
        wanted, nonzero = structure[-1].flatten_up_to(results), list[bool]()

        def run(*arrays: Any) -> list[Array]:
            tiles = self._run(arrays)
            nonzero[:] = [not is_constant(x, 0) for x in tiles]
            computed = zip(tiles, wanted, nonzero, strict=True)
            return [whole(x, spec.axes) for x, spec, use in computed if use]

        self.sizes = [(spec.size, spec.dtype) for _, spec in (*self._hoisted, *self._given)]
        self.two_axes = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*size) for size in self.sizes))
        self.results = [spec if use else None for spec, use in zip(wanted, nonzero, strict=True)]

    def __call__(self, constants: Sequence[Array], args: PyTree) -> list[Array | None]:
        """Runs the program on arrays `[rows, columns]`. Returns the leaves of the result, None
        where always 0.

        Args:
          constants: the values of `constants`.
          args: the arguments; a leaf that is not used may be anything but None.
        """
        leaves = self._args.flatten_up_to(args)
        given = [leaf for leaf, use in zip(leaves, self.used, strict=True) if use]
        tiles = zip(self._run([*constants, *given]), self.results, strict=True)
        return [None if spec is None else whole(x, spec.axes) for x, spec in tiles]

    def _run(self, arrays: Sequence[Any]) -> list[Tile]:
        known = (*self._hoisted, *self._given)
        env = {
            var: Tile(x, spec.shape, spec.axes)
            for (var, spec), x in zip(known, arrays, strict=True)
        }
        return _evaluate(self._jaxpr, env, self._forms)


def _is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def needed(jaxpr: Jaxpr) -> set[Var]:
    """The variables that the results depend on."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(var in needed for var in eqn.outvars):
            needed |= {var for var in eqn.invars if not isinstance(var, Literal)}
    return needed


def _evaluate(jaxpr: Jaxpr, env: dict[Var, Tile], forms: Forms) -> list[Tile]:
    live = needed(jaxpr)

    def read(var: Any) -> Tile:
        if not isinstance(var, Literal):
            return env[var]
        aval = aval_of(var)
        return Tile(np.asarray(var.val, aval.dtype), aval.shape, (None, None))

    for eqn in jaxpr.eqns:
        if any(var in live for var in eqn.outvars):
            results = _apply(eqn, [read(var) for var in eqn.invars], forms)
            env.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _apply(eqn: JaxprEqn, tiles: list[Tile], forms: Forms) -> list[Tile]:
    """Translates one operation."""
    name, params, shape = eqn.primitive.name, eqn.params, aval_of(eqn.outvars[0]).shape
    if name in INLINED:
        inner = params[INLINED[name]]
        known = zip(
            (*inner.jaxpr.constvars, *inner.jaxpr.invars),
            (*map(_constant, inner.consts), *tiles),
            strict=True,
        )
        return _evaluate(inner.jaxpr, dict(known), forms)
    if name in ELEMENTWISE:
        return elementwise(eqn, tiles)
    if name in IDENTITIES:
        return tiles
    if name in REDUCTIONS:
        return [reduce(name, tiles[0], params["axes"])]
    if eqn.primitive in tile.PRIMITIVES:
        return operation(eqn, tiles, forms)
    if name == "unstack":
        return [entry(tiles[0], params["axis"], n) for n in range(tiles[0].shape[params["axis"]])]
    if name in TRANSLATIONS:
        return [TRANSLATIONS[name](shape, tiles, **params)]
    instead = ", only the sums of cope_jax.ops.sums" if name == "cumsum" else ""
    raise NotATile(f"a kernel has no {name}{instead}")


def _constant(x: Any) -> Tile:
    if np.ndim(x):
        raise NotATile("a nested function closes over an array")
    return Tile(np.asarray(x), (), (None, None))
