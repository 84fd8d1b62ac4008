import jax
import numpy as np
import optax
import pytest

from cope_jax.encodings import EncodingConfig
from cope_jax.layers.block_config import BlockConfig
from cope_jax.models.decoder import DecoderConfig
from cope_jax.training.learner import Learner
from cope_jax.training.throughput import mfu, peak_flops


def decoder(length=128, vocab_size=512, num_layers=1, tied=False, encoding="none", **block):
    block = {"model_dim": 128, "num_heads": 1, "use_bias": False, "attention": "full"} | block
    return DecoderConfig(
        vocab_size=vocab_size,
        max_length=length,
        encoding=EncodingConfig.parse(encoding),
        num_layers=num_layers,
        tie_embeddings=tied,
        block=BlockConfig(**block),
    )


def create_learner(config):
    return Learner(config, optax.identity(), optax.constant_schedule(0.0), config.max_length)


def compiled_flops(config, batch=2):
    """FLOPs a token that XLA counts in loss and gradient. It counts the body of a loop once."""
    learner = create_learner(config)
    tokens = jax.ShapeDtypeStruct((batch, config.max_length), np.int32)
    weights = jax.ShapeDtypeStruct(tokens.shape, np.float32)
    params = jax.eval_shape(learner.init, np.int32(0)).params

    def loss(params, batch):
        return learner.loss(params, batch, jax.random.key(0))[0]

    arguments = params, {"inputs": tokens, "targets": tokens, "weights": weights}
    cost = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile().cost_analysis()
    return cost["flops"] / tokens.size


@pytest.mark.parametrize(
    "choices",
    [
        *(pytest.param(c, marks=pytest.mark.slow) for c in ({}, {"tied": True}, {"length": 512})),
        {"activation": "swiglu", "mlp_dim": 192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    ],
    ids=str,
)
def test_formula_is_within_3_percent_of_what_xla_counts(choices):
    config = decoder(**choices)
    # What the formula leaves out (norms, activations, softmax, loss) is there and small.
    assert 1 < compiled_flops(config) / config.flops_per_token(config.max_length) < 1.03


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_of_a_matrix_costs_6(tied):
    config = decoder(
        num_layers=3, tied=tied, num_heads=4, num_kv_heads=1, activation="swiglu", encoding="cope"
    )
    leaves = jax.tree.leaves_with_path(jax.eval_shape(create_learner(config).init, 0).params)
    kernels = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    output = 512 * 128 if tied else 0  # the embedding is the output layer
    assert config.flops_per_token(0) == 6 * (kernels + output)


def test_attention_costs_12_for_each_key_width_and_layer():
    config = decoder(num_layers=3, num_heads=4, head_dim=16)
    assert config.flops_per_token(100) - config.flops_per_token(0) == 12 * 3 * 64 * 100


def test_an_encoding_is_not_counted():
    assert decoder(encoding="cope").flops_per_token(8) == decoder().flops_per_token(8)


def test_a_model_of_8_billion_parameters():
    llama = decoder(
        length=8192,
        vocab_size=128_256,
        num_layers=32,
        model_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        mlp_dim=14_336,
        activation="swiglu",
    )
    # 8.03 billion parameters, 0.525 billion of them looked up, and 266 thousand of norms.
    matrices = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert llama.flops_per_token(8192) == 6 * matrices + 12 * 32 * 4096 * 8192


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peaks_are_of_the_longest_name_that_fits(kind, teraflops):
    assert peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "",
        "Tesla T4",
        "NVIDIA A1000",
        "NVIDIA L400",
        "TPU v55",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_devices_that_are_not_in_the_table_have_no_peak(kind):
    assert peak_flops(kind) is None


def test_mfu_is_the_share_of_all_devices():
    assert mfu(500.0, 2e9, devices=4, peak=1e12) == 0.25
