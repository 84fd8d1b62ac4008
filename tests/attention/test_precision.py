"""The error of blockwise attention of float32 and bfloat16 inputs; positions, gates and sums are
float32 in both.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.attention import full_attention, prepare
from cope_jax.encodings import AttentionShape
from cope_jax.encodings.cope import CoPE, CoPEConfig
from cope_jax.ops.interpolate import interpolate
from cope_jax.ops.sums import suffix_sum
from tests.attention import problems
from tests.attention.test_generated import generated
from tests.attention.test_generated import native as native

NAMES = ("out", "dq", "dk", "dv", "dtable")


def one_head(length, npos_max, seed=0, width=16):
    """q, k, v, dout and the table."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in [(length, width)] * 4 + [(npos_max, width)]]


@functools.partial(jax.jit, static_argnames=("attention", "kind"))
def value_and_gradients(attention, kind, q, k, v, dout, table):
    """Output, dq, dk, dv and the table's gradient of one head."""

    def out(q, k, v, table):
        encoding = kind(
            CoPEConfig(npos_max=len(table)), AttentionShape(1, q.shape[-1]), rngs=nnx.Rngs(0)
        )
        encoding.table[...] = table
        return attention(
            encoding, prepare(*(a[None, :, None] for a in (q, k, v)), encoding=encoding)
        )[0, :, 0]

    value, pull = jax.vjp(out, q, k, v, table)
    return value, *pull(dout)


in_blocks = problems.in_blocks((64, 64, 128))


@pytest.fixture(params=[in_blocks, pytest.param(generated, marks=pytest.mark.slow)])
def attention(request):
    if request.param is generated:
        request.getfixturevalue("native")
    return request.param


def in_float64(arrays):
    with jax.enable_x64(True):
        return [
            np.asarray(a)
            for a in value_and_gradients(full_attention, CoPE, *(np.float64(a) for a in arrays))
        ]


def distance_to_the_integers(q, k, npos_max):
    """The least distance of a position to the next whole number; clipped ones have none to go to."""
    gates = np.tril(1 / (1 + np.exp(-(q @ k.T) / q.shape[-1] ** 0.5)))
    positions = np.cumsum(gates[:, ::-1], axis=1)[:, ::-1]
    counted = np.tril(positions < npos_max - 0.5).astype(bool)
    return np.abs(positions - np.round(positions))[counted].min()


def test_float32_is_exact_to_its_last_digits_away_from_the_integers(attention):
    """At an integer the slope jumps, and a rounded position may fall on the other side; here none
    does.
    """
    length, npos_max = 256, 16
    for seed in itertools.count():
        arrays = [a.astype(np.float32) for a in one_head(length, npos_max, seed)]
        if distance_to_the_integers(np.float64(arrays[0]), np.float64(arrays[1]), npos_max) > 2e-5:
            break
    computed = value_and_gradients(attention, CoPE, *arrays)
    for name, array, exact in zip(NAMES, computed, in_float64(arrays), strict=True):
        assert array.dtype == jnp.float32
        # The order of XLA's sums depends on the CPU: dq was off by 2e-5 on one kind, all by less
        # than 8e-6 on others.
        np.testing.assert_allclose(
            array, exact, rtol=0, atol=3e-5 * np.abs(exact).max(), err_msg=name
        )


class ShortCoPE(CoPE):
    """CoPE that counts in bfloat16: what `accumulator_dtype` is there to prevent."""

    def score(self, pairs, carry):
        nearer_BHL, z_BHLN = (leaf.astype(jnp.bfloat16) for leaf in (carry.sums, carry.constants))
        gates_BHLM = jnp.where(
            pairs.mask, jax.nn.sigmoid(pairs.logits.astype(jnp.bfloat16)), jnp.bfloat16(0)
        )
        counts_BHLM = nearer_BHL[..., None] + suffix_sum(gates_BHLM)
        added_BHLM = interpolate(
            z_BHLN, jnp.minimum(counts_BHLM, jnp.bfloat16(self.config.npos_max - 1))
        )
        counted = carry._replace(sums=counts_BHLM[..., 0].astype(jnp.float32))
        return pairs.logits + added_BHLM.astype(jnp.float32), counted


@pytest.mark.slow
@pytest.mark.newest
def test_bfloat16_inputs_keep_float32_positions(attention):
    """1024 keys, N = 64: all within half a percent of float64; with gates and counts in bfloat16 dq
    is lost.
    """
    *inputs, table = one_head(1024, 64)
    arrays = [*(jnp.asarray(a, jnp.bfloat16) for a in inputs), jnp.asarray(table, jnp.float32)]
    exact = in_float64(arrays)

    def off(attention, kind):
        """Relative errors of the root mean square."""
        computed = value_and_gradients(attention, kind, *arrays)
        assert [a.dtype for a in computed] == [jnp.bfloat16] * 4 + [jnp.float32]
        pairs = zip(NAMES, (np.asarray(a, np.float64) for a in computed), exact, strict=True)
        return {name: np.sqrt(np.mean((a - e) ** 2) / np.mean(e**2)) for name, a, e in pairs}

    assert max(off(attention, CoPE).values()) < 0.005
    if attention is in_blocks:
        assert off(attention, ShortCoPE)["dq"] > 0.5


def test_the_gradient_of_v_has_the_precision_of_v():
    """Though k is bfloat16. On a CPU without AVX-512, both are off by 5e-6 from float64; rounded to
    bfloat16 they would be by 4e-3.
    """
    q, k, v, dout, table = one_head(24, 8)
    q, k = jnp.bfloat16(q), jnp.bfloat16(k)
    v, dout, table = (jnp.float32(x) for x in (v, dout, table))
    exact = in_float64([q, k, v, dout, table])[3]
    for attention in (full_attention, in_blocks):
        computed = value_and_gradients(attention, CoPE, q, k, v, dout, table)[3]
        assert computed.dtype == jnp.float32
        np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-5)
