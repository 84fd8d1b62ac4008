"""`attend` against the oracle: masks, windows, segments, lengths, groups of heads, dropout, and the
user's mistakes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax import attention, encodings
from cope_jax.attention import attend
from cope_jax.encodings import AttentionShape, Encoding
from cope_jax.encodings.base import NoOptions
from cope_jax.errors import ConfigError
from tests.encodings.cases import build, parameters, problem, rule_of
from tests.oracle.attention import attention as oracle_attention
from tests.oracle.attention import cope_backward
from tests.oracle.encodings import Sizes

SIZES = Sizes(heads=4, kv_heads=2, head_dim=4, model_dim=6, max_length=12)
SEGMENTS = np.array([[0, 0, 1, 1, 1, 2], [5, 5, 5, 5, 3, 3]], np.int32)
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window 1": {"window": 1},
    "window 2": {"window": 2},
    "window beyond": {"window": 50},
    "bidirectional window": {"causal": False, "window": 2},
    "segments": {"segments": SEGMENTS},
    "segments window": {"segments": SEGMENTS, "window": 2},
    "bidirectional segments": {"segments": SEGMENTS, "causal": False},
}
ENCODINGS = [
    "none",
    "t5(num_buckets=4,max_distance=5)",
    "cope(npos_max=3)",
    "cope(gate=value,npos_max=4)+rope",
]


def arrays_of(seed=0, length=6, keys=6, batch=2, sizes=SIZES):
    queries, others = problem(seed, batch, length, sizes), problem(seed + 100, batch, keys, sizes)
    return queries["q"], others["k"], others["v"]


def check(spec, q, k, v, segments=None, q_segments=None, implementation="auto", **mask):
    """`attend` equals the oracle in every example of the batch."""
    graphdef, state = build(spec)
    q_segments = segments if q_segments is None else q_segments
    out = attend(
        jnp.asarray(q),
        jnp.asarray(k),
        jnp.asarray(v),
        encoding=nnx.merge(graphdef, state),
        q_segment_ids=q_segments,
        k_segment_ids=segments,
        implementation=implementation,
        **mask,
    )
    rule = rule_of(spec, parameters(state))
    for b in range(len(q)):
        rows = {} if segments is None else {"q_segments": q_segments[b], "k_segments": segments[b]}
        exact = oracle_attention(q[b], k[b], v[b], rule, **rows, **mask)
        np.testing.assert_allclose(out[b], exact, rtol=0, atol=1e-12)
    return np.asarray(out)


@pytest.mark.parametrize("spec", ENCODINGS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "implementation", ["full", "blockwise", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_masks(spec, mask, implementation, x64):
    check(spec, *arrays_of(), implementation=implementation, **mask)


@pytest.mark.parametrize("spec", ENCODINGS)
@pytest.mark.parametrize("length, keys", [(3, 6), (6, 3)])
def test_the_last_query_stands_at_the_last_key(spec, length, keys, x64):
    q, k, v = arrays_of(length=length, keys=keys)
    out = check(spec, q, k, v)
    check(spec, q, k, v, window=2)
    if length > keys:
        assert np.all(out[:, : length - keys] == 0), "a query before all keys sees none"
    segments = np.array([[0] * keys, [1] * keys], np.int32)
    check(spec, q, k, v, segments=segments, q_segments=segments[:, :1].repeat(length, axis=1))


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=() if "cope" in spec else pytest.mark.slow) for spec in ENCODINGS],
)
def test_a_chunk_of_queries_is_the_end_of_the_whole(spec, x64):
    """The last queries alone give the last rows: what decoding and chunked evaluation rest on."""
    q, k, v = (jnp.asarray(a) for a in arrays_of())
    encoding = nnx.merge(*build(spec))

    @jax.jit
    def ends(q, k, v):
        how = {"encoding": encoding, "implementation": "full"}
        return [attend(q[:, start:], k, v, **how) for start in (0, 1, 4, 5)]

    whole, *chunks = ends(q, k, v)
    for chunk in chunks:
        np.testing.assert_allclose(chunk, whole[:, -chunk.shape[1] :], rtol=0, atol=1e-14)


@pytest.mark.parametrize("spec", ENCODINGS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads_equal_repeated_heads(spec, groups, x64):
    q, k, v = (jnp.asarray(a) for a in arrays_of(sizes=SIZES._replace(kv_heads=groups)))
    graphdef, state = build(spec, sizes=SIZES._replace(kv_heads=groups))
    grouped = attend(q, k, v, encoding=nnx.merge(graphdef, state), implementation="full")
    graphdef, _ = build(spec, sizes=SIZES._replace(kv_heads=4))
    k, v = (jnp.repeat(a, 4 // groups, axis=2) for a in (k, v))
    repeated = attend(q, k, v, encoding=nnx.merge(graphdef, state), implementation="full")
    np.testing.assert_allclose(grouped, repeated, rtol=0, atol=1e-14)


PAIRS = np.array(
    [[1, 1, 0, 0, 1], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 0, 1, 1, 1]], bool
)


@pytest.mark.parametrize(
    "mask",
    [{}, {"window": 3}, {"causal": False}, {"mask": PAIRS}, {"mask": PAIRS, "causal": False}],
)
def test_gradients_under_masks(mask, x64):
    """CoPE's, against its backward formulae."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(5, 4)) for _ in range(4))
    encoding = encodings.create("cope", num_heads=1, head_dim=4, npos_max=3, rngs=nnx.Rngs(0))
    encoding.table[...] = table = jnp.asarray(rng.normal(size=(3, 4)))
    options = mask | ({"mask": mask["mask"][None, None]} if "mask" in mask else {})

    @jax.jit
    def gradients(*qkv):
        def out(*qkv):
            return attend(*(a[None, :, None] for a in qkv), encoding=encoding, **options)[0, :, 0]

        return jax.vjp(out, *qkv)[1](dout)

    exact = cope_backward(q, k, v, np.asarray(table), dout, **mask)[:3]
    for computed, gradient in zip(gradients(q, k, v), exact, strict=True):
        np.testing.assert_allclose(computed, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (2, 1, 1, 6)], ids=str)
def test_a_mask_may_have_1_for_an_axis(shape, x64):
    q, k, v = (jnp.asarray(a) for a in arrays_of())
    mask = np.random.default_rng(0).random(shape) < 0.6
    how = {"encoding": nnx.merge(*build("cope(npos_max=3)")), "causal": False}
    exact = attend(q, k, v, **how, mask=np.broadcast_to(mask, (2, 1, 6, 6)))
    for implementation in ("full", "blockwise"):
        out = attend(q, k, v, **how, mask=mask, implementation=implementation)
        np.testing.assert_allclose(out, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize("spec", ENCODINGS)
def test_rows_without_keys_are_zero_and_have_zero_gradients(spec, x64):
    q, k, v = (jnp.asarray(a) for a in arrays_of())
    encoding = nnx.merge(*build(spec))
    # Query 3 is of a segment that no key is of.
    alone = np.where(np.arange(6) == 3, 9, 0)[None].astype(np.int32)

    def out(q, k, v):
        return attend(
            q, k, v, encoding=encoding, q_segment_ids=alone, k_segment_ids=np.zeros_like(alone)
        )

    @jax.jit
    def run(q, k, v):
        value, pull = jax.vjp(out, q, k, v)
        return value, pull(jnp.ones_like(value)), pull(jnp.zeros_like(value).at[:, 3].set(1.0))

    value, gradients, only = jax.device_get(run(q, k, v))
    assert np.all(value[:, 3] == 0) and np.all(np.abs(value[:, [2, 4]]) > 0)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert np.all(gradients[0][:, 3] == 0)
    assert all(np.all(gradient == 0) for gradient in only)


def test_large_logits_do_not_overflow():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = encodings.create("none", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    out, pull = jax.vjp(
        lambda q: attend(1e4 * q, k, v, encoding=encoding, implementation="full"), q
    )
    assert np.isfinite(out).all() and np.isfinite(pull(out)[0]).all()


def weights_by_one_hot_values(key, rate, length=8, batch=40):
    """The attention weights themselves: the values are the unit vectors."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(batch, length, 2, length)), jnp.float32) for _ in range(2))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], q.shape)
    encoding = encodings.create("none", num_heads=2, head_dim=length, rngs=nnx.Rngs(0))
    return np.asarray(
        attend(
            q, k, v, encoding=encoding, dropout_rate=rate, dropout_key=key, implementation="full"
        )
    )


def test_dropout_zeroes_some_weights_and_scales_the_rest():
    plain = weights_by_one_hot_values(None, 0.0)
    np.testing.assert_allclose(plain.sum(axis=-1), 1, rtol=0, atol=1e-6)
    dropped = weights_by_one_hot_values(jax.random.key(1), 0.25)
    seen = plain > 0
    gone = dropped[seen] == 0
    assert abs(gone.mean() - 0.25) < 0.03
    np.testing.assert_allclose(dropped[seen][~gone], plain[seen][~gone] / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(dropped, weights_by_one_hot_values(jax.random.key(1), 0.25))
    assert not np.array_equal(dropped, weights_by_one_hot_values(jax.random.key(2), 0.25))
    np.testing.assert_array_equal(plain, weights_by_one_hot_values(jax.random.key(1), 0.0))
    # evaluation: no key, no dropout.
    np.testing.assert_array_equal(plain, weights_by_one_hot_values(None, 0.25))


@pytest.mark.parametrize(
    "length, keys, name",
    [
        (1, 5000, "full"),
        (16, 600, "full"),
        (60, 60, "full"),
        (64, 64, "blockwise"),
        (17, 300, "blockwise"),
    ],
)
def test_auto_takes_what_was_measured_to_be_faster(length, keys, name, monkeypatch):
    taken = []
    no_kernel = attention.Reason("there is no kernel")
    monkeypatch.setitem(attention.BACKENDS, "fused", lambda encoding, request: no_kernel)
    for name_of_plan in ("full", "blockwise"):

        def run(name_of_plan=name_of_plan):
            taken.append(name_of_plan)
            return jnp.zeros((1, length, 1, 4))

        plan = attention.Plan(name_of_plan, run)
        monkeypatch.setitem(
            attention.BACKENDS, name_of_plan, lambda encoding, request, plan=plan: plan
        )
    q, k = jnp.ones((1, length, 1, 4)), jnp.ones((1, keys, 1, 4))
    attend(q, k, k, encoding=encodings.create("none", num_heads=1, head_dim=4, rngs=nnx.Rngs(0)))
    assert taken == [name]


def test_dtype_of_the_output_is_that_of_the_values():
    encoding = encodings.create("cope", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        qkv = [jax.ShapeDtypeStruct(a.shape, dtype) for a in arrays_of()]
        assert jax.eval_shape(lambda *a: attend(*a, encoding=encoding), *qkv).dtype == dtype


SHAPE = AttentionShape(4, 4, 2)


class NamesFeatures(Encoding):
    """Adds to a pair's logit what tells queries, keys and values apart."""

    def features(self, tokens, state):
        assert tokens.x is None and state is None
        return {"k": tokens.k[..., :1], "v": tokens.v[..., :1]}, ()

    def score(self, pairs, carry):
        added = pairs.k_features["k"][..., 0] - 2 * pairs.k_features["v"][..., 0]
        return pairs.logits + jnp.repeat(added, 2, axis=1)[:, :, None], carry


def test_features_are_of_these_queries_keys_and_values():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = NamesFeatures(NoOptions(), SHAPE, rngs=nnx.Rngs(0))
    out = attend(q, k, v, encoding=encoding, implementation="full")
    logits = np.einsum("blhk,bmhk->bhlm", q, np.repeat(k, 2, 2)) / 2
    logits += np.repeat(np.moveaxis(k[..., 0] - 2 * v[..., 0], 1, 2), 2, 1)[:, :, None]
    weights = np.exp(np.where(np.tri(6, dtype=bool), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        out, np.einsum("bhlm,bmhk->blhk", weights, np.repeat(v, 2, 2)), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["cope", "cope_signed"])
@pytest.mark.parametrize("implementation", ["full", "blockwise", "auto"])
def test_without_keys_the_output_is_zero(name, implementation):
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = encodings.create(name, num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    out = attend(
        q, k[:, :0], v[:, :0], encoding=encoding, causal=False, implementation=implementation
    )
    assert out.shape == (2, 6, 4, 4) and not out.any()


def test_positions_and_segments_may_be_lists():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = encodings.create("rope", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    lists = dict(q_positions=[[0, 1, 2, 0, 1, 2]], k_positions=[[0, 1, 2, 0, 1, 2]])
    lists |= dict(q_segment_ids=[[0, 0, 0, 1, 1, 1]], k_segment_ids=[[0, 0, 0, 1, 1, 1]])
    arrays = {name: np.array(ids, np.int32) for name, ids in lists.items()}
    both = [attend(q, k, v, encoding=encoding, **given) for given in (lists, arrays)]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, jnp.uint32])
def test_positions_may_be_integers_of_any_type(dtype):
    """A distance below 0, or above 127, is the same number; it was 2**32 less, or wrapped around."""
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = encodings.create("alibi", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    positions = np.array(
        [[-100, 0, 1, 2, 3, 100]] if dtype == np.int8 else [[0, 1, 2, 3, 7, 9]], np.int32
    )
    computed, exact = (
        attend(q, k, v, encoding=encoding, causal=False, q_positions=places, k_positions=places)
        for places in (
            jnp.asarray(positions, dtype) if dtype is jnp.uint32 else positions.astype(dtype),
            positions,
        )
    )
    np.testing.assert_array_equal(computed, exact)


def ones(*shape):
    return jnp.ones(shape)


MISTAKES = {
    "positions of 64 bits": (
        dict(q_positions=2**31 + np.arange(6)[None]),
        "q_positions must fit into 32 bits, got 2147483648 to 2147483653",
    ),
    "three axes": (dict(q=ones(2, 6, 4)), "B, L, H, K"),
    "batch": (dict(q=ones(3, 6, 4, 4)), "same batch"),
    "head width": (dict(q=ones(2, 6, 4, 5)), "same batch"),
    "keys without values": (dict(k=ones(2, 5, 2, 4)), "same batch"),
    "heads of values": (dict(v=ones(2, 6, 1, 4)), "same batch"),
    "groups": (dict(q=ones(2, 6, 3, 4)), "a multiple of the number of key/value heads"),
    "name of an encoding": (
        dict(encoding="rope"),
        "encoding must be an encoding of cope_jax.encodings.create, got 'rope'",
    ),
    "implementation": (dict(implementation="ful"), "did you mean 'full'"),
    "heads of the encoding": (
        dict(q=ones(2, 6, 8, 4)),
        "was built for num_heads, num_kv_heads, head_dim = (4, 2, 4)",
    ),
    "heads before tokens": (
        dict(q=ones(2, 4, 2, 4)),
        "swap two axes, attend takes [B, L, H, K]",
    ),
    "name, and blocks": (
        dict(encoding="rope", implementation="blockwise"),
        "encoding must be an encoding of",
    ),
    "queries without keys of their own": (
        dict(
            k=ones(2, 5, 2, 4),
            v=ones(2, 5, 2, 4),
            x=ones(2, 5, 16),
            encoding=encodings.create(
                "fox", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0)
            ),
        ),
        "this encoding needs at least as many keys as queries, got 6 queries and 5 keys",
    ),
    "window": (dict(window=0), "at least 1"),
    "half a window": (dict(window=2.5), "window must be int or None, got 2.5 of type float"),
    "a switch as window": (dict(window=True), "window must be int or None, got True of type bool"),
    "whole numbers": (dict(v=jnp.ones((2, 6, 2, 4), jnp.int32)), "but v has int32: convert v"),
    "fractions as segments": (
        dict(q_segment_ids=np.arange(6.0)[None], k_segment_ids=np.arange(6)[None]),
        "q_segment_ids must be integers, got float64",
    ),
    "rate that rounds to 1": (
        dict(dropout_rate=1 - 1e-10, dropout_key=jax.random.key(0)),
        "dropout_rate",
    ),
    "rate": (dict(dropout_rate=1.0, dropout_key=jax.random.key(0)), "dropout_rate"),
    "negative rate": (dict(dropout_rate=-0.1), "dropout_rate"),
    "one segment ids": (dict(q_segment_ids=np.zeros((2, 6), np.int32)), "both"),
    "positions": (
        dict(q_positions=np.arange(5, dtype=np.int32)[None]),
        "q_positions must have shape [2, 6] or [1, 6], got [1, 5]",
    ),
    "positions without batch": (
        dict(k_positions=np.arange(6, dtype=np.int32)),
        "k_positions must have shape",
    ),
    "blocks": (dict(blocks=(8, 0, 8)), "blocks must be three sizes of at least 1, got (8, 0, 8)"),
    "mask of numbers": (
        dict(mask=ones(2, 1, 6, 6)),
        "mask must be boolean, True where a query may see a key, got float32; numbers to add are a bias",
    ),
    "mask of heads": (
        dict(mask=ones(2, 4, 6, 6) > 0),
        "[2, 1, 6, 6], where any axis may have size 1, got",
    ),
    "mask of other keys": (dict(mask=ones(2, 1, 6, 5) > 0), "mask must have shape [2, 1, 6, 6]"),
    "mask without heads": (dict(mask=ones(2, 6, 6) > 0), "mask must have shape"),
    "queries of some keys": (
        dict(
            encoding=encodings.create(
                "selective", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0)
            )
        )
        | dict(q=ones(2, 5, 4, 4), implementation="full"),
        "couples the queries, got 5 queries and 6 keys: give the queries of all keys",
    ),
    "more queries than keys with features": (
        dict(
            encoding=NamesFeatures(NoOptions(), SHAPE, rngs=nnx.Rngs(0)),
            k=ones(2, 5, 2, 4),
            v=ones(2, 5, 2, 4),
        ),
        "got 6 queries and 5 keys: give the keys of the queries' own tokens",
    ),
    "segments": (
        dict(q_segment_ids=np.zeros((2, 6), np.int32), k_segment_ids=np.zeros((2, 5), np.int32)),
        "k_segment_ids must have shape",
    ),
}


@pytest.mark.parametrize("change, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_clear_line(change, message):
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays_of())
    encoding = encodings.create("none", num_heads=4, num_kv_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    arguments = dict(q=q, k=k, v=v, encoding=encoding) | change
    with pytest.raises(ConfigError) as error:
        attend(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("implementation", ["full", "blockwise"])
def test_a_hidden_key_that_is_not_finite_reaches_no_output_but_a_hidden_value_does(implementation):
    """As docs/attention.md says: the weight of a hidden value is 0, and 0 times NaN is NaN."""
    q, k, v = (jax.random.normal(jax.random.key(seed), (1, 96, 1, 4)) for seed in range(3))
    encoding = encodings.create(
        "cope+rope", num_heads=1, head_dim=4, cope={"npos_max": 8}, rngs=nnx.Rngs(0)
    )

    @jax.jit
    def seen(k, v):  # by the first queries, which see neither key 50 nor value 50
        return attend(q, k, v, encoding=encoding, implementation=implementation)[:, :50]

    expected = seen(k, v)
    np.testing.assert_array_equal(seen(k.at[:, 50].set(jnp.nan), v), expected)
    np.testing.assert_array_equal(seen(k, v.at[:, 50].set(1e30)), expected)
    assert jnp.isnan(seen(k, v.at[:, 50].set(jnp.nan))).any()


@pytest.mark.parametrize("implementation", ["auto", "full", "blockwise", "fused"])
def test_parameters_of_64_bits_need_64_bit_jax(implementation):
    """A kernel is planned for float32, and would then meet float64."""
    encoding = encodings.create("kerple", num_heads=2, head_dim=16, rngs=nnx.Rngs(0))
    q = ones(1, 128, 2, 16)
    with jax.enable_x64():
        nnx.update(encoding, jax.tree.map(lambda p: p.astype("float64"), nnx.state(encoding)))
        assert attend(q, q, q, encoding=encoding, implementation="full").shape == q.shape
    message = "^the encoding has parameters of type float64, which needs 64-bit JAX: set JAX_ENABLE"
    with pytest.raises(ConfigError, match=message):
        attend(q, q, q, encoding=encoding, implementation=implementation)
