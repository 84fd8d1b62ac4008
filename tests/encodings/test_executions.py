"""The table in docs/encodings.md of what runs every encoding, written from the code."""

import pathlib

import jax
import pytest
from flax import nnx

from cope_jax import attention, encodings
from cope_jax.attention.kernels.tpu import tpu_attention
from cope_jax.attention.stream import needs_one_block

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "encodings.md"
TITLE = "| encoding | full | blockwise | ring | decoding | kernels |"


def reasons(name):
    """For each column, why this cannot run the encoding with its default options; None if it can."""
    encoding = encodings.create(
        name, num_heads=4, num_kv_heads=2, head_dim=16, max_length=32, rngs=nnx.Rngs(0)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (1, 32, 64))
    q, k, v = (
        jax.random.normal(key, (1, 32, heads, 16))
        for key, heads in zip(keys[1:], (4, 2, 2), strict=True)
    )
    request = attention.prepare(q, k, v, encoding=encoding, x=x, embedded=True)
    couples = None if encoding.traits.splits_queries else "it couples the queries"
    around = "it needs all keys in one block" if needs_one_block(encoding, request) else None
    by_tiles = couples or tpu_attention.refusal(encoding, request, resident=None, interpret=True)
    return [None, couples, couples or around, couples, by_tiles]


def row(name):
    cells = reasons(name)
    assert all(reason is None or "\n" not in reason for reason in cells)
    return f"| `{name}` | " + " | ".join("✓" if reason is None else "–" for reason in cells) + " |"


@pytest.mark.slow
def test_the_table_is_what_the_code_runs():
    rows = [row(name) for name in encodings.names()]
    table = "\n".join([TITLE, "|" + "---|" * 6, *rows])
    assert table in PAGE.read_text(), f"docs/encodings.md must have this table:\n{table}"


def test_the_page_says_which_are_for_causal_attention():
    shape = encodings.AttentionShape(4, 16, max_length=32)

    def causal_only(spec):
        config = encodings.EncodingConfig.parse(spec)
        return nnx.eval_shape(lambda: config.build(shape, rngs=nnx.Rngs(0))).traits.causal_only

    refused = [
        f"`{name}`" for name in encodings.names() if causal_only(name) != (name == "relative")
    ]
    assert f"| {', '.join(refused)} | refused: " in PAGE.read_text()
    text = "relative+t5", "relative(signed=True)+t5", "rope(decay=512)", "rope"
    assert [causal_only(spec) for spec in text] == [True, False, True, False]
