"""Attention over a sequence that is split over the devices of a mesh axis: queries stay, keys and values go around.

Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889); folded, see `seats`, so that causal work is
even and keys come from the nearest to the farthest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from cope_jax.attention import online, online_gradient
from cope_jax.attention.blockwise import BLOCKS, OUTCOME, keys_of, queries_of, running_sums
from cope_jax.attention.inputs import Inputs
from cope_jax.attention.online_gradient import Gradients, KeyGradients, Outcome
from cope_jax.attention.seats import Ring
from cope_jax.attention.strips import Blocks, Keys, Queries, Rules, cotangent
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.ops.dropout import Dropout
from cope_jax.typing import Array, PyTree

T = TypeVar("T")


def ring_attention(encoding: Encoding, inputs: Inputs, axis: str, blocks: Blocks = BLOCKS) -> Array:
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
      ConfigError: no mesh with this axis; not as many queries as keys; an encoding whose carry is not made of running
        sums, or is, where there is no causality that would make the ring's order that of the sums.
    """
    ring = Ring.of(axis)
    length, keys = inputs.q.shape[1], inputs.v.shape[1]
    if length != keys:
        raise ConfigError(f"ring attention takes as many queries as keys, got {length} and {keys}")
    is_sum = running_sums(encoding, inputs)
    if is_sum is None:
        raise ConfigError("ring attention needs an encoding that knows its slopes: see Encoding.slopes")
    if any(is_sum) and not inputs.mask.causal:
        raise ConfigError("ring attention with an encoding that sums over keys, as cope does, must be causal")
    graph, params = nnx.split(encoding)
    params = jax.tree.map(jnp.asarray, params)
    strips = -(-length // (ring.seats * blocks.queries))
    size = -(-length // (ring.seats * strips))
    rules = Rules(graph, blocks.within(size, strips * size), inputs.mask.causal, inputs.mask.window, is_sum)
    return _attend(ring, rules, strips, params, queries_of(inputs, 0), keys_of(inputs), inputs.drop)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # a partly manual program must be compiled, not run op by op
def _attend(
    ring: Ring, rules: Rules, strips: int, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None
) -> Array:
    length = queries.q.shape[2]
    padding = ring.seats * strips * rules.blocks.queries - length
    if length % ring.devices:
        queries, keys = _along_queries(ring.whole, queries), _along_keys(ring.whole, keys)
    if padding:
        pad = functools.partial(_pad, padding=padding)
        places = jnp.pad(keys.places, (0, padding), constant_values=-1)
        queries, keys = _along_queries(pad, queries), dataclasses.replace(_along_keys(pad, keys), places=places)
    queries = _along_queries(functools.partial(_cut, pieces=(ring.seats, strips)), queries)
    keys = _along_keys(functools.partial(_cut, pieces=(ring.seats,)), keys)
    queries, keys = ring.sharded(ring.seated, (True,), True)((queries, keys))
    out = ring.sharded(ring.unseated, (True,), True)(_attend_seated(ring, rules, params, queries, keys, drop))
    out_BLHK = jnp.transpose(out, (2, 0, 1, 4, 3, 5)).reshape(out.shape[2], -1, *out.shape[3::2])[:, :length]
    return ring.whole(out_BLHK, 1) if length % ring.devices else out_BLHK


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend_seated(
    ring: Ring, rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None
) -> Array:
    """out, [seats, strips, B, H, L, K], of queries [seats, strips, ...] and keys [seats, ...]."""
    return _once_around(ring, rules, params, queries, keys, drop, gradient=False)[0]


def _once_around(
    ring: Ring, rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None, gradient: bool
) -> tuple[Array, Array, tuple[Array, ...]]:
    def on_device(params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None) -> Any:
        def start(own: Queries) -> online.State:
            return online.start(rules, params, own, keys.v.shape[-1], gradient)

        def see(seat: Any) -> online.State:
            queries, keys, states = seat

            def strip(item: Any) -> online.State:
                own, state = item
                return online.accumulate(rules, params, own, keys, state, drop)

            return jax.lax.map(strip, (queries, states))

        def step(loop: Any, _: None) -> Any:
            keys, states = loop
            return (ring.moved(keys), jax.lax.map(see, (queries, keys, states))), None

        loop = (keys, _map_strips(start, queries))
        (_, states), _ = jax.lax.scan(step, loop, length=ring.seats)
        return online.finish(states, keys.v.dtype)

    return ring.sharded(on_device, (False, True, True, False), True)(params, queries, keys, drop)


def _forward(
    ring: Ring, rules: Rules, params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None
) -> tuple[Array, Any]:
    outcome = _once_around(ring, rules, params, queries, keys, drop, gradient=True)
    out, logsumexp, sensitivities = checkpoint_name(outcome, OUTCOME)
    return out, (params, queries, keys, drop, out, logsumexp, sensitivities)


def _backward(ring: Ring, rules: Rules, residuals: Any, dout: Array) -> tuple[PyTree, Queries, Keys, None]:
    params, queries, keys, drop, *outcome = residuals
    none: Any = None  # integers have no cotangent

    def on_device(params: PyTree, queries: Queries, keys: Keys, drop: Dropout | None, outcome: Any) -> Any:
        outcomes = Outcome.of(*outcome)

        def start(item: Any) -> Gradients:
            own, outcome = item
            return _alone(online_gradient.start(rules, params, own, outcome, none))

        def see(dparams: PyTree, seat: Any) -> Any:
            queries, keys, outcomes, states = seat

            def strip(gathered: Any, item: Any) -> Any:
                own, outcome, state = item
                state = dataclasses.replace(state, params=gathered[0], keys=gathered[1])
                state = online_gradient.pull(rules, params, own, keys, outcome, state, drop)
                return (state.params, state.keys), _alone(state)

            gathered = (dparams, KeyGradients.zeros(keys))
            (dparams, dkeys), states = jax.lax.scan(strip, gathered, (queries, outcomes, states))
            return dparams, (dkeys, states)

        def step(loop: Any, _: None) -> Any:
            keys, dkeys, dparams, states = loop
            # Gradients of keys travel while those of the next seat are made, and are added afterwards.
            arriving = ring.moved(dkeys)
            dparams, (own, states) = jax.lax.scan(see, dparams, (queries, keys, outcomes, states))
            return (ring.moved(keys), jax.tree.map(jnp.add, arriving, own), dparams, states), None

        def finish(dparams: PyTree, item: Any) -> Any:
            own, outcome, state = item
            state = dataclasses.replace(state, params=dparams)
            dparams, dq = online_gradient.finish(rules, params, own, outcome, state)
            return dparams, (dq, state.rotated_q)

        loop = (
            keys,
            jax.vmap(KeyGradients.zeros)(keys),
            jax.tree.map(jnp.zeros_like, params),
            _map_strips(start, (queries, outcomes)),
        )
        (keys, dkeys, dparams, states), _ = jax.lax.scan(step, loop, length=ring.seats)
        dparams, (dq, drotated_q) = jax.lax.scan(
            functools.partial(jax.lax.scan, finish), dparams, (queries, outcomes, states)
        )
        dq, drotated_q = (d.astype(queries.q.dtype) for d in (dq, drotated_q))
        dqueries = dataclasses.replace(
            queries, q=dq, rotated_q=drotated_q, positions=none, places=none, segment_ids=none
        )
        dkeys = jax.vmap(KeyGradients.of)(ring.moved(dkeys), keys)
        return jax.lax.psum(dparams, ring.axis), dqueries, dkeys

    sharded = ring.sharded(on_device, (False, True, True, False, True), (False, True, True))
    dparams, dqueries, dkeys = sharded(params, queries, keys, drop, (dout, *outcome))
    return cotangent(dparams), dqueries, dkeys, None


_attend_seated.defvjp(_forward, _backward)


def _alone(state: Gradients) -> Gradients:
    """What the state of one strip has for itself; the rest is handed from strip to strip."""
    none: Any = None
    return dataclasses.replace(state, params=none, keys=none)


def _map_strips(function: Callable[[Any], T], tree: PyTree) -> T:
    return jax.lax.map(functools.partial(jax.lax.map, function), tree)


def _along_queries(change: Callable[[Array, int], Array], x: Queries) -> Queries:
    """Changes each array, given its axis of the sequence."""
    segment_ids = None if x.segment_ids is None else change(x.segment_ids, 1)
    return Queries(change(x.q, 2), change(x.rotated_q, 2), change(x.positions, 1), change(x.places, 0), segment_ids)


def _along_keys(change: Callable[[Array, int], Array], x: Keys) -> Keys:
    features = jax.tree.map(lambda feature: change(feature, 1), x.features)
    segment_ids = None if x.segment_ids is None else change(x.segment_ids, 1)
    return Keys(change(x.k, 2), change(x.v, 2), features, change(x.positions, 1), change(x.places, 0), segment_ids)


def _cut(x: Array, axis: int, pieces: tuple[int, ...]) -> Array:
    """[..., pieces·L, ...] as [*pieces, ..., L, ...]."""
    x = x.reshape(*x.shape[:axis], *pieces, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, range(axis, axis + len(pieces)), range(len(pieces)))


def _pad(x: Array, axis: int, padding: int) -> Array:
    return jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)], "edge")
