import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend
from cope_jax.encodings import EncodingConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import Layout
from cope_jax.models.decoder import DecoderConfig
from tools.compile_check.hlo import Module
from tools.compile_check.trip_counts import LOOPS, count_turns, turns_of, walk

LENGTH = 512


def decoder(encoding="rope", **options):
    names = {"attention", "attention_blocks"} & options.keys()
    block = BlockConfig(model_dim=32, num_heads=2, **{name: options.pop(name) for name in names})
    sizes = {"vocab_size": 8, "max_length": LENGTH, "num_layers": 1, "block": block}
    return DecoderConfig(**sizes, encoding=EncodingConfig.parse(encoding), **options)


def test_an_encoding_that_never_settles_goes_over_every_block_that_causality_leaves():
    # Eight strips of 64 queries over blocks of 128 keys, aligned with the strip's end.
    turns = count_turns(decoder(), LENGTH)
    assert list(turns) == list(LOOPS)
    assert sum(turns.values()) == np.mean([-(-64 * (strip + 1) // 128) for strip in range(8)])


def test_larger_blocks_make_fewer_turns():
    # Four strips of 128 queries over blocks of 256.
    turns = count_turns(decoder(attention_blocks=(128, 256, 256)), LENGTH)
    assert sum(turns.values()) == np.mean([1, 1, 2, 2])


@pytest.mark.slow
def test_an_encoding_that_settles_early_leaves_the_near_loop_early():
    near = [count_turns(decoder(f"cope(npos_max={n})"), LENGTH)["diagonal"] for n in (8, 400)]
    # About half of the gates are open: the larger table never settles in 8 strips of 64 queries.
    assert near[0] < near[1] == np.mean([1, 1, 2, 2, 3, 3, 4, 4])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention": "full"}, marks=pytest.mark.slow),
        pytest.param({"attention_blocks": (64, LENGTH, 64)}, marks=pytest.mark.slow),
        {"layout": Layout(length="sequence")},
    ],
)
def test_where_there_are_no_such_loops_none_is_counted(options):
    assert count_turns(decoder(**options), LENGTH) == {}
    assert count_turns(decoder(), 128) == {}  # one block


def test_the_turns_are_those_of_the_loops_in_the_program():
    turns = turns_of(dict.fromkeys(LOOPS, 1.5))
    encoding = encodings.create("cope", num_heads=1, head_dim=8, npos_max=8, rngs=nnx.Rngs(0))
    attention = functools.partial(attend, encoding=encoding, implementation="blockwise")
    q = jax.ShapeDtypeStruct((1, LENGTH, 1, 8), jnp.float32)
    module = Module.parse(jax.jit(attention).lower(q, q, q).compile().as_text())
    for turns_of_loop, unknown in ((lambda name: None, 3), (turns, 0)):
        assert sum(visit.unknown for visit in walk(module, turns_of_loop)) == unknown
