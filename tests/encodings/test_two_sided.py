"""Encodings without a causal mask: values, gradients and every way of execution; and CoPE to both
sides.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings
from cope_jax.encodings import Carry
from tests.attention.test_memory import in_blocks, quadratic
from tests.encodings.cases import (
    CASES,
    FEW,
    FIRSTS,
    SIZES,
    build,
    every,
    parameters,
    parts,
    problem,
    rule_of,
)
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.differences import gradients as finite_differences

BATCH, LENGTH = 2, 9
POSITIONS = np.array([[0, 1, 2, 3, 5, 6, 8, 9, 10], [1, 2, 3, 4, 5, 6, 7, 8, 9]], np.int32)
SEGMENTS = np.array([[1] * 6 + [0] * 3, [1] * 9], np.int32)  # padding behind the first row
TWO_SIDED, CAUSAL = "cope_two_sided(npos_max=4)", "cope(npos_max=3)"


PAGE = Path(__file__).parents[2] / "docs" / "encodings.md"
ROWS = re.findall(
    r"^\| (`.*?`) \| (.*) \|$",
    PAGE.read_text().split("\n## Without a causal mask\n")[1].split("\n## ")[0],
    re.MULTILINE,
)
SAID = {name: said for names, said in ROWS for name in re.findall(r"`(\w+)`", names)}
"""Encoding → what the page says that it does with a key after the query."""


def is_causal_only(spec):
    config = encodings.EncodingConfig.parse(spec)
    shape = encodings.AttentionShape(SIZES.heads, SIZES.head_dim, max_length=SIZES.max_length)
    return nnx.eval_shape(lambda: config.build(shape, rngs=nnx.Rngs(0))).traits.causal_only


SPECS = [spec for spec in CASES if not is_causal_only(spec)]
# One of each kind of hook, and options that act on later keys alone. `attend` takes causal encodings
# too, of which the suite has one.
QUICK = {spec for spec in SPECS if spec in FEW or "signed" in spec or "directional" in spec} - {
    "learned",
    "relative(max_distance=3,signed=True,beyond=nothing)",
}
every_case = every([*SPECS, CAUSAL], {*QUICK, CAUSAL})


@pytest.mark.slow
def test_the_page_says_what_each_does_with_a_later_key(x64):
    page = "docs/encodings.md, Without a causal mask"
    assert SAID.keys() == {*encodings.names()}, f"{page}: each encoding must be in one row"
    for name, said in SAID.items():
        spec = next(spec for spec in CASES if spec in FIRSTS and parts(spec)[0][0] == name)
        assert is_causal_only(spec) == ("refused" in said), f"{page}: {name} is {said}"
        if not is_causal_only(spec):
            assert uses_distance(spec) == ("|i−j\\|" in said), f"{page}: {name} {said}"


def uses_distance(spec):
    """True if the mirror of a sequence has the mirrored output, and other orders have others."""
    orders = np.stack([np.arange(LENGTH), np.arange(LENGTH)[::-1], np.roll(np.arange(LENGTH), 4)])
    x, q, k, v = (problem(length=LENGTH)[name][0][orders] for name in "xqkv")
    encoding = nnx.merge(*build(spec))
    out = attention.attend(
        q, k, v, encoding=encoding, x=x, embedded=True, causal=False, implementation="full"
    )
    alike = [np.allclose(row, out[0][order]) for row, order in zip(out, orders, strict=True)]
    return alike == [True, True, False]


def results(spec, state, arrays, *implementations, causal=False):
    """[(out, gradients by name)] of each implementation, in one program."""
    graphdef = build(spec)[0]

    @jax.jit
    def run(state, arrays):
        def forward(implementation, state, arrays):
            encoding = nnx.merge(graphdef, state)
            x, q, k, v = (
                encoding.embed(arrays["x"], POSITIONS),
                arrays["q"],
                arrays["k"],
                arrays["v"],
            )
            out = attention.attend(
                q,
                k,
                v,
                encoding=encoding,
                x=x,
                embedded=True,
                q_positions=POSITIONS,
                k_positions=POSITIONS,
                q_segment_ids=SEGMENTS,
                k_segment_ids=SEGMENTS,
                causal=causal,
                implementation=implementation,
                blocks=None if implementation == "full" else (4, 3, 2),
            )
            return x, out

        values = []
        inputs = {name: arrays[name] for name in ("x", "q", "k", "v")}
        for implementation in implementations:
            (_, out), pull = jax.vjp(functools.partial(forward, implementation), state, inputs)
            values.append((out, pull((arrays["dembedded"], arrays["dout"]))))
        return values

    values = run(state, arrays)
    return [
        (
            np.asarray(out),
            {name: np.asarray(leaf) for name, leaf in dinputs.items()} | parameters(dstate),
        )
        for out, (dstate, dinputs) in values
    ]


def oracle(spec, named, arrays, example):
    rule = rule_of(spec, named)
    x = np.stack(
        [
            rule.embed(x, int(i))
            for x, i in zip(arrays["x"][example], POSITIONS[example], strict=True)
        ]
    )
    return x, oracle_attention(
        *(arrays[name][example] for name in "qkv"),
        rule,
        x_MD=x,
        q_positions=POSITIONS[example],
        k_positions=POSITIONS[example],
        q_segments=SEGMENTS[example],
        k_segments=SEGMENTS[example],
        causal=False,
    )


@every_case
def test_values_and_gradients_to_both_sides(spec, x64):
    """Against the oracle; and streaming, in small blocks, gives the same."""
    _, state = build(spec)
    arrays = problem(length=LENGTH)
    arrays["dout"][1], arrays["dembedded"][1] = 0, 0  # the oracle's gradient is of one example
    (out, exact), (streamed, others) = results(spec, state, arrays, "full", "blockwise")
    named = parameters(state)
    for example in range(BATCH):
        np.testing.assert_allclose(
            out[example], oracle(spec, named, arrays, example)[1], rtol=0, atol=1e-12
        )
    np.testing.assert_allclose(streamed, out, rtol=0, atol=1e-12)

    # A step in one random direction for all inputs and parameters together: as telling as one for
    # each, and quick.
    values = {name: arrays[name] for name in ("x", "q", "k", "v")} | named
    rng = np.random.default_rng(0)
    direction = {name: rng.normal(size=value.shape) for name, value in values.items()}

    def loss(step):
        moved = {name: value + step["t"] * direction[name] for name, value in values.items()}
        embedded, out = oracle(spec, moved, moved, 0)
        return float((embedded * arrays["dembedded"][0]).sum() + (out * arrays["dout"][0]).sum())

    numeric = finite_differences(loss, {"t": np.zeros(())}, step=1e-6)["t"]
    for gradients in (exact, others):
        slope = sum(float((gradients[name] * direction[name]).sum()) for name in values)
        np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-7)
    for name, gradient in exact.items():
        np.testing.assert_allclose(others[name], gradient, rtol=0, atol=1e-11, err_msg=name)


def create(spec, heads=2, **options):
    return encodings.create(
        spec, num_heads=heads, head_dim=4, max_length=LENGTH, rngs=nnx.Rngs(0), **options
    )


def tables(seed=0, sides=2, rows=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(sides, rows, 4)))


def inputs(length=LENGTH):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(1, length, 2, 4))) for _ in range(3)]


def test_under_a_causal_mask_it_is_cope(x64):
    cope, both = create("cope", npos_max=3), create("cope_two_sided", npos_max=3)
    both.tables[...] = tables()
    cope.table[...] = tables()[0]
    q, k, v = inputs()

    @jax.jit
    def results(q, k, v):
        ways = (cope, True), (both, True), (both, False)
        return [attention.attend(q, k, v, encoding=each, causal=causal) for each, causal in ways]

    causal, two_sided, everything = results(q, k, v)
    np.testing.assert_allclose(two_sided, causal, rtol=0, atol=1e-13)
    assert np.abs(everything - two_sided)[:, :-1].max(axis=(2, 3)).min() > 1e-3


@pytest.mark.newest
def test_the_mirror_of_a_sequence_is_the_mirror_of_what_comes_out(x64):
    """With one table the sides are alike; with two they change places, but for the query's own key."""
    q, k, v = inputs()
    both = create("cope_two_sided", npos_max=3, share_table=True)
    both.tables[...] = tables(sides=1)
    forth = attention.attend(q, k, v, encoding=both, causal=False)
    back = attention.attend(*(x[:, ::-1] for x in (q, k, v)), encoding=both, causal=False)
    np.testing.assert_allclose(back[:, ::-1], forth, rtol=0, atol=1e-13)


def test_with_open_gates_it_is_signed_distance(x64):
    """All gates 1 give |i−j|+1 on both sides: `relative` with signed rows."""
    q, _, v = inputs()
    q = jnp.abs(q) + 0.5
    k = jnp.full_like(q, 100.0)  # the same for all keys, so that softmax does not see it
    both, signed = (
        create("cope_two_sided", npos_max=4),
        create("relative", max_distance=3, signed=True),
    )
    left, right = tables(rows=4)
    both.tables[...] = jnp.stack([left, right])
    # Distances −2 … 2, of which negative ones are keys after the query; the first row of a table is
    # never read.
    signed.table[...] = jnp.stack([right[3], right[2], left[1], left[2], left[3]])
    ours, theirs = (
        jax.jit(functools.partial(attention.attend, encoding=encoding, causal=False))(q, k, v)
        for encoding in (both, signed)
    )
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_masked_gates_count_for_nothing(x64):
    """Neither padding nor another document moves the positions, in value or gradient."""
    both = create("cope_two_sided", npos_max=8)
    q, k, _ = inputs()
    segments = np.array([[1, 1, 0, 1, 1, 1, 0, 0, 1]], np.int32)
    prepared = attention.prepare(
        q, k, k, encoding=both, q_segment_ids=segments, k_segment_ids=segments, causal=False
    )
    maps = both.maps(prepared.pairs())
    gates, positions = (np.asarray(maps[name])[0, 0] for name in ("gates", "positions"))
    assert (gates[segments[0][:, None] != segments[0][None]] == 0).all() and gates.max() <= 1
    for i in range(LENGTH):
        for j in range(LENGTH):
            between = range(min(i, j), max(i, j) + 1)
            assert positions[i, j] == pytest.approx(
                sum(gates[i, other] for other in between), abs=1e-12
            )


def test_streaming_never_holds_all_pairs():
    """Though all keys of a strip are one block."""
    assert not quadratic(in_blocks, TWO_SIDED, causal=False)


@pytest.mark.parametrize(
    "bidirectional, expected", [(False, [0, 0, 0, 0, 1, 2]), (True, [6, 6, 5, 0, 1, 2])]
)
def test_t5_has_buckets_on_both_sides_where_asked(bidirectional, expected, x64):
    """Read off the bias of each distance, −3 … 2."""
    t5 = create("t5", heads=2, num_buckets=8, max_distance=5, bidirectional=bidirectional)
    t5.table[...] = jnp.arange(8.0)[:, None] * jnp.ones((1, 2))
    assert (
        scores(t5, np.array([[3]], np.int32), np.arange(6, 0, -1, dtype=np.int32)[None])[
            0, 0, 0
        ].tolist()
        == expected
    )


def test_fire_stays_within_its_interval_on_the_right():
    """The quotient of a key after the query is at most 1, as that of one before it is."""
    fire = create("fire", hidden=1, threshold=1.0)
    fire.hidden_kernel[...], fire.hidden_bias[...] = jnp.ones(1), jnp.zeros(1)
    fire.out_kernel[...], fire.out_bias[...] = jnp.ones((1, 2)), jnp.zeros(2)
    positions = np.arange(SIZES.max_length, dtype=np.int32)[None]
    score = scores(fire, positions, positions)
    np.testing.assert_allclose(score, jnp.swapaxes(score, 2, 3), rtol=1e-6)
    assert score.max() <= 1


def scores(encoding, q_positions, k_positions):
    """The scores of an encoding with two heads, of content logits that are all 0."""
    q, k = (jnp.zeros((1, positions.size, 2, 4)) for positions in (q_positions, k_positions))
    options = {"q_positions": q_positions, "k_positions": k_positions, "causal": False}
    return encoding.score(
        attention.prepare(q, k, k, encoding=encoding, **options).pairs(), Carry()
    )[0]
