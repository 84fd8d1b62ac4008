"""Flash attention for every encoding by tile programs: one kernel forward, and one backward.

A program of the kernel has one block of queries of one head, and visits the keys block by block
from the nearest to the farthest, as in `streaming_softmax`. On each block it runs the same
functions, `add_block` and `block_gradients`, translated to a tile (see `tile_program`). So the
encoding's own hooks are the kernel's program. Dao, "FlashAttention-2" (arXiv 2307.08691).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import streaming_gradient, streaming_softmax
from cope_jax.attention.blocks import KeyBlock
from cope_jax.attention.kernels.tile.tile_arguments import (
    Argument,
    is_argument,
    key_columns,
    rows,
    sequence,
)
from cope_jax.attention.kernels.tile.tile_kernel import Half, TileKernel
from cope_jax.attention.kernels.tile.tile_plan import Execution, Heads, TilePlan
from cope_jax.attention.stream import Stream
from cope_jax.attention.streaming_gradient import Gradients, KeyGradients, QueryGradients, Residuals
from cope_jax.attention.streaming_softmax import State
from cope_jax.encodings import Carry

T = TypeVar("T")


def forward_kernel(
    stream: Stream,
    state: State,
    *,
    first: bool,
    execution: Execution,
    halves: Callable[..., tuple[Half, ...]] = lambda *_: (),
) -> TileKernel:
    """The kernel that adds the stream's keys to the state.

    Args:
      stream: all queries, and the keys that a kernel sees at a time.
      state: the state after all nearer keys.
      first: whether there are no nearer keys, so that the kernel need not read the state.
      execution: how the kernel runs.
      halves: called with (plan, loop, constants of the carry), returns the halves of the kernel.
    """
    plan, size = TilePlan(stream, execution), stream.sizes.queries

    def add(
        masked: bool, saturated: bool, graph: Any, params: Any, queries: Any, keys: Any, *rest: Any
    ) -> Any:
        drop, constants, state = rest
        tile = plan.tile(graph, params, queries, keys, drop)
        state = with_constants(state, constants)
        state = streaming_softmax.add_block(tile, keys, state, masked=masked, saturated=saturated)
        return with_constants(state, ()), (), ()

    def carry(args: Any, state: State) -> Carry:
        return state.carry._replace(constants=args[4])

    args, loop = (
        (*plan.data, rows(state.carry.constants, size)),
        rows(with_constants(state, ()), size, by_token=True),
    )
    if first:
        zeros = jax.tree.map(lambda x: dataclasses.replace(x, fill=0.0), loop, is_leaf=is_argument)
        lowest = float(jnp.finfo(state.row_max.dtype).min)
        row_max = dataclasses.replace(loop.row_max, fill=lowest)
        loop = dataclasses.replace(zeros, carry=loop.carry, row_max=row_max)
    return TileKernel(plan, add, args, loop, (), (), carry, halves(plan, loop, args[4]))


def accumulate(stream: Stream, state: State, execution: Execution, *, first: bool = False) -> State:
    """Computes `streaming_softmax.accumulate` for all blocks of queries.

    Args:
      stream: all queries; keys in whole parts of `execution.keys`.
      state: the state after all nearer keys.
      execution: how the kernels run.
      first: whether there are no nearer keys.
    """
    unread = first and stream.keys.k.shape[2] == execution.keys

    def add(state: State, keys: KeyBlock, _: Array) -> State:
        kernel = forward_kernel(
            stream.part(stream.queries, keys), state, first=unread, execution=execution
        )
        new, _, _ = execution.run(kernel, "attention")
        new = jax.tree.map(lambda x, old: x.reshape(old.shape), new, with_constants(state, ()))
        return with_constants(new, state.carry.constants)

    return _over_parts(stream, execution, add, state)


def backward(
    stream: Stream, residuals: Residuals, state: Gradients, execution: Execution
) -> Gradients:
    """Computes `streaming_gradient.backward` for all blocks of queries; the arguments are as in
    `accumulate`.
    """

    def add(state: Gradients, keys: KeyBlock, end: Array) -> Gradients:
        resident = stream.part(stream.queries, keys)
        return state.add(end, _gradients(resident, residuals, state.carry, state.dsums, execution))

    return _over_parts(stream, execution, add, state)


def _over_parts(
    stream: Stream, execution: Execution, add: Callable[[T, KeyBlock, Array], T], state: T
) -> T:
    """Calls `add(state, keys, end)` for each part of the keys that a kernel sees at a time, from
    near to far.
    """
    keys = stream.keys.k.shape[2]
    if keys == execution.keys:
        return add(state, stream.keys, jnp.asarray(keys, jnp.int32))

    def step(state: T, end: Array) -> tuple[T, None]:
        return add(state, stream.keys.block(end, execution.keys), end), None

    return jax.lax.scan(step, state, jnp.arange(keys, 0, -execution.keys, dtype=jnp.int32))[0]


def backward_kernel(
    stream: Stream,
    residuals: Residuals,
    carry: Carry,
    dsums: tuple[Array, ...],
    execution: Execution,
    halves: Callable[..., tuple[Half, ...]] = lambda *_: (),
) -> TileKernel:
    """The kernel that computes what the stream's keys contribute to the gradients.

    `halves` is called with (plan, what the function reads, loop, totals).
    """
    plan, size, near = TilePlan(stream, execution), stream.sizes.queries, stream.sizes.near
    queries, keys = stream.queries, stream.keys

    def of(sums: PyTree, constants: PyTree) -> Carry:
        # There is no `state`, see `needs_one_block`.
        return carry._replace(sums=sums, constants=constants)

    def gradients(
        masked: bool, saturated: bool, graph: Any, params: Any, queries: Any, keys: Any, *rest: Any
    ) -> Any:
        drop, constants, residuals, (sums, dsums) = rest
        tile = plan.tile(graph, params, queries, keys, drop)
        block = streaming_gradient.block_gradients(
            tile, residuals, keys, of(sums, constants), dsums, masked=masked, saturated=saturated
        )
        return (
            (block.carry.sums, block.dsums),
            (block.drest.constants, block.queries, block.params),
            block.keys,
        )

    def wide(x: Any) -> Any:
        """Gradients are in the accumulator type, and those of features are by query head."""
        return jax.ShapeDtypeStruct(
            (plan.batch, plan.heads, *x.shape[2:]), accumulator_dtype(queries.q.dtype)
        )

    def of_query(x: Any) -> Argument:
        return sequence(wide(x), 2, size, "query", by_token=True).read_as(x.dtype)

    q, rotated_q = jax.tree.map(of_query, (queries.q, queries.rotated_q))
    features = rows(jax.tree.map(wide, queries.features), size, by_token=True)
    of_queries = QueryGradients(q, rotated_q, None, features)
    params = jax.tree.map(lambda x: x.blank(plan.batch), plan.params, is_leaf=is_argument)
    features = jax.tree.map(
        lambda x: sequence(wide(x), 2, near, "key", by_token=True), keys.features
    )
    of_keys: Any = key_columns(keys.k, near), key_columns(keys.v, near)
    on_keys = KeyGradients(of_keys[0], of_keys[1], features)
    args, loop = (
        (*plan.data, rows(carry.constants, size), rows(residuals, size, by_token=True)),
        rows((carry.sums, dsums), size),
    )
    dconstants = rows(carry.constants, size)
    totals = dconstants, of_queries, params
    parts = halves(plan, args, loop, totals)
    return TileKernel(
        plan,
        gradients,
        args,
        loop,
        totals,
        on_keys,
        lambda args, loop: of(loop[0], args[4]),
        parts,
    )


def _gradients(
    stream: Stream,
    residuals: Residuals,
    carry: Carry,
    dsums: tuple[Array, ...],
    execution: Execution,
) -> Gradients:
    """Computes what `streaming_gradient.block_gradients` gives for all keys, for all blocks of
    queries.
    """
    kernel = backward_kernel(stream, residuals, carry, dsums, execution)
    (sums, dsums_after), (dconstants, dqueries, dparams), dkeys = execution.run(
        kernel, "attention_gradient"
    )
    new_carry = Carry(jax.tree.map(_like, sums, carry.sums), carry.constants, carry.state)
    drest = Carry((), jax.tree.map(_like, dconstants, carry.constants), carry.state)
    dsums = jax.tree.map(_like, dsums_after, dsums)
    dparams, own_queries, own_keys = of_caller(stream, dparams, dqueries, dkeys)
    return Gradients(new_carry, dsums, drest, own_queries, dparams, own_keys)


def _like(x: Any, old: Any) -> Any:
    return x.reshape(old.shape)


def of_caller(
    stream: Stream, dparams: PyTree, dqueries: QueryGradients, dkeys: KeyGradients
) -> tuple[PyTree, QueryGradients, KeyGradients]:
    """Returns the gradients in the shapes of the stream, from those of a kernel."""
    queries, keys = stream.queries, stream.keys

    def of_heads(x: Array, old: Array) -> Array:
        """The sum over the query heads that share a feature."""
        whole = x.reshape(x.shape[0], old.shape[1], -1, *old.shape[2:])
        return whole.sum(axis=2)

    def columns(x: Array, old: Array) -> Array:
        x = jnp.moveaxis(x, 2, 3) if x.shape[2] > 1 else x
        return x.reshape(*old.shape[:2], old.shape[3], old.shape[2])

    own_queries = QueryGradients(
        _like(dqueries.q, queries.q),
        jax.tree.map(_like, dqueries.rotated_q, queries.rotated_q),
        None if dqueries.v is None or queries.v is None else of_heads(dqueries.v, queries.v),
        jax.tree.map(of_heads, dqueries.features, queries.features),
    )
    features = jax.tree.map(of_heads, dkeys.features, keys.features)
    own_keys = KeyGradients(columns(dkeys.k, keys.k), columns(dkeys.v, keys.v), features)
    # From the parameters of each head to those of the encoding.
    by_head, pull = jax.vjp(lambda params: Heads.params(stream.graph, params), stream.params)
    (of_encoding,) = pull(
        jax.tree.map(lambda x, old: _like(x.sum(axis=0), old).astype(old.dtype), dparams, by_head)
    )
    return of_encoding, own_queries, own_keys


def with_constants(state: State, constants: PyTree) -> State:
    """The state with other constants in the encoding's carry."""
    return dataclasses.replace(state, carry=state.carry._replace(constants=constants))
