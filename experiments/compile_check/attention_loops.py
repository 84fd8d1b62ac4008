"""How often the loops of attention turn whose number of turns the data decide."""

import collections
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.attention import attend, choose
from cope_jax.models.decoder import DecoderConfig

LOOPS = ("diagonal", "interior", "boundary")
"""The names of the loops of `cope_jax.attention.streaming_softmax.over_blocks`, in the order in which they run."""


def turns_of(counted: Mapping[str, float]) -> Callable[[str], float | None]:
    """What `trip_counts.walk` asks for: the turns of a loop by its name in the source.

    >>> turns = turns_of({"diagonal": 2.0})
    >>> turns("jit(train_steps)/while/body/diagonal/while"), turns("jit(train_steps)/while")
    (2.0, None)
    """
    return lambda name: next(
        (turns for loop, turns in counted.items() if re.search(rf"\b{loop}\b[^/]*/while[^/]*$", name)), None
    )


def count_turns(model: DecoderConfig, length: int) -> dict[str, float]:
    """The mean number of turns for a block of queries, by the loop's name, of an untrained model.

    Attention is run on one example with normally distributed queries and keys, so about half of all gates are open. An
    encoding whose loops end by positions alone has exactly these turns with any data.

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
    options: Any = {"implementation": name, "features": features, "embedded": True, "blocks": block.attention_blocks}
    starts, turns = collections.Counter[int](), collections.Counter[int]()
    while_loop, numbers = jax.lax.while_loop, itertools.count()

    def counted(condition: Callable[[Any], Any], body: Callable[[Any], Any], state: Any) -> Any:
        number = next(numbers)

        def turn(state: Any) -> Any:
            jax.debug.callback(lambda: turns.update([number]))
            return body(state)

        jax.debug.callback(lambda: starts.update([number]))
        return while_loop(condition, turn, state)

    # The loops themselves are asked, for what decides their turns is the encoding's and attention's own matter.
    with mock.patch.object(jax.lax, "while_loop", counted):
        lowered = jax.jit(lambda: attend(q_BLHK, k_BMGK, k_BMGK, encoding=encoding, **options)).lower()
    if next(numbers) != len(LOOPS):
        return {}
    jax.block_until_ready(lowered.compile()())
    jax.effects_barrier()
    return {loop: turns[number] / starts[number] for number, loop in enumerate(LOOPS)}
