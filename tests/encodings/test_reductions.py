"""One encoding is another in a limit: the tests that no oracle can get wrong in the same way."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings
from cope_jax.attention import attend
from cope_jax.encodings import Carry, Pairs, Tokens, rotations
from cope_jax.encodings.t5 import buckets
from cope_jax.errors import ConfigError
from tests.encodings.cases import CASES, FEWEST, FIRSTS, SIZES, every, laws, parts, rule_of
from tests.oracle.encodings import alibi_slopes, t5_bucket
from tests.oracle.rules import Token

HEADS, WIDTH, LENGTH = 2, 4, 8


@pytest.fixture(autouse=True)
def float64(x64):
    """All comparisons of this file are to the last digits."""


def create(spec, heads=HEADS, **options):
    return encodings.create(
        spec,
        num_heads=heads,
        head_dim=WIDTH,
        model_dim=WIDTH,
        max_length=LENGTH,
        rngs=nnx.Rngs(0),
        **options,
    )


def inputs(seed=0, heads=HEADS, length=LENGTH):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(2, length, heads, WIDTH))) for _ in range(3)]


def out(encoding, q, k, v, **options):
    options |= {"encoding": encoding, "embedded": True, "implementation": "full"}
    return np.asarray(jax.jit(functools.partial(attend, **options))(q, k, v))


def equal(left, right, atol=1e-12):
    np.testing.assert_allclose(left, right, rtol=0, atol=atol)


def all_gates_open(gate):
    """Inputs for which every gate is exactly 1: positive queries, and keys or values that they all
    agree with.
    """
    q, k, v = inputs()
    q = jnp.abs(q) + 0.5
    if gate == "query_key":
        k = jnp.full_like(k, 100.0)  # the same for all keys, so that softmax does not see it
    else:
        v = jnp.abs(v) + 100.0
    return q, k, v


@pytest.mark.parametrize("gate", ["query_key", "value"])
@pytest.mark.parametrize("npos_max", [pytest.param(LENGTH + 1, marks=pytest.mark.slow), 4])
def test_cope_with_open_gates_is_relative(gate, npos_max):
    """All gates 1 give p_ij = i−j+1: relative position with the table shifted by one row, clipped
    at the same place.
    """
    q, k, v = all_gates_open(gate)
    cope, relative = (
        create("cope", npos_max=npos_max, gate=gate),
        create("relative", max_distance=npos_max - 1),
    )
    table = np.random.default_rng(1).normal(size=(npos_max, WIDTH))
    cope.table[...], relative.table[...] = jnp.asarray(table), jnp.asarray(table[1:])
    equal(out(cope, q, k, v), out(relative, q, k, v))
    assert np.abs(out(cope, q, k, v) - out(create("none"), q, k, v)).max() > 0.01


def test_cope_slopes_with_open_gates_are_alibi():
    """−m(i−j+1) is ALiBi's −m(i−j) but for a constant, which softmax does not see."""
    q, k, v = all_gates_open("value")
    equal(
        out(create("cope", position="slope", slope=0.5, gate="value"), q, k, v),
        out(create("alibi", slopes=(0.5, 0.5 / 16)), q, k, v),
    )


def test_cable_of_the_code_is_fox_with_the_opposite_weights():
    """−softplus(z) is log σ(−z), so the released form of CABLE is FoX with other signs."""
    cable, fox = create("cable(form=code,stddev=1)"), create("fox")
    cable.step_bias[...] = jnp.asarray([0.5, -2.0])
    fox.kernel[...], fox.bias[...] = -cable.step_kernel[...], -cable.step_bias[...]
    q, k, v = inputs()
    x = q[:, :, 0]
    outputs = [out(e, q, k, v, x=x) for e in (cable, fox)]
    equal(*outputs, atol=1e-15)
    assert np.abs(outputs[0] - out(create("none"), q, k, v)).max() > 0.1


@pytest.mark.parametrize("position", ["chosen", "given"])
def test_repo_at_the_positions_of_the_tokens_is_rope(position):
    """x = (i, 100, 0, 0), and SiLU(100) is 100 to the last digit."""
    repo, (q, k, v) = create("repo", position=position), inputs()
    index = np.broadcast_to(np.arange(LENGTH)[None, :, None], q[:, :, 0, :1].shape)
    x = np.concatenate([index, 0 * index + 100, 0 * index, 0 * index], axis=-1).astype(q.dtype)
    if position == "chosen":
        repo.gate[...], repo.content[...] = np.eye(WIDTH)[1][:, None], np.eye(WIDTH)[0][:, None]
        repo.out[...] = np.full((1, HEADS), 0.01)
    rope = create("rope", base=500_000.0)
    equal(out(repo, q, k, v, x=x), out(rope, q, k, v))
    assert np.abs(out(rope, q, k, v) - out(create("none"), q, k, v)).max() > 0.1


def test_ssmax_keeps_the_weight_of_a_key_that_differs():
    """For logits s log n times 0, and 1 for one key, its weight is n^s / (n^s + n − 1)."""
    ssmax, (q, k, _) = create("ssmax(scale=1.5)"), inputs()
    segments = np.array([[0] * LENGTH, [3] * 3 + [1] * (LENGTH - 3)], np.int32)
    k = (0 * k).at[:, 3].set(1.0)  # in the second row, the first of its document
    weights = out(ssmax, 0 * q + WIDTH**-0.5, k, k, q_segment_ids=segments, k_segment_ids=segments)
    for example, since in enumerate((0, 3)):
        for i in range(3, LENGTH):
            n = i - since + 1
            equal(weights[example, i], n**1.5 / (n**1.5 + n - 1))


@pytest.mark.parametrize("cut", range(1, LENGTH))
def test_ssmax_counts_on_where_the_tokens_are_cut(cut):
    """Documents of three and five tokens: the second may begin with the second call."""
    ssmax, k = create("ssmax"), np.zeros((1, LENGTH, HEADS, WIDTH))
    segments, state, counts = np.array([[4] * 3 + [7] * 5], np.int32), None, []
    for piece in (slice(cut), slice(cut, None)):
        tokens = Tokens(None, k[:, piece], k[:, piece], k[:, piece], segments, segments[:, piece])
        logs, state = ssmax.features(tokens, state)
        counts += np.exp(np.ravel(logs)).tolist()
    equal(counts, [1, 2, 3, 1, 2, 3, 4, 5])


def test_scale_invariant_gives_scales_of_distance_the_weight_of_the_paper():
    """The mean of e^logit at distance t is √e/(t/τ + 1), for normal content logits."""
    points, weights = np.polynomial.hermite_e.hermegauss(100)
    distances, encoding = np.array([[0], [3], [10], [500]], np.int32), create("scale_invariant")
    for t in distances:
        pairs = zero_pairs(1, t[None])
        logits = [
            encoding.score(dataclasses.replace(pairs, logits=pairs.logits + x), Carry())[0]
            for x in points
        ]
        mean = np.sum(weights * np.exp(np.ravel(logits))) / np.sqrt(2 * np.pi)
        assert mean == pytest.approx(np.exp(0.5) / (t[0] / 10 + 1), rel=1e-9)


def test_saturated_cope_is_a_constant():
    """If every position is clipped, all keys get q·e[N−1], and CoPE is no encoding at all."""
    q, k, v = all_gates_open("query_key")
    cope = create("cope", npos_max=2)
    cope.table[...] = jnp.asarray(np.random.default_rng(1).normal(size=(2, WIDTH)))
    pairs = attention.prepare(q, k, v, encoding=cope).pairs()
    score, logits = cope.score(pairs, cope.initial_carry(pairs.q, ()))[0], pairs.logits
    constant = np.einsum("BLHK,K->BHL", np.asarray(q), np.asarray(cope.table[...])[1])[..., None]
    causal = np.tril(np.ones((LENGTH, LENGTH)))[None, None]
    equal(np.asarray(score - logits) * causal, constant * causal)
    equal(out(cope, q, k, v), out(create("none"), q, k, v))


@pytest.mark.parametrize(
    "spec",
    [
        "cope",
        "cope(gate=value)",
        "cope(position=learned_slope)",
        "cope(position=slope,slope=0)",
        "alibi(slopes=(0.0,0.0))",
        "relative(stddev=0)",
        "t5(stddev=0)",
        "learned(stddev=0)",
        "cope+none",
    ],
)
def test_zero_parameters_are_no_encoding(spec):
    """CoPE's table and learned slopes start there."""
    q, k, v = inputs()
    encoding = create(spec)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nnx.state(encoding)))
    equal(out(encoding, q, k, v), out(create("none"), q, k, v), atol=1e-15)
    equal(encoding.embed(q[:, :, 0], np.arange(LENGTH, dtype=np.int32)[None]), q[:, :, 0], atol=0)


# FIRE and DaRoPE have positions in a nonlinear function.
ABSOLUTE = {"learned", "sinusoidal", "fire", "darope"}


@every([spec for spec in CASES if not ABSOLUTE & {name for name, _ in parts(spec)}], few=FEWEST)
def test_only_distances_matter(spec):
    laws(spec, ["shift"], tolerance=1e-12, shift=1000).raise_if_broken()


def test_heads_share_cosines_and_sines():
    """A CPU computes them once, in no loop over the heads; elsewhere there is no loop."""
    angles = jnp.linspace(-50, 50, 128 * 4).reshape(1, 128, 1, 4)
    x = jax.random.normal(jax.random.key(0), (1, 128, 3, 8))
    traced = jax.jit(rotations.rotate_pairs).trace(x, angles)
    on_cpu = traced.lower(lowering_platforms=("cpu",)).compile()
    for computation in on_cpu.as_text().split("\n\n"):
        assert not ("cosine(" in computation and "concatenate(" in computation)
    assert "while" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    first, second = np.split(np.float64(x), 2, axis=-1)
    cos, sin = np.cos(np.float64(angles)), np.sin(np.float64(angles))
    turned = [first * cos - second * sin, second * cos + first * sin]
    np.testing.assert_allclose(on_cpu(x, angles), np.concatenate(turned, axis=-1), atol=2e-6)


@pytest.mark.parametrize("heads", [1, 4])
def test_gradients_of_a_rotation(heads):
    """They are exact, and use its cosines and sines."""
    angles = jax.random.normal(jax.random.key(1), (1, 16, heads, 4))
    x = jax.random.normal(jax.random.key(0), (1, 16, 4, 10))

    def gradients(x, angles):
        return jax.grad(lambda *args: jnp.sum(rotations.rotate_pairs(*args) ** 3), (0, 1))(
            x, angles
        )

    def plain(x, angles):
        first, second, rest = jnp.split(x, (4, 8), axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return jnp.sum(jnp.concatenate(turned, axis=-1) ** 3)

    text = jax.jit(gradients).trace(x, angles).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.cosine") == text.count("stablehlo.sine") == 1
    for actual, exact in zip(gradients(x, angles), jax.grad(plain, (0, 1))(x, angles), strict=True):
        np.testing.assert_allclose(actual, exact, atol=1e-12)


def test_slopes_of_angles_are_not_rounded_with_the_result():
    angles, weights = (jax.random.normal(jax.random.key(n), (1, 16, 1, 4)) for n in (1, 2))
    x = jax.random.normal(jax.random.key(0), (1, 16, 1, 8)).astype(jnp.bfloat16)
    weights = jnp.concatenate([weights, -weights], axis=3).astype(jnp.bfloat16)

    def slopes(x):
        def loss(angles):
            return jnp.sum(rotations.rotate_pairs(x, angles).astype(jnp.float64) * weights)

        with jax.numpy_dtype_promotion("standard"):
            return jax.grad(loss)(angles)

    np.testing.assert_allclose(slopes(x), slopes(x.astype(jnp.float64)), atol=1e-6)


def test_a_rotation_of_split_heads_sends_nothing():
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, jax.P(None, None, axis)) for axis in ("heads", None))
    x = jax.random.normal(jax.random.key(0), (1, 16, 4, 8))
    angles = jnp.ones((1, 16, 1, 4))
    step = jax.jit(
        jax.grad(lambda x, angles: jnp.sum(rotations.rotate_pairs(x, angles) ** 3)),
        in_shardings=(split, whole),
        out_shardings=split,
    )
    assert not re.search(r"all-|collective", step.lower(x, angles).compile().as_text())


def test_rope_turns_pairs_by_the_distance():
    """(R_i q)·(R_j k) = q·(R_{j−i} k), and R keeps lengths."""
    rope = create("rope")
    q, k, _ = inputs()
    i, j = np.full((1, LENGTH), 7, np.int32), np.full((1, LENGTH), 3, np.int32)
    rotated_q, rotated_k, turned_back = (
        rope.rotate(q, (), i),
        rope.rotate(k, (), j),
        rope.rotate(k, (), j - i),
    )
    equal(jnp.sum(rotated_q * rotated_k, axis=-1), jnp.sum(q * turned_back, axis=-1))
    equal(jnp.linalg.norm(rotated_q, axis=-1), jnp.linalg.norm(q, axis=-1))
    assert np.abs(rotated_q - q).max() > 0.1
    same_q, same_k = rope.rotate(q, (), 0 * i), rope.rotate(k, (), 0 * j)
    equal(same_q, q, atol=0)
    equal(same_k, k, atol=0)


@pytest.mark.parametrize("fraction, still", [(1.0, 0), (0.5, 2), (0.75, 2)])
def test_rope_leaves_the_rest_of_the_head_alone(fraction, still):
    q, _, _ = inputs()
    places = np.arange(1, LENGTH + 1, dtype=np.int32)[None]
    rotated = create("rope", fraction=fraction).rotate(q, (), places)
    moved = np.abs(np.asarray(rotated - q)).max(axis=(0, 1, 2)) > 1e-9
    np.testing.assert_array_equal(moved, np.arange(WIDTH) < WIDTH - still)


@pytest.mark.parametrize(
    "options",
    [
        "fraction=1.0",
        "fraction=0.5",
        "fraction=0.25",
        "llama3=(8,1,4,200)",
        "fraction=0.75,clip=4",
        "clip=3,yarn=(4,400)",
    ],
)
def test_rope_frequencies_span_the_rotated_features(options):
    """A part that turns has the wavelengths of a head of that width, as the pairs of a wider head
    show.
    """
    rope = encodings.create(f"rope({options})", num_heads=1, head_dim=16, rngs=nnx.Rngs(0))
    rule = rule_of(f"rope({options})", {}, SIZES._replace(head_dim=16))
    q = np.random.default_rng(0).normal(size=(1, 3, 1, 16))
    places = np.array([[1, 50, 4000]], np.int32)
    rotated = rope.rotate(jnp.asarray(q), (), places)
    for at, position in enumerate(places[0]):
        equal(
            rotated[0, at, 0],
            rule.rotate(q[0, at, 0], Token(int(position), (), 0, False)),
            atol=1e-11,
        )


def zero_pairs(heads, distances):
    """One query and one key for each distance, both 0."""
    q = k = jnp.zeros((len(distances), heads, 1, WIDTH))
    mask = jnp.ones((1, 1, 1, 1), bool)
    return Pairs(
        q, k, k, (), (), jnp.zeros((len(distances), heads, 1, 1)), mask, distances, 0 * distances
    )


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12])
def test_alibi_slopes_are_the_published_ones(heads):
    """Read off the score of a key one place away."""
    alibi = create("alibi", heads=heads)
    score, _ = alibi.score(zero_pairs(heads, np.ones((1, 1), np.int32)), Carry())
    equal(-score[0, :, 0, 0], alibi_slopes(heads), atol=0)


@pytest.mark.parametrize(
    "num_buckets, max_distance",
    [(32, 128), (8, 16), (8, 5), (9, 128), (36, 32), (2, 3), (3, 5), (16, 1024)],
)
def test_t5_buckets_are_exact(num_buckets, max_distance):
    """Against whole-number arithmetic: a rounded logarithm would misplace the distances on a
    boundary.
    """
    exact = [t5_bucket(distance, num_buckets, max_distance) for distance in range(max_distance + 1)]
    assert buckets(num_buckets, max_distance).tolist() == exact
    t5 = create("t5", heads=1, num_buckets=num_buckets, max_distance=max_distance)
    t5.table[...] = jnp.arange(num_buckets, dtype=jnp.float64)[:, None]
    distances = np.array([0, 1, max_distance - 1, max_distance, max_distance + 1, 10**6], np.int32)[
        :, None
    ]
    score, _ = t5.score(zero_pairs(1, distances), Carry())
    assert score[:, 0, 0, 0].tolist() == [
        t5_bucket(int(d), num_buckets, max_distance) for d in distances[:, 0]
    ]


@pytest.mark.parametrize("form", ["interpolation=4", "ntk=8", "yarn=(4,64)", "llama3=(8,1,4,512)"])
@pytest.mark.parametrize("base, longest, first", [(100, 40, 7), (10_000, 1000, 9)])
def test_bands_without_turns_are_chosen_before_others_are_stretched(form, base, longest, first):
    """16 pairs: the wavelength of band c is 2π·base^(c/16), before a form makes it s times as
    long.
    """
    spec = f"rope(base={base},longest={longest},{form},magnitude=1)"
    encoding = encodings.create(spec, num_heads=1, head_dim=32, rngs=nnx.Rngs(0))
    turned = encoding.rotate(jnp.ones((1, 1, 1, 32)), (), np.array([[1]], np.int32))
    rule = rule_of(spec, {}, SIZES._replace(head_dim=32))
    oracle = rule.rotate(np.ones(32), Token(1, (), 0, False))
    still = np.arange(16) >= first
    np.testing.assert_array_equal(np.asarray(turned)[0, 0, 0, :16] == 1, still)
    np.testing.assert_array_equal(np.asarray(oracle)[:16] == 1, still)


def test_initial_parameters():
    """The initial parameters that papers state."""
    fire, kerple = create("fire"), create("kerple")
    assert float(fire.c[...]) == pytest.approx(0.1) and float(fire.threshold_scale[...]) == 1
    assert float(create("fire(c=2)").c[...]) == 2
    assert np.all(np.asarray(jax.nn.softplus(kerple.r1[...])) < 2)
    assert np.all(np.asarray(jax.nn.softplus(kerple.r2[...])) < 1)
    for spec in ("learned(max_length=1000,stddev=0.5)", "relative(max_distance=1000,stddev=0.5)"):
        (table,) = jax.tree.leaves(nnx.state(create(spec)))
        assert table.shape == (1000, WIDTH) and float(jnp.std(table)) == pytest.approx(0.5, rel=0.1)
    (table,) = jax.tree.leaves(
        nnx.state(create("t5(num_buckets=1000,max_distance=2000,stddev=0.5)"))
    )
    assert table.shape == (1000, HEADS) and float(jnp.std(table)) == pytest.approx(0.5, rel=0.1)


def test_initial_parameters_of_encodings_that_know_the_token():
    """At 8 heads of 64 and width 512; what is random, within five standard deviations."""

    def params(spec):
        encoding = encodings.create(
            spec, num_heads=8, head_dim=64, max_length=128, rngs=nnx.Rngs(0)
        )
        return {
            path[-1]: np.asarray(leaf[...], np.float64)
            for path, leaf in nnx.to_flat_state(nnx.state(encoding))
        }

    def log_sigmoid(x):
        return -np.log1p(np.exp(-x))

    def has_stddev(x, stddev):
        assert abs(x.std() / stddev - 1) < 5 / (2 * x.size) ** 0.5

    bands = np.arange(32)
    initial = params("grape(base=100,step=0.5)")
    np.testing.assert_allclose(np.log1p(np.exp(initial["bias"])), 0.5, rtol=1e-6)
    np.testing.assert_allclose(np.exp(initial["log_frequencies"]), 100 ** (-bands / 32), rtol=1e-6)
    assert not initial["kernel"].any()
    initial = params("mapformer(world=16,fastest=3)")
    np.testing.assert_allclose(
        initial["frequencies"], 3 * (2 * np.pi / (16 * 3)) ** (bands / 32), rtol=1e-6
    )
    initial = params("fox(gate=head,longest=16)")
    np.testing.assert_allclose(log_sigmoid(initial["bias"]), -1 / np.geomspace(2, 16, 8), rtol=1e-5)
    for spec, bias, stddev in (
        ("fox(bias=5,stddev=0.1)", 5, 0.1),
        ("wall(bias=3,stddev=0.5)", 3, 0.5),
    ):
        initial = params(spec)
        assert (initial["bias"] == bias).all()
        has_stddev(initial["kernel"], stddev)
    initial = params("darope(alpha=0.5,stddev=0.3)")
    assert (initial["alpha"] == 0.5).all()
    has_stddev(initial["kernel"], 0.3)
    has_stddev(params("carope(stddev=0.4)")["kernel"], 0.4)
    for kernel in params("repo(stddev=0.4)").values():
        assert 2.5 < np.abs(kernel).max() / 0.4 <= 3
        has_stddev(kernel, 0.4 * 0.98658)  # of a normal number cut at three standard deviations
    for kernel in params("cable(stddev=0.4)").values():
        has_stddev(kernel, 0.4)
    initial = params("cable(form=code,stddev=0.4)")
    assert (initial["step_bias"] == 0).all()
    has_stddev(initial["step_kernel"], 0.4)
    for leaf in params("tra").values():
        assert 0.7 < np.abs(leaf).max() * 512**0.5 <= 1 and leaf.min() < 0 < leaf.max()
    np.testing.assert_allclose(np.log1p(np.exp(params("grape_additive")["rate"])), 1, rtol=1e-6)
    phase = params("pope(phase=uniform)")["phase"]
    assert -2 * np.pi <= phase.min() < -6 and -0.3 < phase.max() <= 0
    assert not params("pope")["phase"].any()
    assert (params("ssmax(scale=0.5)")["scale"] == 0.5).all()
    assert (params("path(forget=True,bias=2)")["forget_bias"] == 2).all()
    for spec in ("path(width=4)", "selective_rope(width=4)"):
        bound = np.abs(params(spec)["convolution"]).max()
        assert 0.49 < bound <= 0.5


@every(few=FIRSTS)
def test_initial_parameters_depend_on_the_key_only(spec):
    first, again = (jax.tree.leaves(nnx.state(create_from_key(spec, 0))) for _ in range(2))
    other = jax.tree.leaves(nnx.state(create_from_key(spec, 1)))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    random = [not np.array_equal(a, b) for a, b in zip(first, other, strict=True)]
    # No parameter is random.
    constant = all(np.all(leaf == leaf.flat[0]) for leaf in map(np.asarray, first))
    # A known sequence.
    published = {"fox(gate=head,longest=16.0)", "grape", "grape(base=100,step=1.0,per_head=True)"}
    assert any(random) or constant or spec in published


def test_values_that_turn_need_the_width_of_keys():
    encoding, k = create_from_key("mapformer(values=True)", 0), jnp.ones((1, 3, 4, 4))
    message = "values=True turns 4 features of each value, but values have 2: leave values=False"
    with pytest.raises(ConfigError, match=message):
        attend(k, k, k[..., :2], encoding=encoding, x=jnp.ones((1, 3, 16)))


def create_from_key(spec, seed):
    return encodings.create(spec, num_heads=4, head_dim=4, max_length=12, rngs=nnx.Rngs(seed))
