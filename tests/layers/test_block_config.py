"""The choices of a block, and the mistakes one can make in them."""

import pytest

from cope_jax.errors import ConfigError
from cope_jax.layers.block_config import BlockConfig
from cope_jax.registry import configure


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"model_dim": 10, "num_heads": 4},
            "model_dim=10 is not a multiple of num_heads=4: give head_dim",
        ),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must lie in \[0, 1\), got -0.1"),
        ({"model_dim": 0}, "block.model_dim must be at least 1, got 0"),
        ({"num_heads": 0}, "block.num_heads must be at least 1, got 0"),
        ({"num_kv_heads": 0}, "block.num_kv_heads must be at least 1, got 0"),
        ({"head_dim": 0}, "block.head_dim must be at least 1, got 0"),
        ({"mlp_dim": 0}, "block.mlp_dim must be at least 1, got 0"),
        ({"activation": "gel"}, "unknown block.activation 'gel': did you mean 'gelu'"),
        ({"norm": "batch"}, "choose from layer, rms"),
        (
            {"norm": "rms", "norm_bias": False},
            "block.norm_bias=False has no effect with norm=rms, which has no bias: leave it out",
        ),
        ({"norm_position": "mid"}, "choose from both, post, pre"),
        ({"norm_position": "post", "parallel": True}, "block.parallel needs norm_position=pre or"),
        ({"qk_norm_shared": True}, "block.qk_norm_shared has no effect without qk_norm"),
        ({"mixer": "delta", "window": 3}, "block.window has no effect with mixer=delta"),
        ({"window": 0}, "block.window must be at least 1, got 0"),
        ({"attention_cap": 0.0}, "block.attention_cap must be above 0, got 0.0"),
        ({"compute_dtype": "float16"}, "Choose from bfloat16, float32"),
        ({"heads": 2}, "did you mean 'num_heads'"),
    ],
)
def test_mistakes_are_one_clear_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        configure(BlockConfig, options, "block")
    assert "\n" not in str(error.value)


def test_the_shape_of_attention():
    shape = BlockConfig(model_dim=12, num_heads=4).attention_shape(99)
    assert (shape.num_heads, shape.kv_heads, shape.head_dim, shape.width, shape.max_length) == (
        4,
        4,
        3,
        12,
        99,
    )
    shape = BlockConfig(model_dim=10, num_heads=4, num_kv_heads=2, head_dim=8).attention_shape(None)
    assert (shape.kv_heads, shape.head_dim, shape.width, shape.max_length) == (2, 8, 10, None)


def test_key_value_heads_divide_the_heads():
    with pytest.raises(ConfigError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        BlockConfig(num_heads=4, num_kv_heads=3).attention_shape(None)


@pytest.mark.parametrize(
    "name, value", [("norm", "foo"), ("norm_position", "mid"), ("compute_dtype", "float16")]
)
def test_choices_are_checked_in_python_too(name, value):
    with pytest.raises(ConfigError, match=f"unknown block.{name} '{value}'"):
        BlockConfig(**{name: value})
