"""Attention over a sequence that is split over the devices of a mesh axis: queries stay, keys and values go around.

Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889); with a zigzag schedule, see
`ring_schedule`, so that causal work is even and keys come from the nearest to the farthest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array, PyTree
from cope_jax.attention import streaming_gradient, streaming_softmax
from cope_jax.attention.blockwise import RESIDUALS, SIZES
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.ring_schedule import Ring
from cope_jax.attention.streaming_gradient import Gradients, KeyGradients, Residuals
from cope_jax.attention.tiles import (
    BlockSizes,
    KeyBlock,
    QueryBlock,
    StreamSpec,
    along_sequence,
    cotangent,
    needs_one_block,
    pad_by,
)
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.ops.dropout import Dropout

T = TypeVar("T")


def ring_attention(encoding: Encoding, inputs: Inputs, axis: str, blocks: BlockSizes = SIZES) -> Array:
    """The same as `full_attention`, with the sequence split over the devices of a mesh axis.

    The mesh is that of `jax.set_mesh`. Arrays come and go in their natural order, and are best split over the axis
    already: no device ever holds more than its share of the keys. Other axes of the mesh are left to XLA.

    Args:
      encoding: the position encoding.
      inputs: from `prepare`.
      axis: the mesh axis.
      blocks: sizes, within a chunk.

    Returns:
      out_BLHK, in the type of the values.

    Raises:
      ConfigError: no mesh with this axis; not as many queries as keys; an encoding that does not split the keys, or has
        a carry of other than sums; or one with sums where there is no causality, which makes the ring's order that of
        the sums.
    """
    ring = Ring.of(axis)
    length, keys = inputs.q.shape[2], inputs.v.shape[2]
    if length != keys:
        raise ConfigError(f"ring attention takes as many queries as keys, got {length} and {keys}")
    if needs_one_block(encoding, inputs):
        raise ConfigError("ring attention splits the keys, which this encoding does not: choose 'full' or 'blockwise'")
    carry = jax.eval_shape(encoding.initial_carry, inputs.q, inputs.q_features)
    if jax.tree.leaves(carry.sums) and not inputs.mask.causal:
        raise ConfigError("ring attention with an encoding that sums over keys, as cope does, must be causal")
    graph, params = nnx.split(encoding)
    params = jax.tree.map(jnp.asarray, params)
    per_chunk = -(-length // (ring.chunks * blocks.queries))
    size = -(-length // (ring.chunks * per_chunk))
    spec = StreamSpec(graph, blocks.within(size, per_chunk * size), inputs.mask.causal, inputs.mask.window)
    return _attend(ring, spec, per_chunk, params, QueryBlock.of(inputs, 0), KeyBlock.of(inputs), inputs.drop)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # a partly manual program must be compiled, not run op by op
def _attend(
    ring: Ring,
    spec: StreamSpec,
    per_chunk: int,
    params: PyTree,
    queries: QueryBlock,
    keys: KeyBlock,
    drop: Dropout | None,
) -> Array:
    length = queries.q.shape[2]
    padding = ring.chunks * per_chunk * spec.sizes.queries - length
    if length % ring.devices:
        queries, keys = along_sequence(ring.whole, queries), along_sequence(ring.whole, keys)
    if padding:
        indices = jnp.pad(keys.indices, (0, padding), constant_values=-1)
        queries = along_sequence(pad_by(padding), queries)
        keys = dataclasses.replace(along_sequence(pad_by(padding), keys), indices=indices)
    queries = along_sequence(_cut((ring.chunks, per_chunk)), queries)
    keys = along_sequence(_cut((ring.chunks,)), keys)
    queries, keys = ring.sharded(ring.placed, (True,), True)((queries, keys))
    out = ring.sharded(ring.unplaced, (True,), True)(_attend_placed(ring, spec, params, queries, keys, drop))
    out_BLHK = jnp.transpose(out, (2, 0, 1, 4, 3, 5)).reshape(out.shape[2], -1, *out.shape[3::2])[:, :length]
    return ring.whole(out_BLHK, 1) if length % ring.devices else out_BLHK


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_placed(
    ring: Ring, spec: StreamSpec, params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None
) -> Array:
    """out, [chunks, blocks, B, H, L, K], of queries [chunks, blocks, ...] and keys [chunks, ...]."""
    return _once_around(ring, spec, params, queries, keys, drop, gradient=False)[0]


def _once_around(
    ring: Ring,
    spec: StreamSpec,
    params: PyTree,
    queries: QueryBlock,
    keys: KeyBlock,
    drop: Dropout | None,
    gradient: bool,
) -> tuple[Array, Array, tuple[Array, ...]]:
    def on_device(params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None) -> Any:
        def start(own: QueryBlock) -> streaming_softmax.State:
            return streaming_softmax.start(spec, params, own, keys.v.shape[-1], gradient)

        def see(chunk: Any) -> streaming_softmax.State:
            queries, keys, states = chunk

            def block(item: Any) -> streaming_softmax.State:
                own, state = item
                return streaming_softmax.accumulate(spec, params, own, keys, state, drop)

            return jax.lax.map(block, (queries, states))

        def step(loop: Any, _: None) -> Any:
            keys, states = loop
            return (ring.moved(keys), jax.lax.map(see, (queries, keys, states))), None

        def finish(item: Any) -> Any:
            own, state = item
            return streaming_softmax.finish(spec, params, own, state, keys.v.dtype)

        loop = (keys, _map_blocks(start, queries))
        (_, states), _ = jax.lax.scan(step, loop, length=ring.chunks)
        return _map_blocks(finish, (queries, states))

    return ring.sharded(on_device, (False, True, True, False), True)(params, queries, keys, drop)


def _forward(
    ring: Ring, spec: StreamSpec, params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None
) -> tuple[Array, Any]:
    result = _once_around(ring, spec, params, queries, keys, drop, gradient=True)
    out, logsumexp, dout_dcarry = checkpoint_name(result, RESIDUALS)
    return out, (params, queries, keys, drop, out, logsumexp, dout_dcarry)


def _backward(ring: Ring, spec: StreamSpec, kept: Any, dout: Array) -> tuple[PyTree, QueryBlock, KeyBlock, None]:
    params, queries, keys, drop, *result = kept
    none: Any = None

    def on_device(params: PyTree, queries: QueryBlock, keys: KeyBlock, drop: Dropout | None, result: Any) -> Any:
        residuals = Residuals.of(*result)

        def start(item: Any) -> Gradients:
            own, residuals = item
            return _alone(streaming_gradient.start(spec, params, own, residuals, none))

        def see(dparams: PyTree, chunk: Any) -> Any:
            queries, keys, residuals, states = chunk

            def block(gathered: Any, item: Any) -> Any:
                own, residuals, state = item
                state = dataclasses.replace(state, params=gathered[0], keys=gathered[1])
                state = streaming_gradient.backward(spec, params, own, keys, residuals, state, drop)
                return (state.params, state.keys), _alone(state)

            gathered = (dparams, KeyGradients.zeros(keys))
            (dparams, dkeys), states = jax.lax.scan(block, gathered, (queries, residuals, states))
            return dparams, (dkeys, states)

        def step(loop: Any, _: None) -> Any:
            keys, dkeys, dparams, states = loop
            # Gradients of keys travel while those of the next chunk are made, and are added afterwards.
            arriving = ring.moved(dkeys)
            dparams, (own, states) = jax.lax.scan(see, dparams, (queries, keys, residuals, states))
            return (ring.moved(keys), jax.tree.map(jnp.add, arriving, own), dparams, states), None

        def finish(dparams: PyTree, item: Any) -> Any:
            own, residuals, state = item
            state = dataclasses.replace(state, params=dparams)
            dparams, dqueries = streaming_gradient.finish(spec, params, own, residuals, state)
            return dparams, dqueries.of(own)

        loop = (
            keys,
            jax.vmap(KeyGradients.zeros)(keys),
            jax.tree.map(jnp.zeros_like, params),
            _map_blocks(start, (queries, residuals)),
        )
        (keys, dkeys, dparams, states), _ = jax.lax.scan(step, loop, length=ring.chunks)
        dparams, dqueries = jax.lax.scan(functools.partial(jax.lax.scan, finish), dparams, (queries, residuals, states))
        return jax.lax.psum(dparams, ring.axis), dqueries, jax.vmap(KeyGradients.of)(ring.moved(dkeys), keys)

    sharded = ring.sharded(on_device, (False, True, True, False, True), (False, True, True))
    dparams, dqueries, dkeys = sharded(params, queries, keys, drop, (dout, *result))
    return cotangent(dparams), dqueries, dkeys, None


_attend_placed.defvjp(_forward, _backward)


def _alone(state: Gradients) -> Gradients:
    """What the state of one block of queries has for itself; the rest is handed from block to block."""
    none: Any = None
    return dataclasses.replace(state, params=none, keys=none)


def _map_blocks(function: Callable[[Any], T], tree: PyTree) -> T:
    return jax.lax.map(functools.partial(jax.lax.map, function), tree)


def _cut(pieces: tuple[int, ...]) -> Callable[[Array, int], Array]:
    """[..., pieces·L, ...] as [*pieces, ..., L, ...]."""

    def cut(x: Array, axis: int) -> Array:
        x = x.reshape(*x.shape[:axis], *pieces, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, range(axis, axis + len(pieces)), range(len(pieces)))

    return cut
