"""The decoder against the NumPy oracle, in value and gradient, for every choice there is."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models.cases import (
    LENGTH,
    ROUNDING,
    VOCAB,
    abstract,
    build,
    config,
    expected,
    named,
    tokens,
)

# (what it is, encoding, its parts of the model, its parts of each layer, choices of the block,
# choices of the model)
CASES = [
    ("plain", "none", "", "none", {}, {}),
    ("learned", "learned", "learned", "", {}, {}),
    ("shared cope", "cope(npos_max=4)", "cope(npos_max=4)", "", {}, {"encoding_sharing": "model"}),
    ("cope+rope", "cope(npos_max=4)+rope", "", "cope(npos_max=4)+rope", {}, {}),
    (
        "learned+cope+rope",
        "cope(npos_max=4)+learned+rope",
        "learned",
        "cope(npos_max=4)+rope",
        {"use_bias": False},
        {"tie_embeddings": True},
    ),
    (
        "gate keys see the normed input",
        "cope(npos_max=4,gate=separate_key)",
        "",
        "cope(npos_max=4,gate=separate_key)",
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4},
        {},
    ),
    (
        "shared relative",
        "relative",
        "relative",
        "",
        {"activation": "relu"},
        {"encoding_sharing": "model"},
    ),
    (
        "post-norm",
        "cope(npos_max=4)",
        "",
        "cope(npos_max=4)",
        {"norm_position": "post"},
        {"tie_embeddings": True},
    ),
    ("rms", "none", "", "none", {"norm": "rms", "use_bias": False, "activation": "swiglu"}, {}),
    (
        "post-norm rms",
        "cope(npos_max=4)+relative",
        "cope(npos_max=4)+relative",
        "",
        {"norm": "rms", "norm_position": "post", "activation": "relu"},
        {"encoding_sharing": "model"},
    ),
    (
        "grouped wide heads",
        "cope(npos_max=4)+rope",
        "",
        "cope(npos_max=4)+rope",
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 4, "activation": "swiglu"},
        {"num_layers": 3},
    ),
    ("tape", "none", "", "none", {"head_dim": 6}, {"tape": 3, "num_layers": 3}),
    (
        "tape, post-norm",
        "cope(npos_max=4)",
        "",
        "cope(npos_max=4)",
        {"norm_position": "post"},
        {"tape": 3},
    ),
    (
        "given positions below chosen ones",
        "repo",
        "",
        "repo",
        {"head_dim": 4},
        {"full_layers": (0,), "full_encoding": "repo(position=given)"},
    ),
    (
        "wide hidden layer",
        "none",
        "",
        "none",
        {"mlp_dim": None},
        {"tie_embeddings": True, "num_layers": 1},
    ),
]
QUICK = {"shared cope", "learned+cope+rope", "post-norm rms", "grouped wide heads", "tape"}
every_case = pytest.mark.parametrize(
    "name",
    [pytest.param(case[0], marks=[] if case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
POSITIONS = np.array([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3]], np.int32)
SEGMENTS = np.array([[0, 0, 0, 0, 0, 0, 0], [4, 4, 4, 1, 1, 1, 1]], np.int32)


@functools.cache
def problem(name):
    _, encoding, shared, per_layer, block, options = next(case for case in CASES if case[0] == name)
    return config(encoding, block, **options), shared, per_layer


@functools.cache
def result(name):
    """(parameters, logits, gradient of the weighted logits) of one case, float64."""
    graphdef, state = build(problem(name)[0])

    @jax.jit
    def run(state):
        def forward(state):
            return nnx.merge(graphdef, state)(
                tokens(), positions_BL=POSITIONS, segment_ids_BL=SEGMENTS
            )

        logits, pull = jax.vjp(forward, state)
        return logits, pull(WEIGHTS.astype(np.float32))[0]

    logits, gradient = run(state)
    return named(state), np.asarray(logits, np.float64), named(gradient)


WEIGHTS = np.random.default_rng(7).normal(size=(2, LENGTH, VOCAB))


def oracle(name, params):
    cfg, shared, per_layer = problem(name)
    return np.stack(
        [
            expected(cfg, shared, per_layer, params, row, indices, segments)
            for row, indices, segments in zip(tokens(), POSITIONS, SEGMENTS, strict=True)
        ]
    )


@every_case
def test_logits_equal_the_oracle(name):
    params, logits, _ = result(name)
    np.testing.assert_allclose(logits, oracle(name, params), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case[0], marks=[pytest.mark.slow] * (case[0] not in ("shared cope", "tape")))
        for case in CASES
    ],
)
def test_gradients_equal_differences_of_the_oracle(name):
    """Of each parameter along one random direction."""
    params, _, gradient = result(name)
    rng, step = np.random.default_rng(1), 1e-6
    for path, value in params.items():
        direction = rng.normal(size=value.shape)
        above, below = (
            np.sum(WEIGHTS * oracle(name, params | {path: value + sign * step * direction}))
            for sign in (1, -1)
        )
        slope = (above - below) / (2 * step)
        # Forward and back the chain is twice as long; each entry is rounded to that share of the
        # largest.
        entry = np.abs(gradient[path]).max()
        np.testing.assert_allclose(
            np.sum(gradient[path] * direction),
            slope,
            rtol=0,
            atol=2 * ROUNDING * max(entry, 1) * value.size**0.5,
            err_msg=path,
        )
        assert entry > 1e-3 or path.endswith("key/bias"), (
            f"{path} does not matter: the comparison says nothing"
        )


def test_the_grid_is_whole():
    """Every name that a block knows occurs."""
    blocks = [problem(case[0])[0].block for case in CASES]
    assert {block.activation for block in blocks} == {"relu", "gelu", "swiglu"}
    assert {(block.norm, block.norm_position) for block in blocks} == {
        (norm, position) for norm in ("layer", "rms") for position in ("pre", "post")
    }
    assert {block.use_bias for block in blocks} == {True, False}


@every_case
def test_parameters_are_those_of_the_formula(name):
    cfg, _, _ = problem(name)
    block, shape = cfg.block, cfg.block.attention_shape(cfg.max_length)
    width, heads, bias = block.model_dim, shape.head_dim, block.use_bias
    hidden = block.mlp_dim or 4 * width
    linears = [(width, shape.num_heads * heads), (shape.num_heads * heads, width)]
    linears += [(width, shape.kv_heads * heads)] * 2
    linears += [(width, hidden)] * (2 if block.activation == "swiglu" else 1) + [(hidden, width)]
    norm = width * (2 if block.norm == "layer" else 1)
    tape = cfg.tape * (width + 2 * shape.num_heads) + shape.num_heads**2 if cfg.tape else 0
    count = cfg.num_layers * (tape + sum(i * o + o * bias for i, o in linears) + 2 * norm)
    count += cfg.vocab_size * width * (1 if cfg.tie_embeddings else 2)
    count += norm * (block.norm_position == "pre")
    once = cfg.num_layers if cfg.encoding_sharing == "layer" else 1
    for encoding, options in cfg.encoding.parts:
        if encoding == "learned":
            count += cfg.max_length * width
        if encoding == "relative":
            count += once * cfg.max_length * heads
        if encoding == "repo":
            count += once * max(width // 8, 1) * (2 * width + shape.kv_heads)
        if encoding == "cope":
            count += once * options["npos_max"] * heads
            count += once * width * shape.kv_heads * heads * (options.get("gate") == "separate_key")
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract(cfg)[1])) == count
