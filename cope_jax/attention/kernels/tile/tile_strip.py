"""Attention by kernels that also compute what happens once for a block of queries: the encoding's
initial carry before the first keys, the result after the last ones, and the derivative of both.

So no carry, and no gradient of a carry, exists for all queries at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import streaming_gradient, streaming_softmax
from cope_jax.attention.blocks import QueryBlock
from cope_jax.attention.kernels.tile.tile_arguments import rows
from cope_jax.attention.kernels.tile.tile_flash import (
    backward_kernel,
    forward_kernel,
    of_caller,
    with_constants,
)
from cope_jax.attention.kernels.tile.tile_kernel import Half
from cope_jax.attention.kernels.tile.tile_plan import Execution, TilePlan
from cope_jax.attention.stream import Stream
from cope_jax.attention.streaming_gradient import (
    Gradients,
    KeyGradients,
    QueryGradients,
    Residuals,
)

Result = tuple[Array, Array, tuple[Array, ...]]


def forward(stream: Stream, execution: Execution, *, gradient: bool) -> Result:
    """Computes `streaming_softmax.finish` for all blocks of queries; `gradient` is as in `start`."""
    shapes = jax.eval_shape(functools.partial(streaming_softmax.start, gradient=gradient), stream)
    result = jax.eval_shape(streaming_softmax.finish, stream, shapes)

    def halves(plan: TilePlan, loop: Any, constants: PyTree) -> tuple[Half, ...]:
        def end(graph: Any, params: PyTree, queries: QueryBlock, *rest: Any) -> Any:
            tile = plan.tile(graph, params, queries, stream.keys, None)
            return streaming_softmax.finish(tile, with_constants(*rest))

        queries = _with_values(plan)
        results = rows(result, plan.sizes.queries, by_token=True)
        return (
            Half(_begin(plan), (plan.params, plan.queries), (loop.carry.sums, constants)),
            Half(end, (plan.params, queries, loop, constants), results),
        )

    kernel = forward_kernel(stream, shapes, first=True, execution=execution, halves=halves)
    computed, _ = execution.run(kernel, "attention")
    return jax.tree.map(lambda x, like: x.reshape(like.shape), computed, result)


def backward(
    stream: Stream, result: Result, dout: Array, execution: Execution
) -> tuple[PyTree, QueryGradients, KeyGradients]:
    """Computes the gradients of the parameters, the queries and the keys.

    Args:
      stream: all queries and keys.
      result: of `forward`.
      dout: the cotangent of the output, `[B, H, L, K]`.
      execution: how the kernel runs.
    """
    size, v = stream.sizes.queries, stream.queries.v
    known = rows((dout, *result), size, by_token=True)
    shapes = jax.eval_shape(Residuals.of, dout, *result)
    residuals = dataclasses.replace(shapes, dout=dout, logsumexp=result[1])
    carry = jax.eval_shape(stream.initial_carry)
    wide: Any = None
    if v is not None:
        wide = jax.ShapeDtypeStruct(
            (*stream.queries.q.shape[:2], *v.shape[2:]), accumulator_dtype(v.dtype)
        )

    def halves(plan: TilePlan, args: Any, loop: Any, totals: Any) -> tuple[Half, ...]:
        def begin(graph: Any, params: PyTree, queries: QueryBlock, known: Any) -> Any:
            residuals = Residuals.of(*known)
            start = _begin(plan)(graph, params, queries)
            return start, (residuals.delta, residuals.dcarry), residuals.dcarry

        def end(graph: Any, params: PyTree, queries: QueryBlock, *rest: Any) -> Any:
            constants, residuals, (sums, dsums), dconstants = rest
            tile = plan.tile(graph, params, queries, stream.keys, None)
            keys: Any = None
            state = Gradients(
                carry._replace(sums=sums, constants=constants),
                dsums,
                carry._replace(sums=(), constants=dconstants),
                QueryGradients.zeros(queries, None),
                jax.tree.map(jnp.zeros_like, params),
                keys,
            )
            return streaming_gradient.finish(tile, residuals, state)

        constants, residuals = args[4:]
        dconstants, dqueries, dparams = totals
        begun = (loop[0], constants), (residuals.delta, residuals.dcarry), loop[1]
        dqueries = dataclasses.replace(dqueries, v=rows(wide, size, by_token=True))
        return (
            Half(begin, (plan.params, plan.queries, known), begun),
            Half(
                end,
                (plan.params, _with_values(plan), constants, residuals, loop, dconstants),
                (dparams, dqueries),
            ),
        )

    kernel = backward_kernel(stream, residuals, carry, shapes.dcarry, execution, halves)
    (dparams, dqueries), dkeys = execution.run(kernel, "attention_gradient")
    return of_caller(stream, dparams, dqueries, dkeys)


def _begin(plan: TilePlan) -> Any:
    """The function of a tile that computes the sums and the constants of the initial carry."""

    def begin(graph: Any, params: PyTree, queries: QueryBlock) -> Any:
        carry = plan.tile(graph, params, queries, plan.stream.keys, None).initial_carry()
        return carry.sums, carry.constants

    return begin


def _with_values(plan: TilePlan) -> QueryBlock:
    """The arguments for the queries, with the values that a sink may weigh."""
    v = rows(plan.stream.queries.v, plan.sizes.queries, by_token=True)
    return dataclasses.replace(plan.queries, v=v)
