"""Products on a CPU's matrix unit, or on loops in its place, say what full attention says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import full_attention, prepare
from cope_jax.attention.kernels.cpu import library
from cope_jax.encodings.base import Carry
from cope_jax.encodings.cope import CoPE
from tests.attention.test_fused import reason
from tests.attention.test_generated import ALL, FEW, LONG, SIZES, compare, generated, why_not
from tests.attention.test_generated import native as native
from tests.attention.test_generated import quickly as quickly
from tests.attention.test_generated import tiles as tiles
from tests.encodings.cases import every

pytestmark = pytest.mark.usefixtures("quickly")

# The gradients of some parameters are sums over all pairs that nearly cancel, of which rounding
# leaves little. Add an encoding if such a gradient, and nothing else, is off.
CANCELLING = ("fire",)
# Without those whose features are rounded too, which moves positions past whole numbers.
LOW = [s for s in ALL if reason(s) is None and "separate_key" not in s]


@every([LONG, *LOW], few=["alibi"])
def test_bfloat16_on_the_matrix_unit(spec, tiles):
    cancels = any(name in spec for name in CANCELLING)
    least = 0.1 if spec in (LONG, *LOW) and not cancels else 20.0
    # Whole tiles, parts of them, and one head, of which all tokens are neighbours.
    shapes = ((4, 32), (4, 40), (1, 32)) if spec == "alibi" else ((4, 16),)
    for heads, width in shapes:
        sizes = SIZES._replace(heads=heads, kv_heads=min(heads, 2), head_dim=width)
        compare(spec, 150, 150, sizes=sizes, dtype=jnp.bfloat16, atol=0.02, least=least)
    assert all("tile_product<1, 1>" in text and "(const uint16_t*)p" in text for text in tiles)
    assert any("product<1, 2>" in text for text in tiles) or spec != LONG
    narrow = [re.findall(r"\{(\w+), (\w+), [^{}]* true\}, \d+, ", text) for text in tiles]
    gradients = ("KEY", "TOKEN_COLUMNS")  # dk and dv are bfloat16 in memory
    assert any(results.count(gradients) == 2 for results in narrow)


@every([LONG, *FEW], few=["alibi"])
def test_float32_in_three_products_of_bfloat16(spec, tiles, request):
    """One product of bfloat16 would be off by 0.003 and more.

    CoPE's slope jumps at whole positions, so its gradients are off where a position moves past one.
    """
    if spec == "fox":
        request.applymarker(pytest.mark.xfail(reason="docs/attention.md has the error of its bias"))
    with jax.default_matmul_precision("high"):
        compare(spec, 144, 144, atol=1e-3 if "cope" in spec else 3e-4)
    assert all("tile_product<2, 2>" in text for text in tiles)


@pytest.mark.parametrize("first", ["high", None])
def test_a_reason_for_one_precision_is_none_for_another(first, tiles, monkeypatch):
    """Here kernels with tiles cannot be compiled."""

    def load(text):
        if "tile_product" in text:
            raise library.Unavailable("cannot be compiled")
        return "digest"

    monkeypatch.setattr(library, "load_kernel", load)
    encoding = encodings.create("alibi", num_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    x = jnp.ones((1, 99 if first else 98, 2, 8))
    for precision in (first, None if first else "high"):
        with jax.default_matmul_precision(precision):
            why = why_not(encoding, prepare(x, x, x, encoding=encoding))
        assert (why is None) == (precision is None)


class Last(CoPE):
    """CoPE with a table for each head. Logits also have its last entry, which no position reaches."""

    def __init__(self, config, shape, *, rngs):
        super().__init__(config, shape, rngs=rngs)
        tables = jnp.zeros((shape.num_heads, *self.table.shape))
        self.table = nnx.Param(tables, axes=("heads", None, None))

    def initial_carry(self, q_BHLK, q_features):
        z = jnp.einsum("BHLK,HNK->BHLN", q_BHLK.astype(jnp.float32), self.table[...])
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3]), constants=z)

    def score(self, pairs, carry):
        logits, carry = super().score(pairs, carry)
        return logits + jnp.tanh(pairs.logits) * carry.constants[..., -1:], carry


@pytest.mark.parametrize(
    ("kind", "npos_max", "width", "precision", "atol"),
    [
        pytest.param(CoPE, 8, 48, None, 3e-5, marks=pytest.mark.slow),
        # A position near 64 is off by 4e-6 in either.
        (Last, 200, 16, None, 3e-5),
        (Last, 40, 16, "high", 1e-3),
    ],
    ids=["wide values", "entry", "tiles"],
)
def test_values_of_another_width_and_tables_that_differ(
    kind, npos_max, width, precision, atol, tiles
):
    config, shape = CoPE.Config(npos_max=npos_max), encodings.AttentionShape(2, 16)
    graph, params = nnx.split(kind(config, shape, rngs=nnx.Rngs(0)))
    params = jax.tree.map(
        lambda x: x + jnp.sin(jnp.arange(x.size, dtype=x.dtype) / 100).reshape(x.shape), params
    )
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, 128, 2, n)), jnp.float32) for n in (16, 16, width)]

    def gradients(attention):
        def out(params, q, k, v):
            encoding = nnx.merge(graph, params)
            return attention(encoding, prepare(q, k, v, encoding=encoding))

        value, pull = jax.vjp(jax.jit(out), params, *arrays)
        return jax.tree.leaves((value, pull(jnp.cos(value))))

    with jax.default_matmul_precision(precision):
        results = gradients(generated)
    for computed, exact in zip(results, gradients(full_attention), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=0, atol=atol * np.abs(exact).max())
    assert all(("tile_product" in text) == (precision is not None) for text in tiles)


class Twice(encodings.Encoding):
    """Its logits have a product of float32 too, next to that of bfloat16, and a feature of bfloat16."""

    def features(self, tokens, state):
        return tokens.k[..., 0], ()

    def score(self, pairs, carry):
        q = jnp.tanh(pairs.q.astype(jnp.float32))
        more = jnp.einsum("BHLK,BHMK->BHLM", q, pairs.k.astype(jnp.float32), precision="highest")
        feature = pairs.k_features[:, :, None].astype(jnp.float32)
        return pairs.logits + more + feature, carry


def test_keys_in_tiles_that_a_product_of_float32_reads_too(tiles):
    """The tiles, and the feature, are bfloat16 in memory; the product reads numbers of 32 bits."""
    encoding = Twice(Twice.Config(), encodings.AttentionShape(2, 16), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, 80, 2, 16)), jnp.bfloat16) for _ in range(3)]

    def gradients(attention):
        def out(*arrays):
            return attention(encoding, prepare(*arrays, encoding=encoding))

        value, pull = jax.vjp(jax.jit(out), *arrays)
        return value, *pull(jnp.cos(value))

    for computed, exact in zip(gradients(generated), gradients(full_attention), strict=True):
        exact = np.asarray(exact, np.float32)
        np.testing.assert_allclose(computed, exact, rtol=0, atol=0.02 * np.abs(exact).max())
    assert all("tile_product" in text and " product<" in text for text in tiles)
