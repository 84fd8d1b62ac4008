"""Blockwise attention says what full attention and the oracle say, in value and every gradient, for
every encoding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cope_jax import encodings
from cope_jax.attention import BlockSizes, attend
from cope_jax.encodings import AttentionShape, Carry, Encoding, Traits
from cope_jax.encodings.base import NoOptions
from cope_jax.encodings.compose import Composed
from cope_jax.encodings.cope import CoPE, CoPEConfig
from cope_jax.ops.grouped_matmul import content_logits
from cope_jax.ops.sums import suffix_sum
from tests.attention.problems import (
    Data,
    arrays_of,
    assert_equal,
    encoding_of,
    full_and_blockwise,
    is_causal_only,
    oracle,
    plain,
)
from tests.encodings.cases import (
    BATCH,
    CASES,
    FEWEST,
    SIZES,
    build,
    every,
    features_of,
    parts,
    splits_queries,
)
from tests.oracle.encodings import Sizes

LENGTH, KEYS = 7, 11
# Without shrinking: each example may compile, and is small as it is.
few = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@functools.cache
def compiled(spec, blocks, causal=True, window=None, rate=0.0, sizes=SIZES):
    graphdef, _ = build(spec, sizes=sizes)
    return jax.jit(
        lambda state, arrays, data: full_and_blockwise(
            graphdef,
            state,
            arrays,
            data,
            blocks=blocks,
            causal=causal,
            window=window,
            dropout_rate=rate,
        )
    )


def random_data(seed, length, keys, batch=BATCH, ordered=True):
    """Gapped positions; segments in any order, some of which no key is of; with `ordered=False` any
    places too.
    """
    rng = np.random.default_rng(seed)
    data = plain(length, keys, batch)
    gapped = np.stack([np.sort(rng.choice(12, keys, replace=False)) for _ in range(batch)]).astype(
        np.int32
    )
    queries = np.maximum(data.q_indices, 0)
    k_segments = rng.integers(0, rng.integers(1, 4), (batch, keys), dtype=np.int32)
    q_segments = np.where(rng.random((batch, length)) < 0.1, 9, k_segments[:, queries]).astype(
        np.int32
    )
    data = Data(gapped[:, queries], gapped, q_segments, k_segments, data.q_indices, data.k_indices)
    if not ordered:
        data = data._replace(
            q_indices=rng.integers(0, keys, length, dtype=np.int32),
            k_indices=rng.integers(-2, keys, keys, dtype=np.int32),
        )
    return data


@every(few=FEWEST | {"cope_two_sided(npos_max=4)"})
def test_every_encoding(spec, x64):
    """Strips and blocks that do not divide; several near and far blocks; masks of all kinds."""
    if not splits_queries(spec):
        return  # only full attention runs it
    run = compiled(spec, BlockSizes(3, 2, 3))
    _, state = build(spec)
    arrays = arrays_of(LENGTH, KEYS)
    data = plain(LENGTH, KEYS)
    two = np.array([[0] * 4 + [1] * 7, [3] * 9 + [1] * 2], np.int32)
    unsorted = np.array(
        [[1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1], [2, 2, 0, 0, 2, 2, 5, 5, 0, 0, 2]], np.int32
    )
    kinds = [data] + [
        data._replace(q_segments=ids[:, -LENGTH:], k_segments=ids) for ids in (two, unsorted)
    ]
    kinds.append(
        kinds[1]._replace(
            q_segments=np.where(np.arange(LENGTH) == 2, 9, two[:, -LENGTH:]).astype(np.int32)
        )
    )
    # Whether a query may see keys with hidden ones between them.
    broken = not {"path", "wall"} & set(dict(parts(spec)))
    for number, kind in enumerate(kinds):
        if number == 2 and not broken:
            continue
        full, blockwise = run(state, arrays, kind)
        assert_equal(blockwise, full)
        if number in (0, 2 if broken else 1):
            for example in range(BATCH):
                exact = oracle(spec, state, arrays, kind, example)
                np.testing.assert_allclose(blockwise[0][example], exact, rtol=0, atol=1e-12)
    if encoding_of(spec).traits.sink_value == "zero":
        assert np.all(np.asarray(blockwise[0])[:, 2] == 0), "a query without keys"
    for seed in range(10 if broken else 0):
        full, blockwise = run(state, arrays_of(LENGTH, KEYS, seed), random_data(seed, LENGTH, KEYS))
        assert_equal(blockwise, full)
        if not is_causal_only(spec):
            full, blockwise = run(state, arrays, random_data(seed, LENGTH, KEYS, ordered=False))
            assert_equal(blockwise, full)


def known(data):
    """The same with the places of `prepare`."""
    return data._replace(q_indices=None, k_indices=None)


@pytest.mark.parametrize("keys", [5, slow(KEYS)])
@pytest.mark.parametrize(
    "spec", ["cope(npos_max=4)", slow("relative"), slow("cope(position=slope)+fire")]
)
def test_one_block_of_keys_whose_places_are_known(spec, keys, x64):
    """Each strip of two then sees a span of its own; the first queries of more than there are keys
    see none.
    """
    run = compiled(spec, BlockSizes(2, KEYS, KEYS), window=4)
    _, state = build(spec)
    for seed in range(4):
        arrays, data = arrays_of(LENGTH, keys, seed), known(random_data(seed, LENGTH, keys))
        full, blockwise = run(state, arrays, data)
        assert_equal(blockwise, full)
        exact = oracle(spec, state, arrays, data, 0, window=4)
        np.testing.assert_allclose(blockwise[0][0], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["cope_two_sided(npos_max=4)", slow("path(rank=3,forget=True)")])
def test_strips_that_share_a_span(spec, x64, monkeypatch):
    """Seven strips of one query share three spans."""
    monkeypatch.setattr("cope_jax.attention.blockwise.MOST_SPANS", 2)
    monkeypatch.setattr("cope_jax.attention.blockwise.FEW_SPANS", 3)
    run = compiled(spec, BlockSizes(1, KEYS, KEYS), window=6)
    _, state = build(spec)
    arrays, data = arrays_of(LENGTH, KEYS), known(random_data(0, LENGTH, KEYS))
    data = data._replace(q_segments=None, k_segments=None)
    full, blockwise = run(state, arrays, data)
    assert_equal(blockwise, full)


def masks(length, keys):
    """Two-sided within a prefix, then padding; and masks at random, some of whose queries and keys
    are all hidden.
    """
    rng, i, j = np.random.default_rng(0), *np.ogrid[keys - length : keys, :keys]
    prefixes, lengths = (np.array(rows)[:, None, None, None] for rows in ([6, 3], [keys, 7]))
    yield (j < prefixes) | (j <= i)
    yield (j < lengths) & (i >= 0)
    for share in (0.1, 0.3, 0.6, 0.9):
        queries, others = (rng.random((BATCH, 1, n)) < 0.8 for n in (length, keys))
        yield (
            (rng.random((BATCH, 1, length, keys)) < share) & queries[..., None] & others[:, :, None]
        )
    yield np.zeros((BATCH, 1, length, keys), bool)


@pytest.mark.parametrize(
    "spec, places",
    [
        ("fox", "any"),
        ("cope(npos_max=4)", "known"),
        *(slow(spec, "any") for spec in ("cope(npos_max=3)", "rope", "relative")),
    ],
)
def test_given_masks(spec, places, x64):
    """Alone, with segments, and with causality and a window; blocks are skipped, or one span whose
    places are known.
    """
    blocks = BlockSizes(3, 2, 3) if places == "any" else BlockSizes(2, KEYS, KEYS)
    rules = {
        "causal": is_causal_only(spec) or places == "known",
        "window": 6 if places == "known" else None,
    }
    run = compiled(spec, blocks, **rules)
    _, state = build(spec)
    for seed, mask in enumerate(masks(LENGTH, KEYS)):
        for data in (plain(LENGTH, KEYS), random_data(seed, LENGTH, KEYS)):
            data = (known(data) if places == "known" else data)._replace(mask=mask)
            arrays = arrays_of(LENGTH, KEYS, seed)
            full, blockwise = run(state, arrays, data)
            assert_equal(blockwise, full)
            for example in range(BATCH):
                exact = oracle(spec, state, arrays, data, example, **rules)
                np.testing.assert_allclose(blockwise[0][example], exact, rtol=0, atol=1e-12)
    assert np.all(np.asarray(blockwise[0]) == 0), "the last mask hides all"


SHAPE = AttentionShape(SIZES.heads, SIZES.head_dim, SIZES.kv_heads)


class Silent(CoPE):
    """CoPE of which attention is not told that it keeps the law of blocks."""

    traits = Traits(splits_keys=False, causal_only=True)


class Curious(Encoding):
    """Reads all that `score` is given, keys too, and bends the logits."""

    def features(self, tokens, state):
        number = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)[None, :, None]
        return {"q": tokens.q, "x": tokens.x[:, :, None], "number": number}, ()

    def score(self, pairs, carry):
        added_BHLM = content_logits(pairs.q**2, pairs.k) + content_logits(pairs.q, pairs.v)
        distance_B1LM = (pairs.distance + pairs.k_features["number"][:, :, None] % 3).astype(
            pairs.logits.dtype
        )
        of_pair_B1LM = (
            pairs.k_features["x"].sum(axis=-1)[:, :, None]
            * pairs.q_features["x"].prod(axis=-1)[..., None]
        )
        of_query_BHL1 = pairs.q_features["q"].sum(axis=-1, keepdims=True)
        return jnp.sin(
            pairs.logits
        ) * of_query_BHL1 + added_BHLM + distance_B1LM * of_pair_B1LM / 9, carry


def cope_of(npos_max, kind=CoPE, gate="value"):
    encoding = kind(CoPEConfig(npos_max=npos_max, gate=gate), SHAPE, rngs=nnx.Rngs(0))
    encoding.table[...] = np.random.default_rng(0).normal(size=(npos_max, SIZES.head_dim))
    return encoding


class Counting(Encoding):
    """Has integers where others have numbers that are learned or constant."""

    def __init__(self, config, shape, *, rngs):
        super().__init__(config, shape, rngs=rngs)
        self.order = nnx.Variable(np.arange(shape.num_heads, dtype=np.int32))
        self.scale_H = nnx.Param(np.linspace(0.5, 1.5, shape.num_heads))

    def initial_carry(self, q_BHLK, q_features):
        return Carry(
            sums=jnp.zeros(q_BHLK.shape[:3]), constants=jnp.full(q_BHLK.shape[:3], 2, jnp.int32)
        )

    def score(self, pairs, carry):
        counts_BHLM = carry.sums[..., None] + suffix_sum(pairs.mask.astype(pairs.logits.dtype))
        scale_1H11 = jnp.take(self.scale_H[...], self.order[...])[None, :, None, None]
        logits_BHLM = (
            pairs.logits * scale_1H11
            - 0.1 * carry.constants[..., None].astype(counts_BHLM.dtype) * counts_BHLM
        )
        return logits_BHLM, carry._replace(sums=counts_BHLM[..., 0])


class Turning(Encoding):
    """A carry that is neither sum nor constant: nearest first, each key turns the query a little
    towards itself.
    """

    def initial_carry(self, q_BHLK, q_features):
        return Carry(state=q_BHLK)

    def score(self, pairs, carry):
        repeats = pairs.q.shape[1] // pairs.k.shape[1]

        def see(q_BHLK, key):
            k_BHK, mask_B1L = key
            q_BHLK = (
                q_BHLK + 0.1 * mask_B1L[..., None].astype(q_BHLK.dtype) * jnp.sin(k_BHK)[:, :, None]
            )
            return q_BHLK, jnp.sum(q_BHLK * k_BHK[:, :, None], axis=-1)

        keys = (
            jnp.moveaxis(jnp.repeat(pairs.k, repeats, axis=1), 2, 0),
            jnp.moveaxis(pairs.mask, 3, 0),
        )
        state, logits = jax.lax.scan(see, carry.state, keys, reverse=True)
        return jnp.moveaxis(logits, 0, -1), carry._replace(state=state)


OTHERS = {
    "does not split keys": lambda: cope_of(4, Silent),
    "reads everything": lambda: Curious(NoOptions(), SHAPE, rngs=nnx.Rngs(0)),
    "state": lambda: Turning(NoOptions(), SHAPE, rngs=nnx.Rngs(0)),
    "integers": lambda: Counting(NoOptions(), SHAPE, rngs=nnx.Rngs(0)),
    "the second settles first": lambda: Composed(
        {"six": cope_of(6), "two": cope_of(2, gate="query_key")}, SHAPE
    ),
    "the first settles first": lambda: Composed(
        {"two": cope_of(2, gate="query_key"), "six": cope_of(6)}, SHAPE
    ),
}
SLOW = ("the first settles first", "the second settles first", "reads everything")


@pytest.mark.parametrize(
    "name, places",
    [
        *((name, "any") for name in OTHERS if name not in SLOW),
        *(slow(name, "any") for name in SLOW),
        ("does not split keys", "known"),
    ],
)
def test_encodings_of_other_kinds(name, places, x64):
    graphdef, state = nnx.split(OTHERS[name]())
    run = jax.jit(functools.partial(full_and_blockwise, graphdef, blocks=BlockSizes(3, 2, 3)))
    data = random_data(0, LENGTH, KEYS)._replace(q_segments=np.zeros((BATCH, LENGTH), np.int32))
    data = data._replace(k_segments=np.zeros((BATCH, KEYS), np.int32))
    full, blockwise = run(
        state, arrays_of(LENGTH, KEYS), known(data) if places == "known" else data
    )
    assert_equal(blockwise, full)


@pytest.mark.parametrize(
    "blocks",
    [BlockSizes(3, 2, 3), slow(BlockSizes(3, KEYS, KEYS))],
    ids=["blocks", "one block"],
)
def test_seeds_side_by_side(blocks, x64):
    """vmap, also where the strips of one seed settle earlier than those of the other."""
    spec = "cope(npos_max=3)"
    states, problems = zip(
        *((build(spec, s)[1], arrays_of(LENGTH, KEYS, s)) for s in (1, 2)), strict=True
    )
    for arrays, sign in zip(problems, (1, -1), strict=True):  # open gates, and closed ones
        arrays["q"], arrays["k"] = 2 * np.abs(arrays["q"]), sign * np.abs(arrays["k"])
    data = plain(LENGTH, KEYS)

    def stack(*leaves):
        return np.stack(leaves)

    run = compiled(spec, blocks)
    together = jax.vmap(run, in_axes=(0, 0, None))(
        jax.tree.map(stack, *states), jax.tree.map(stack, *problems), data
    )[1]
    for seed, (state, arrays) in enumerate(zip(states, problems, strict=True)):
        alone = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together)
        assert_equal(alone, run(state, arrays, data)[0])


@functools.cache
def has_features(spec):
    q, k = (
        jnp.zeros((1, 1, SIZES.heads, SIZES.head_dim)),
        jnp.zeros((1, 1, SIZES.kv_heads, SIZES.head_dim)),
    )
    return bool(
        jax.tree.leaves(features_of(encoding_of(spec), jnp.zeros((1, 1, SIZES.model_dim)), q, k, k))
    )


@st.composite
def problems(draw):
    spec = draw(
        st.sampled_from(
            [
                spec
                for spec in CASES
                if splits_queries(spec) and "path" not in spec and "wall" not in spec
            ]
        )
    )
    heads, kv_heads = (
        (4, 2) if "slopes=(" in spec else draw(st.sampled_from([(4, 2), (4, 1), (2, 2), (1, 1)]))
    )
    sizes = Sizes(heads, kv_heads, draw(st.sampled_from([4, 6])), SIZES.model_dim, SIZES.max_length)
    length, keys = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    # Those of the queries are of their own keys.
    length = min(length, keys) if has_features(spec) else length
    blocks = BlockSizes(
        draw(st.integers(1, 13)), draw(st.integers(1, 13)), draw(st.integers(1, 13))
    )
    causal = is_causal_only(spec) or draw(st.booleans())
    window = draw(st.none() | st.integers(1, 6))
    rate = draw(st.sampled_from([0.0, 0.25]))
    batch, places, seed = (
        draw(st.integers(1, 2)),
        draw(st.sampled_from(["known", "any"])),
        draw(st.integers(0, 2**20)),
    )
    return spec, sizes, batch, length, keys, blocks, causal, window, rate, places, seed


def check(problem):
    spec, sizes, batch, length, keys, blocks, causal, window, rate, places, seed = problem
    _, state = build(spec, sizes=sizes)
    arrays = arrays_of(length, keys, seed, batch, sizes)
    run = compiled(spec, blocks, causal, window, rate, sizes)
    for number in range(4):
        ordered = number < 2 or is_causal_only(spec) or places == "known"
        data = random_data(seed + number, length, keys, batch, ordered)
        data = known(data) if places == "known" else data
        full, blockwise = run(
            state, arrays, data._replace(dropout_key=jax.random.key(seed) if rate else None)
        )
        assert_equal(blockwise, full)
        if number == 0 and not rate:
            exact = oracle(spec, state, arrays, data, 0, sizes, causal=causal, window=window)
            np.testing.assert_allclose(blockwise[0][0], exact, rtol=0, atol=1e-12)


@settings(few, max_examples=3)
@given(problems())
def test_any_problem(x64, problem):
    """Any encoding, heads, lengths, blocks and masks."""
    check(problem)


@pytest.mark.slow
@settings(few, max_examples=100)
@given(problems())
def test_many_problems(x64, problem):
    check(problem)
    compiled.cache_clear()  # a process that keeps hundreds of programs runs out of memory maps
    jax.clear_caches()


@pytest.mark.parametrize(
    "length",
    [200, slow(300)],
    ids=["known strips", "blocks"],
)
def test_the_sizes_taken_by_default(length, rng, x64):
    q, k, v, dout = (jnp.asarray(rng.normal(size=(1, length, 2, 4))) for _ in range(4))
    encoding = encodings.create("cope", num_heads=2, head_dim=4, npos_max=20, rngs=nnx.Rngs(0))
    encoding.table[...] = jnp.asarray(rng.normal(size=(20, 4)))

    def gradients(how):
        return jax.jit(
            jax.grad(
                lambda *qkv: (dout * attend(*qkv, encoding=encoding, implementation=how)).sum(),
                (0, 1, 2),
            )
        )

    for computed, exact in zip(*(gradients(how)(q, k, v) for how in ("auto", "full")), strict=True):
        np.testing.assert_allclose(computed, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length, keys", [(0, 5), (5, 0)])
def test_nothing_gives_nothing(length, keys):
    q, k = jnp.ones((2, length, 2, 4)), jnp.ones((2, keys, 2, 4))
    encoding = encodings.create("cope", num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    out = attend(q, k, k, encoding=encoding, implementation="blockwise")
    assert out.shape == q.shape and not out.any()
