"""The decoder as a whole: who sees whom, the cost of depth, random numbers, and its start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.self_attention import Context
from cope_jax.layers.stack import POLICIES
from cope_jax.models.decoder import Decoder, DecoderConfig
from tests.models.cases import (
    LAYERS,
    LENGTH,
    ROUNDING,
    VOCAB,
    abstract,
    build,
    checker,
    config,
    model,
    named,
    tokens,
)
from tests.ops.jaxprs import equations

ENCODING = "learned+cope(npos_max=4)+rope"
CHOICES = {
    "pre": config(ENCODING, {"dropout": 0.3}),
    "post": config(ENCODING, {"norm": "rms", "norm_position": "post", "activation": "swiglu"}),
}
PLACES, ONE_SEGMENT = np.arange(LENGTH, dtype=np.int32)[None], np.zeros((2, LENGTH), np.int32)
WEIGHTS = np.random.default_rng(7).normal(size=(2, LENGTH, VOCAB)).astype(np.float32)


def forward(graphdef, state, tokens, positions=None, segments=None, key=None):
    decoder = nnx.merge(graphdef, state)
    return decoder(tokens, positions_BL=positions, segment_ids_BL=segments, dropout_key=key)


@functools.cache
def compiled():
    graphdef, state = build(CHOICES["pre"])
    return jax.jit(functools.partial(forward, graphdef)), state


def logits(tokens, positions=PLACES, segments=ONE_SEGMENT, key=None):
    run, state = compiled()
    return np.asarray(run(state, tokens, positions, segments, key))


def equal(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("name", CHOICES)
def test_laws(name):
    """No logit depends on a later token, to the last bit; padding need not be there at all."""
    check = checker(*build(CHOICES[name]))
    check(laws=["causality"], tolerance=0).raise_if_broken()
    check(laws=["packed documents", "length"], tolerance=ROUNDING).raise_if_broken()


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_a_token_that_is_none_is_loud(wrong):
    """In its whole sequence, as 0 times NaN is NaN; other sequences are unchanged."""
    changed = tokens()
    changed[0, 3] = wrong
    broken, right = logits(changed), logits(tokens())
    assert np.isnan(broken[0, 3:]).all()
    np.testing.assert_array_equal(broken[1], right[1])


def test_depth_is_a_loop_over_the_layers():
    """And without a key the rate of dropout does not matter."""
    graphdef, state = build(CHOICES["pre"])

    @jax.jit
    def unrolled(state):
        decoder = nnx.merge(graphdef, state)
        x_BLD = decoder.encoding.embed(decoder.embedding(tokens()), PLACES)
        blocks, stacked = nnx.split(decoder.blocks)
        for layer in range(LAYERS):
            block = nnx.merge(blocks, jax.tree.map(lambda leaf: leaf[layer], stacked))  # noqa: B023  # called at once
            x_BLD = block(x_BLD, decoder.encoding, Context(PLACES))
        return decoder.out(decoder.norm(x_BLD))

    equal(unrolled(state), logits(tokens()))


@pytest.mark.parametrize("dropout", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "remat",
    ["none", *(pytest.param(p, marks=() if p == "full" else pytest.mark.slow) for p in POLICIES)],
)
def test_the_program_does_not_grow_with_depth(dropout, remat):
    def size(num_layers):
        choices = config(ENCODING, {"dropout": 0.3}, num_layers=num_layers, remat=remat)
        graphdef, state = abstract(choices)
        key = jax.random.key(0) if dropout else None

        def loss(state):
            return jnp.sum(forward(graphdef, state, tokens(), key=key))

        operations = equations(jax.grad(loss), state)
        depths = [
            e.params
            for e in operations
            if e.primitive.name == "scan" and e.params["length"] == num_layers
        ]
        assert depths and all(params["unroll"] == 1 for params in depths)
        return len(operations)

    assert size(3) == size(9)


# What each policy keeps of a block for each token beside its input, and how often a program of
# forward and backward pass computes GELU, softmax's exponentials and CoPE's gates.
OUTCOMES = [(2, 2, LENGTH, 4), (2, 2, LENGTH)]
KEPT = {
    "full": ([], {"tanh": 3, "exp": 5, "logistic": 3}),
    # The outcome of attention and its softmax's logarithm.
    "attention": (OUTCOMES, {"tanh": 3, "exp": 3, "logistic": 2}),
    # These, and queries, keys, values, what attention adds, and the hidden units.
    "dots": (
        [*OUTCOMES, *[(2, LENGTH, 8)] * 4, (2, LENGTH, 12)],
        {"tanh": 3, "exp": 3, "logistic": 2},
    ),
}


def training_program(remat):
    """(state) → (value, gradient), and the state."""
    choices = config("cope(npos_max=4)", {"attention": "blockwise"}, num_layers=3, remat=remat)
    graphdef, state = build(choices)
    return jax.value_and_grad(
        lambda state: jnp.sum(forward(graphdef, state, tokens()) * WEIGHTS)
    ), state


@functools.cache
def without_recomputation():
    program, state = training_program("none")
    return jax.jit(program)(state)


@pytest.mark.parametrize(
    "remat",
    [pytest.param(name, marks=[] if name == "attention" else pytest.mark.slow) for name in KEPT],
)
def test_recomputing_keeps_what_it_says_and_changes_nothing(remat):
    program, state = training_program(remat)
    operations = equations(program, state)
    first_scan = next(
        e for e in operations if e.primitive.name == "scan" and e.params["length"] == 3
    )
    kept = sorted(v.aval.shape[1:] for v in first_scan.outvars if v.aval.shape[:1] == (3,))
    shapes, counts = KEPT[remat]
    assert kept == sorted([(2, LENGTH, 8), *shapes])
    assert counts == {name: sum(e.primitive.name == name for e in operations) for name in counts}
    value, gradient = without_recomputation()
    other_value, other_gradient = jax.jit(program)(state)
    # The same sums, which the compiler may fuse in another way.
    np.testing.assert_allclose(other_value, value, rtol=1e-6, atol=1e-6)
    other = named(other_gradient)
    for path, leaf in named(gradient).items():
        np.testing.assert_allclose(other[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)


def test_dropout_depends_on_the_key_alone():
    same = np.stack([tokens()[0]] * 2)
    plain, first, again, other = (
        logits(same, key=key) for key in (None, *map(jax.random.key, (0, 0, 1)))
    )
    np.testing.assert_array_equal(plain, logits(same))
    np.testing.assert_array_equal(plain[0], plain[1])
    np.testing.assert_array_equal(first, again)
    for left, right in [(first, plain), (other, plain), (first, other), (first[0], first[1])]:
        assert np.abs(left - right).max(axis=-1).min() > 1e-3, (
            "every token of every example is touched"
        )


def test_dropout_on_the_embeddings():
    """The blocks add nothing, the output is the identity: dropped features are zero logits."""
    plain, dropped = constant_decoder(embedding=1, added=0)
    assert np.all(plain != 0)
    assert abs((dropped == 0).mean() - RATE) < 5 * (RATE * (1 - RATE) / dropped.size) ** 0.5


def test_layers_are_dropped_apart():
    """Both blocks add 1 to every feature of 0: the features of a token have 0, 1 or 2 of them."""
    plain, dropped = constant_decoder(embedding=0, added=1)
    np.testing.assert_allclose(plain, 1, rtol=1e-5)
    twice = dropped / np.maximum(dropped.max(axis=-1, keepdims=True), 1e-9)
    shares = [np.isclose(twice, value).mean() for value in (0, 0.5, 1)]
    assert sum(shares) == 1
    # The largest feature of a token has both layers' numbers, but for less than one token in 500.
    expected = np.array([RATE**2, 2 * RATE * (1 - RATE), (1 - RATE) ** 2])
    assert np.all(
        np.abs(shares - expected) < 5 * (expected * (1 - expected) / dropped.size) ** 0.5 + 1 / 500
    )


RATE = 0.25


def constant_decoder(embedding, added):
    """(logits without and with dropout): normed sums of embeddings and of each block's number."""
    width = 8
    choices = config("none", {"dropout": RATE, "norm": "rms", "model_dim": width}, vocab_size=width)
    graphdef, state = build(choices)
    values = nnx.to_pure_dict(state)
    values["embedding"]["embedding"] *= embedding
    for linear, value in (
        (values["blocks"]["attention"]["out"], 0),
        (values["blocks"]["mlp"]["outer"], added),
    ):
        linear["kernel"], linear["bias"] = 0 * linear["kernel"], np.full_like(linear["bias"], value)
    values["norm"]["norm"]["scale"] = np.ones(width, np.float32)
    values["out"]["kernel"] = np.eye(width, dtype=np.float32)
    nnx.replace_by_pure_dict(state, values)
    many = np.random.default_rng(0).integers(0, width, (64, LENGTH), dtype=np.int32)
    run = jax.jit(functools.partial(forward, graphdef))
    return [np.asarray(run(state, many, key=key)) for key in (None, jax.random.key(0))]


def test_low_precision_is_for_products_only():
    """Parameters, logits and gradients are float32, and results those of float32 to eight bits."""
    low = config(ENCODING, {"compute_dtype": "bfloat16"})
    graphdef, state = build(low)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}

    @jax.jit
    def run(state):
        out, pull = jax.vjp(lambda state: forward(graphdef, state, tokens()), state)
        return out, pull(WEIGHTS)[0]

    out, gradient = run(state)
    assert {leaf.dtype for leaf in jax.tree.leaves((out, gradient))} == {jnp.dtype("float32")}
    exact = logits(tokens())
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    # Some twenty roundings of at most 2⁻⁸ stand one behind the other, of either sign.
    assert 2**-12 < error < 20**0.5 * 2**-8


def test_the_encoding_of_the_model_is_one():
    """Its gradient is the sum of what each layer would have for itself."""
    gradients = {}
    for sharing in ("layer", "model"):
        graphdef, state = build(config("cope(npos_max=4)", encoding_sharing=sharing))
        values = nnx.to_pure_dict(state)
        for name, leaf in nnx.to_pure_dict(build(config("cope(npos_max=4)"))[1]).items():
            values[name] = (
                {k: v for k, v in leaf.items() if k != "encoding"} if name == "blocks" else leaf
            )
        table = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32)
        if sharing == "model":
            values["encoding"] = {"cope": {"table": table}}
        else:
            values["blocks"]["encoding"] = {"cope": {"table": np.stack([table] * LAYERS)}}
        nnx.replace_by_pure_dict(state, values)

        def loss(state):
            return jnp.sum(forward(graphdef, state, tokens()) * WEIGHTS)  # noqa: B023  # traced within this turn

        gradients[sharing] = named(jax.jit(jax.grad(loss))(state))
    each = gradients["layer"]["blocks/encoding/cope/table"]
    shared = gradients["model"]["encoding/cope/table"]
    assert each.shape == (LAYERS, 4, 4) and shared.shape == (4, 4)
    assert not any("blocks/encoding" in path for path in gradients["model"])
    assert not any(path.startswith("encoding") for path in gradients["layer"])
    np.testing.assert_allclose(
        shared, each.sum(0), rtol=ROUNDING, atol=ROUNDING * np.abs(each).max()
    )
    assert np.abs(each).max(axis=(1, 2)).min() > 1e-3


@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_initial_parameters(num_layers):
    """Variances: E 1, W 1/inputs, 1/(2·layers) of it before the stream; to five standard errors."""
    choices = DecoderConfig(
        vocab_size=50,
        max_length=8,
        encoding=EncodingConfig.parse("cope"),
        num_layers=num_layers,
        block=BlockConfig(model_dim=32, num_heads=3, head_dim=16, activation="swiglu"),
    )
    params = named(jax.jit(lambda: nnx.state(Decoder(choices, rngs=nnx.Rngs(0))))())
    for path, value in params.items():
        if path.endswith(("/bias", "table")):
            assert not value.any(), path
        elif path.endswith("norm/scale"):
            assert (value == 1).all(), path
        else:
            stddev = 1.0 if path.startswith("embedding") else value.shape[-2] ** -0.5
            if "mlp/outer" in path or "attention/out" in path:
                stddev /= (2 * num_layers) ** 0.5
            assert abs(value.mean()) < 5 * stddev / value.size**0.5, path
            assert abs(value.std() / stddev - 1) < 5 / (2 * value.size) ** 0.5, path
            if path.startswith("blocks") and num_layers > 1:
                assert not np.any(value[0] == value[1]), f"{path} is the same in each layer"


@pytest.mark.parametrize("width", [pytest.param(16, marks=pytest.mark.slow), 64])
def test_logits_start_at_the_scale_of_one(width):
    choices = config("none", {"model_dim": width, "num_heads": 4, "mlp_dim": None}, vocab_size=500)
    out = jax.jit(lambda: Decoder(choices, rngs=nnx.Rngs(0))(tokens(batch=16)))()
    assert 0.8 < np.std(out) < 1.2


# The paper's models of WikiText-103 (arXiv 2405.18719): 12 layers, width 768, context 1024, GPT-2's
# vocabulary.
@pytest.mark.parametrize(
    "encoding, sharing, millions",
    [
        ("learned", "model", 124.4),
        ("relative", "model", 123.7),
        ("cope(npos_max=64)", "model", 123.7),
        ("cope(npos_max=64)", "layer", 123.7),
        ("cope(npos_max=64,gate=value)", "model", 123.7),
        ("cope(npos_max=64,gate=separate_key)", "layer", 130.8),
        ("cope(npos_max=64)+relative", "model", 123.7),
    ],
)
def test_parameter_counts_are_those_of_the_paper(encoding, sharing, millions):
    choices = DecoderConfig(
        vocab_size=50257,
        max_length=1024,
        encoding=EncodingConfig.parse(encoding),
        encoding_sharing=sharing,
        num_layers=12,
        block=BlockConfig(model_dim=768, num_heads=12),
        tie_embeddings=True,
    )
    assert (
        round(sum(leaf.size for leaf in jax.tree.leaves(abstract(choices)[1])) / 1e6, 1) == millions
    )


@pytest.mark.parametrize("tied", [False, True])
def test_sampling_all_classes_in_bfloat16_is_the_full_loss(tied):
    options = {"num_sampled": VOCAB, "tie_embeddings": tied}
    graphdef, state = build(config("none", {"compute_dtype": "bfloat16"}, **options))
    fields = {
        "inputs": tokens(),
        "targets": tokens(seed=1),
        "weights": np.ones((2, LENGTH), np.float32),
    }

    @jax.jit
    def run(state, key):
        sampling = nnx.merge(graphdef, state)
        return sampling.metrics(fields, (), key)[0], sampling.metrics(fields)[0]

    sampled, whole = run(state, jax.random.key(0))
    assert sampled["loss"][0].dtype == jnp.float32 and "token_error" not in sampled
    # Matrices are rounded in another order if tied.
    np.testing.assert_allclose(sampled["loss"], whole["loss"], rtol=2e-3)


@pytest.mark.parametrize("name", ["vocab_size", "max_length", "num_layers"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ConfigError, match=f"decoder.{name} must be at least 1, got 0"):
        config(**{name: 0})


def test_choices_and_scales_are_checked():
    with pytest.raises(ConfigError, match=r"unknown decoder\.remat 'ful': did you mean 'full'"):
        config(remat="ful")
    with pytest.raises(ConfigError, match=r"decoder\.num_sampled must be at least 0, got -1"):
        config(num_sampled=-1)


def test_too_long_a_sequence_is_an_error_while_tracing():
    decoder = model(config("learned"))
    with pytest.raises(ConfigError, match=f"{LENGTH} rows: give a larger max_length") as error:
        jax.eval_shape(lambda: decoder(tokens(length=LENGTH + 1)))
    assert "\n" not in str(error.value)
    jax.eval_shape(lambda: decoder(tokens(length=LENGTH)))


def test_an_unknown_attention_implementation_is_an_error():
    decoder = model(config(block={"attention": "ful"}))
    with pytest.raises(
        ConfigError, match="unknown attention implementation 'ful': did you mean 'full'"
    ):
        jax.eval_shape(lambda: decoder(tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cope(npos_max=4)+rope", "relative(max_distance=5)"])
def test_forward_mode_and_hessian_vector_products(encoding, x64):
    """Of full attention: jvp equals the gradient's product, and the Hessian is symmetric."""
    choices = config(encoding, {"attention": "full", "compute_dtype": "float64"})
    graphdef, state = build(choices)
    state = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), state)
    rng = np.random.default_rng(0)
    direction, other = (
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), state) for _ in range(2)
    )

    def loss(state):
        return jnp.sum(jnp.tanh(nnx.merge(graphdef, state)(tokens()))) / 10

    def dot(a, b):
        return sum(
            float(jnp.sum(x * y))
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )

    slope = jax.jit(lambda state: jax.jvp(loss, (state,), (direction,))[1])(state)
    product = jax.jit(lambda state, v: jax.jvp(jax.grad(loss), (state,), (v,))[1])
    assert dot(jax.jit(jax.grad(loss))(state), direction) == pytest.approx(float(slope), rel=1e-9)
    assert dot(product(state, direction), other) == pytest.approx(
        dot(product(state, other), direction), rel=1e-8
    )


def test_embeddings_that_all_layers_share_are_no_full_encoding():
    shared = config("sinusoidal", full_layers=(0,), full_encoding="sinusoidal(base=5)")
    with pytest.raises(ConfigError, match="has no effect, as it acts on the embeddings"):
        build(shared)
