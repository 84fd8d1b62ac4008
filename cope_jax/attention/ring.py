"""Ring attention: each device holds a part of the sequence, and keys and values move around a ring
of devices.

Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889). Queries stay on their
device. A zigzag schedule (see `ring_schedule`) balances the work of causal attention, and keys
arrive from the nearest to the farthest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cope_jax.array_types import Array, PyTree
from cope_jax.attention import derivative, streaming_gradient, streaming_softmax
from cope_jax.attention.blocks import QueryBlock, along_sequence, pad_by
from cope_jax.attention.blockwise import COUPLED
from cope_jax.attention.derivative import RESIDUALS, Passes
from cope_jax.attention.request import Plan, Reason, Request
from cope_jax.attention.ring_chunk import ChunkAttention, chunk_attention
from cope_jax.attention.ring_schedule import Ring
from cope_jax.attention.stream import Stream, carry_of, needs_one_block, stream_of
from cope_jax.attention.streaming_gradient import Gradients, KeyGradients, Residuals
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError

T = TypeVar("T")


def plan(
    encoding: Encoding, request: Request, *, resident: int | None = None, interpret: bool = False
) -> Plan | Reason:
    """Returns the plan to compute the result of `full_attention` with the sequence split over the
    devices of an axis.

    The caller sets the mesh with `jax.set_mesh`. Tokens are in their natural order in inputs and
    outputs. Inputs should already be split over the axis. If the length is a multiple of the number
    of devices, no device then has more than its share of the keys. XLA handles the other axes of
    the mesh, except that of the heads in kernels.

    In a ring only causal attention visits all keys of a query from the nearest to the farthest, so
    a carry with sums needs causal attention.

    Args:
      encoding: the encoding.
      request: the request; its `blocks` are the sizes of blocks within a chunk (see
        `ring_schedule`).
      resident: how many keys are in fast memory at a time, if kernels for TPUs compute attention
        within a chunk.
      interpret: run these kernels on any backend, slowly.

    Raises:
      ConfigError: the mesh does not have the axis of the layout, or the options of kernels are
        given without kernels.
    """
    axis = request.layout.length
    if axis is None:
        raise ConfigError(
            "ring attention needs the axis of the mesh that splits the sequence: give sequence_axis"
        )
    ring = Ring.of(axis)
    if reason := _reason(encoding, request):
        return reason
    if not request.length:
        return Plan("ring", request.zeros)
    chunk, sizes = chunk_attention(encoding, request, ring, resident=resident, interpret=interpret)

    def run() -> Array:
        return _attend(ring, chunk, stream_of(encoding, request, sizes, one_block=False, padding=0))

    return Plan(chunk.name, run)


def _reason(encoding: Encoding, request: Request) -> Reason | None:
    """Returns why a ring cannot run the request; None if it can."""
    length, keys = request.length, len(request.keys.indices)
    if not encoding.traits.splits_queries:
        return COUPLED
    if length != keys:
        return Reason(
            f"it needs as many queries as keys, got {length} and {keys}",
            "choose 'full' or 'blockwise'",
        )
    if request.keys.given is not None:
        return Reason(
            "it takes no mask", "use causal, window and segment ids, or choose 'blockwise'"
        )
    if request.keys.bias is not None:
        return Reason("it takes no bias", "choose 'full' or 'blockwise'")
    if length and needs_one_block(encoding, request):
        return Reason(
            "it splits the keys, but this encoding cannot", "choose 'full' or 'blockwise'"
        )
    if length and not request.causal and jax.tree.leaves(carry_of(encoding, request).sums):
        return Reason(
            "it must be causal if the encoding sums over keys, as cope does", "set causal=True"
        )
    return None


# A partly manual program must be compiled, not run op by op.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(ring: Ring, attention: ChunkAttention, stream: Stream) -> Array:
    queries, keys = stream.queries, stream.keys
    passes = Passes(
        functools.partial(_once_around, ring, attention),
        functools.partial(_backward, ring, attention),
    )
    length = queries.q.shape[2]
    padding = ring.chunks * attention.pieces * attention.size - length
    if length % ring.devices:
        queries, keys = along_sequence(ring.whole, queries), along_sequence(ring.whole, keys)
    if padding:
        indices = jnp.pad(keys.indices, (0, padding), constant_values=-1)
        queries = along_sequence(pad_by(padding), queries)
        keys = dataclasses.replace(along_sequence(pad_by(padding), keys), indices=indices)
    queries = along_sequence(_cut((ring.chunks, attention.pieces)), queries)
    keys = along_sequence(_cut((ring.chunks,)), keys)
    placed = ring.sharded(Ring.placed, (True,), True)((queries, keys))
    out = ring.sharded(Ring.unplaced, (True,), True)(
        derivative.attend(passes, stream.part(*placed))
    )
    out_BLHK = jnp.transpose(out, (2, 0, 1, 4, 3, 5)).reshape(out.shape[2], -1, *out.shape[3::2])[
        :, :length
    ]
    return ring.whole(out_BLHK, 1) if length % ring.devices else out_BLHK


def _once_around(
    ring: Ring, attention: ChunkAttention, stream: Stream, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Computes the output [chunks, pieces, B, H, L, K] and residuals, for queries
    [chunks, pieces, ...] and keys [chunks, ...].
    """

    def on_device(here: Ring, stream: Stream) -> Any:
        def start(strip: QueryBlock) -> streaming_softmax.State:
            return streaming_softmax.start(stream.part(strip, stream.keys), gradient)

        def see(chunk: Any) -> streaming_softmax.State:
            queries, keys, states = chunk

            def block(item: Any) -> streaming_softmax.State:
                strip, state = item
                return attention.accumulate(stream.part(strip, keys), state)

            return jax.lax.map(block, (queries, states))

        def step(loop: Any, _: None) -> Any:
            keys, states = loop
            return (here.moved(keys), jax.lax.map(see, (stream.queries, keys, states))), None

        def finish(item: Any) -> Any:
            strip, state = item
            return streaming_softmax.finish(stream.part(strip, stream.keys), state)

        loop = (stream.keys, _map_blocks(start, stream.queries))
        (_, states), _ = jax.lax.scan(step, loop, length=ring.chunks)
        return _map_blocks(finish, (stream.queries, states))

    return checkpoint_name(ring.sharded(on_device, (_split(stream),), True)(stream), RESIDUALS)


def _backward(ring: Ring, attention: ChunkAttention, kept: Any, dout: Array) -> Any:
    stream, *result = kept
    none: Any = None

    def on_device(here: Ring, stream: Stream, result: Any) -> Any:
        residuals, queries = Residuals.of(*result), stream.queries

        def start(item: Any) -> Gradients:
            strip, residuals = item
            return _alone(
                streaming_gradient.start(stream.part(strip, stream.keys), residuals, none)
            )

        def see(dparams: PyTree, chunk: Any) -> Any:
            queries, keys, residuals, states = chunk

            def block(gathered: Any, item: Any) -> Any:
                strip, residuals, state = item
                state = dataclasses.replace(state, params=gathered[0], keys=gathered[1])
                state = attention.backward(stream.part(strip, keys), residuals, state)
                return (state.params, state.keys), _alone(state)

            gathered = (dparams, KeyGradients.zeros(keys))
            (dparams, dkeys), states = jax.lax.scan(block, gathered, (queries, residuals, states))
            return dparams, (dkeys, states)

        def step(loop: Any, _: None) -> Any:
            keys, dkeys, dparams, states = loop
            # Gradients of keys travel while those of the next chunk are computed, and are added
            # afterwards.
            arriving = here.moved(dkeys)
            dparams, (leaving, states) = jax.lax.scan(
                see, dparams, (queries, keys, residuals, states)
            )
            return (
                here.moved(keys),
                jax.tree.map(jnp.add, arriving, leaving),
                dparams,
                states,
            ), None

        def finish(dparams: PyTree, item: Any) -> Any:
            strip, residuals, state = item
            state = dataclasses.replace(state, params=dparams)
            dparams, dqueries = streaming_gradient.finish(
                stream.part(strip, stream.keys), residuals, state
            )
            return dparams, dqueries.of(strip)

        zeros = (
            jax.vmap(KeyGradients.zeros)(stream.keys),
            jax.tree.map(jnp.zeros_like, stream.params),
        )
        loop = (stream.keys, *zeros, _map_blocks(start, (queries, residuals)))
        (keys, dkeys, dparams, states), _ = jax.lax.scan(step, loop, length=ring.chunks)
        dparams, dqueries = jax.lax.scan(
            functools.partial(jax.lax.scan, finish), dparams, (queries, residuals, states)
        )
        return (
            jax.lax.psum(dparams, ring.axis),
            dqueries,
            jax.vmap(KeyGradients.of)(here.moved(dkeys), keys),
        )

    sharded = ring.sharded(on_device, (_split(stream), True), (False, True, True))
    return streaming_gradient.of(stream, *sharded(stream, (dout, *result)))


def _split(stream: Stream) -> Any:
    """Marks the parts of a stream that are split by chunks, in the form that `Ring.sharded`
    accepts.
    """
    kinds: Any = {"queries": True, "keys": True, "drop": False}
    unsplit: Any = False
    return dataclasses.replace(
        stream, params=unsplit, request=dataclasses.replace(stream.request, **kinds)
    )


def _alone(state: Gradients) -> Gradients:
    """Returns the part of the state that belongs to one block of queries, without what all blocks
    of queries share.
    """
    none: Any = None
    return dataclasses.replace(state, params=none, keys=none)


def _map_blocks(function: Callable[[Any], T], tree: PyTree) -> T:
    return jax.lax.map(functools.partial(jax.lax.map, function), tree)


def _cut(pieces: tuple[int, ...]) -> Callable[[Array, int], Array]:
    """Returns a function that reshapes [..., pieces·L, ...] to [*pieces, ..., L, ...]."""

    def cut(x: Array, axis: int) -> Array:
        x = x.reshape(*x.shape[:axis], *pieces, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, range(axis, axis + len(pieces)), range(len(pieces)))

    return cut
