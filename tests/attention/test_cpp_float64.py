"""Generated C++ in float64 says what full attention says, to the last digits of value and gradients.

So it has no formula that is a little wrong, which the tolerances of float32 would hide.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import encodings
from cope_jax.attention import attend, prepare
from cope_jax.attention.kernels.cpu import library
from tests.attention.problems import DOCUMENTS, SHUFFLED
from tests.attention.test_fused import reason
from tests.attention.test_generated import ALL, LONG, compare, why_not
from tests.attention.test_generated import native as native
from tests.attention.test_generated import quickly as quickly
from tests.attention.test_generated import tiles as tiles
from tests.encodings.cases import every

pytestmark = pytest.mark.usefixtures("quickly")

exactly = functools.partial(compare, dtype=np.float64, atol=1e-12)


@every([s for s in ALL if reason(s) is None], few=[])
def test_every_encoding_in_float64(spec):
    exactly(spec, 144, 144, least=1.0 if "fire" in spec else 1e-3)


@pytest.mark.parametrize(
    ("spec", "length", "options"),
    [
        (
            "cope(npos_max=4)+learned_sink",
            150,
            {"window": 60, "segments": DOCUMENTS, "dropout_rate": 0.4},
        ),
        pytest.param("cope(npos_max=3)", 180, {}, marks=pytest.mark.slow),  # 30 queries see no key
        pytest.param("alibi", 150, {"segments": SHUFFLED, "causal": False}, marks=pytest.mark.slow),
        pytest.param("kerple", 150, {"logits_soft_cap": 2.0}, marks=pytest.mark.slow),
        pytest.param("grape_additive", 37, {"step": 0.7, "window": 70}, marks=pytest.mark.slow),
        pytest.param(LONG, 150, {"segments": DOCUMENTS}, marks=pytest.mark.slow),
        pytest.param(LONG, 150, {"no_keys": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks_dropout_and_sinks_in_float64(spec, length, options):
    exactly(spec, length, 150, **options)


def test_auto_takes_it_and_leaves_the_matrix_unit(tiles, monkeypatch):
    texts: list[str] = []
    monkeypatch.setattr(library, "load_kernel", lambda text: texts.append(text) or "digest")
    encoding = encodings.create("alibi", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    with jax.enable_x64(True), jax.default_matmul_precision("high"):
        x = jnp.ones((1, 97, 2, 16), jnp.float64)
        text = jax.jit(lambda x: attend(x, x, x, encoding=encoding)).lower(x).as_text()
        mixed = prepare(x, x, x.astype(jnp.float32), encoding=encoding)
        assert why_not(encoding, mixed) == "only some of q, k and v are float64"
    assert library.target() in text
    assert texts and not any("tile_product" in text for text in texts)
