"""How often the loops of attention turn whose number of turns the data decide."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.attention import blockwise, choose, prepare, streaming_softmax
from cope_jax.attention.tiles import BlockSizes, KeyBlock, QueryBlock, StreamSpec, needs_one_block
from cope_jax.models.decoder import DecoderConfig
from cope_jax.typing import Array

LOOPS = ("diagonal", "interior", "boundary")
"""The names of the loops of `cope_jax.attention.streaming_softmax.over_blocks`, in the order in which they run."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Counting:
    """The state of a pass over the keys that counts its turns."""

    carry: Any
    turns: Array


def turns_of(counted: Mapping[str, float]) -> Callable[[str], float | None]:
    """What `loops.visits` asks for: the turns of a loop by its name in the source.

    >>> turns = turns_of({"diagonal": 2.0})
    >>> turns("jit(train_steps)/while/body/diagonal/while"), turns("jit(train_steps)/while")
    (2.0, None)
    """
    return lambda name: next(
        (counted[loop] for loop in LOOPS if loop in counted and re.search(rf"\b{loop}\b[^/]*/while[^/]*$", name)), None
    )


def count_turns(model: DecoderConfig, length: int) -> dict[str, float]:
    """The mean number of turns for a block of queries, by the loop's name, of an untrained model.

    Attention's own loops are run on one example with normally distributed queries and keys, so about half of all gates
    are open. An encoding whose loops end by positions alone has exactly these turns with any data.

    Returns:
      Empty where attention has no such loops, or is split along the sequence, where each device has loops of its own.
    """
    block = model.block
    shape = block.attention_shape(model.max_length)
    q_key, k_key, init_key = jax.random.split(jax.random.key(0), 3)
    q_BLHK = jax.random.normal(q_key, (1, length, shape.num_heads, shape.head_dim))
    k_BMGK = jax.random.normal(k_key, (1, length, shape.kv_heads, shape.head_dim))
    name = choose(q_BLHK, k_BMGK, model.layout.length) if block.attention == "auto" else block.attention
    if name != "blockwise":
        return {}
    encoding = model.encoding.build(shape, rngs=nnx.Rngs(init_key))
    features, _ = encoding.features(jnp.zeros((1, length, block.model_dim)), q_BLHK, k_BMGK, k_BMGK, None)
    inputs = prepare(q_BLHK, k_BMGK, k_BMGK, encoding=encoding, features=features, embedded=True, causal=True)
    chosen = block.attention_blocks
    sizes = (BlockSizes(*chosen) if chosen else blockwise.choose_sizes(length, length)).within(length, length)
    if needs_one_block(encoding, inputs) or sizes.near == length:
        return {}
    graph, params = nnx.split(encoding)
    spec = StreamSpec(graph, sizes, True, None)
    queries, keys = QueryBlock.of(inputs, -length % sizes.queries), KeyBlock.of(inputs)

    def one(number: Array) -> Array:
        own = queries.block(number, sizes.queries)
        state = _Counting(spec.initial_carry(params, own), jnp.zeros(len(LOOPS), jnp.int32))
        ends = encoding.saturated(state.carry) is not None or encoding.done(state.carry) is not None
        traced = iter(range(len(LOOPS)))

        def step(end: Array, state: _Counting, *, size: int, masked: bool, saturated: bool) -> _Counting:
            carry = state.carry
            if ends and not saturated:
                _, carry = spec.encoding(params).score(spec.pairs(own, keys.block(end, size), masked), carry)
            return _Counting(carry, state.turns.at[next(traced)].add(1))

        return streaming_softmax.over_blocks(spec, params, own, keys, state, step).turns

    numbers = jnp.arange(queries.q.shape[2] // sizes.queries, dtype=jnp.int32)
    counted = np.asarray(jax.jit(lambda: jax.lax.map(one, numbers))())
    return dict(zip(LOOPS, counted.mean(axis=0).tolist(), strict=True))
