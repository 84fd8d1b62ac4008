"""Blockwise attention never holds all pairs: read off its trace, and off what the compiler sets
aside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.attention import full_attention
from tests.attention import problems
from tests.attention.problems import arrays_of, plain, value_and_gradients
from tests.encodings.cases import FEWEST, build, every
from tests.ops.jaxprs import equations
from tests.oracle.encodings import Sizes

LENGTH = 256
# No other axis or product of axes is as long.
SIZES = Sizes(heads=4, kv_heads=2, head_dim=4, model_dim=8, max_length=LENGTH)


def quadratic(attention, spec, **static):
    """The shapes with two axes of the length that appear in the trace of value and gradients."""
    graphdef, state = build(spec, sizes=SIZES, dtype=np.float32)
    arrays = arrays_of(LENGTH, LENGTH, batch=1, sizes=SIZES, dtype=np.float32)

    def run(state, arrays):
        return value_and_gradients(
            attention, graphdef, state, arrays, plain(LENGTH, LENGTH, batch=1), **static
        )

    shapes = {
        out.aval.shape for equation in equations(run, state, arrays) for out in equation.outvars
    }
    assert (1, LENGTH, SIZES.heads, SIZES.head_dim) in shapes
    pairs = SIZES.heads * LENGTH**2
    return {
        shape for shape in shapes if sum(n >= LENGTH for n in shape) > 1 or np.prod(shape) >= pairs
    }


# Small, for what a TPU fuses has an axis of the table beside those of a block.
in_blocks = problems.in_blocks((16, 32, 64))


@every(few=FEWEST)
def test_no_array_of_all_pairs_in_the_trace(spec):
    sized = spec if "max_length" not in spec else f"learned(max_length={LENGTH})"
    assert not quadratic(in_blocks, sized)


@pytest.mark.parametrize(
    "static", [dict(causal=False), dict(window=100), dict(causal=False, window=100)]
)
def test_no_array_of_all_pairs_under_other_masks(static):
    assert not quadratic(in_blocks, "cope(npos_max=4)+rope", **static)
    assert quadratic(full_attention, "none", **static), "the test would not see one"


@pytest.mark.parametrize("spec", ["cope", pytest.param("rope", marks=pytest.mark.slow)])
def test_memory_grows_no_faster_than_the_length(spec):
    def temporaries(attention, length):
        sizes = Sizes(heads=2, kv_heads=1, head_dim=16, model_dim=4, max_length=length)
        graphdef, state = build(spec, sizes=sizes, dtype=np.float32)
        arrays = arrays_of(length, length, batch=1, sizes=sizes, dtype=np.float32)
        data = plain(length, length, batch=1)
        run = jax.jit(
            lambda state, arrays: value_and_gradients(attention, graphdef, state, arrays, data)
        )
        return (
            run.lower(state, jax.tree.map(jnp.asarray, arrays))
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    short, long = (temporaries(in_blocks, length) for length in (512, 1024))
    assert 0 < long < 2.2 * short
    assert temporaries(full_attention, 1024) > 10 * long
