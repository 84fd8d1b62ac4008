"""How often the loops of attention turn whose number of turns the data decide."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.attention import blockwise, choose, online, prepare
from cope_jax.attention.products import scaled_products
from cope_jax.attention.strips import Blocks, Rules
from cope_jax.models.decoder import DecoderConfig
from cope_jax.typing import Array

LOOPS = ("near", "inside", "edge")
"""The names of the loops of `cope_jax.attention.online.over_blocks`, in the order in which they run."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Counting:
    """The state of a pass over the keys that counts its turns."""

    carry: Any
    turns: Array


def turns_of(counted: Mapping[str, float]) -> Callable[[str], float | None]:
    """What `loops.visits` asks for: the turns of a loop by its name in the source.

    >>> turns = turns_of({"near": 2.0})
    >>> turns("jit(train_steps)/while/body/near/while"), turns("jit(train_steps)/while")
    (2.0, None)
    """
    return lambda name: next(
        (counted[loop] for loop in LOOPS if loop in counted and re.search(rf"\b{loop}\b[^/]*/while[^/]*$", name)), None
    )


def count_turns(model: DecoderConfig, length: int) -> dict[str, float]:
    """The mean number of turns for a strip of queries, by the loop's name, of an untrained model.

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
    features = encoding.key_features(jnp.zeros((1, length, block.model_dim)), k_BMGK, k_BMGK)
    inputs = prepare(q_BLHK, k_BMGK, k_BMGK, encoding=encoding, features=features, causal=True)
    is_sum = blockwise.running_sums(encoding, inputs)
    chosen = block.attention_blocks
    blocks = (Blocks(*chosen) if chosen else blockwise.choose_blocks(length, length)).within(length, length)
    if is_sum is None or blocks.near == length:
        return {}
    graph, params = nnx.split(encoding)
    rules = Rules(graph, blocks, True, None, is_sum)
    queries, keys = blockwise.queries_of(inputs, -length % blocks.queries), blockwise.keys_of(inputs)

    def strip(number: Array) -> Array:
        own = queries.strip(number, blocks.queries)
        state = _Counting(rules.initial_carry(params, own.q), jnp.zeros(len(LOOPS), jnp.int32))
        settles = rules.encoding(params).settled(state.carry) is not None
        traced = iter(range(len(LOOPS)))

        def step(end: Array, state: _Counting, *, size: int, masked: bool, settled: bool) -> _Counting:
            carry = state.carry
            if settles and not settled:
                part = keys.block(end, size)
                mask = rules.block_mask(own, part, masked)
                logits = scaled_products(own.rotated_q, part.k)
                _, carry = rules.hook("score", own, part)(
                    params, own.q, part.k, part.features, logits, mask, state.carry
                )
            return _Counting(carry, state.turns.at[next(traced)].add(1))

        return online.over_blocks(rules, params, own, keys, state, step).turns

    numbers = jnp.arange(queries.q.shape[2] // blocks.queries, dtype=jnp.int32)
    counted = np.asarray(jax.jit(lambda: jax.lax.map(strip, numbers))())
    return dict(zip(LOOPS, counted.mean(axis=0).tolist(), strict=True))
