"""The blocks of keys that a block of queries visits, and the block at which it stops counting."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from cope_jax.attention import BlockSizes, KeyBlock, Mask, QueryBlock, Request, blockwise_attention
from cope_jax.encodings import AttentionShape, Encoding
from cope_jax.encodings.base import NoOptions
from cope_jax.encodings.cope import CoPE, CoPEConfig

WIDTH = 4
SHAPE = AttentionShape(num_heads=2, head_dim=WIDTH)
LENGTH = KEYS = 24
BLOCKS = BlockSizes(4, 2, 5)


def request_of(q, k, v, mask, blocks=BLOCKS):
    places = [jnp.asarray(places)[None] for places in (mask.q_indices_L, mask.k_indices_M)]
    queries = QueryBlock(q, q, None, (), places[0], mask.q_indices_L, mask.q_segment_ids_BL)
    keys = KeyBlock(k, v, (), places[1], mask.k_indices_M, mask.k_segment_ids_BM, mask.given_B1LM)
    return Request(queries, keys, causal=mask.causal, window=mask.window, blocks=blocks)


def request_with(request, v):
    return dataclasses.replace(request, keys=dataclasses.replace(request.keys, v=v))


def value_and_gradients(encoding, q, k, v, mask, blocks=BLOCKS):
    """out; dq, dk, dv of its sum."""

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(
            lambda q, k, v: blockwise_attention(encoding, request_of(q, k, v, mask, blocks)),
            q,
            k,
            v,
        )
        return out, pull(jnp.ones_like(out))

    return run(q, k, v)


class Recorder(Encoding):
    """Notes the pairs of each block that is scored."""

    def __init__(self, seen):
        super().__init__(NoOptions(), SHAPE, rngs=nnx.Rngs(0))
        self.note = seen.append

    def score(self, pairs, carry):
        jax.debug.callback(
            lambda *block: self.note(tuple(map(np.asarray, block))),
            pairs.q_positions[0],
            pairs.k_positions[0],
            pairs.mask[0, 0],
        )
        return pairs.logits, carry


def segments_of(*lengths):
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]


INDICES = np.arange(KEYS, dtype=np.int32)
ROWS, COLUMNS = np.ogrid[:LENGTH, :KEYS]
DOCUMENTS = segments_of(3, 8, 1, 12)
MASKS = {
    "causal": Mask(INDICES, INDICES),
    "window": Mask(INDICES, INDICES, window=6),
    "bidirectional": Mask(INDICES, INDICES, causal=False),
    "bidirectional window": Mask(INDICES, INDICES, causal=False, window=3),
    "documents": Mask(INDICES, INDICES, DOCUMENTS, DOCUMENTS),
    "documents both ways": Mask(INDICES, INDICES, DOCUMENTS, DOCUMENTS, causal=False),
    "last queries": Mask(INDICES[-6:], INDICES),
    "first queries of a cache": Mask(INDICES[:6], np.where(INDICES < 9, INDICES, -1)),
    "prefix": Mask(
        INDICES, INDICES, given_B1LM=((COLUMNS < 7) | (COLUMNS <= ROWS))[None, None], causal=False
    ),
    "padding": Mask(INDICES, INDICES, given_B1LM=((COLUMNS < 13) & (ROWS >= 0))[None, None]),
    "no key at all": Mask(INDICES, 0 * INDICES - 1),
}


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def recorded(request, gradient):
    """The pairs of each block that the forward pass visits, or the gradient."""
    seen = []
    encoding = Recorder(seen)
    attend = jax.jit(lambda v: blockwise_attention(encoding, request_with(request, v)))
    out, pull = jax.vjp(attend, request.keys.v)
    if gradient:
        jax.effects_barrier()
        seen.clear()
        jax.block_until_ready(pull(out))
    jax.block_until_ready(out)
    jax.effects_barrier()
    return seen


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_pair_is_visited_once_and_no_block_in_vain(mask):
    """From the last key that queries see to the first: near blocks of 2 keys and far ones of 5,
    none without a pair.
    """
    seen = []
    length = len(mask.q_indices_L)
    q, k, v = random(1, length, 2, WIDTH), *(random(1, KEYS, 2, WIDTH, seed=s) for s in (1, 2))
    encoding = Recorder(seen)

    @jax.jit
    def attend(q, k, v):
        return blockwise_attention(encoding, request_of(q, k, v, mask))

    jax.block_until_ready(attend(q, k, v))
    jax.effects_barrier()
    dense = np.asarray(mask.dense())[0, 0]
    visits = np.zeros((KEYS, KEYS), int)
    for rows, columns, pairs in seen:
        assert pairs.any(), f"the keys {columns} of the queries {rows} are scored in vain"
        # The last query stands in for those that fill up its block.
        _, once = np.unique(rows, return_index=True)
        visits[np.ix_(rows[once], columns)] += pairs[once]
    np.testing.assert_array_equal(visits[mask.q_indices_L], dense)
    for start in range(0, length, BLOCKS.queries):
        rows = mask.q_indices_L[start : start + BLOCKS.queries]
        reach = dense[start : start + BLOCKS.queries].any(axis=0)
        span = KEYS - reach[::-1].argmax() - reach.argmax() if reach.any() else 0
        sizes = [len(columns) for others, columns, _ in seen if others[0] == rows[0]]
        assert set(sizes) <= {BLOCKS.near, BLOCKS.far} and sum(sizes) < span + BLOCKS.far
        assert sum(sizes) >= span


@pytest.mark.parametrize("gradient", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("given", [None, jnp.ones((1, 1, 4, KEYS), bool)], ids=["no mask", "mask"])
def test_far_blocks_are_wide(gradient, given):
    """Four last queries: two near blocks need a mask, the other 20 keys are 4 blocks of 5; in the
    gradient too.
    """
    mask = Mask(INDICES[-4:], INDICES, given_B1LM=given)
    q, k, v = random(1, 4, 2, WIDTH), *(random(1, KEYS, 2, WIDTH, seed=s) for s in (1, 2))
    seen = recorded(request_of(q, k, v, mask), gradient)
    sizes = sorted((int(columns[0]), len(columns)) for _, columns, _ in seen)
    assert sizes == [(0, 5), (5, 5), (10, 5), (15, 5), (20, 2), (22, 2)]


@pytest.mark.parametrize("gradient", [pytest.param(False, marks=pytest.mark.slow), True])
def test_strips_that_share_a_span_read_only_its_keys(gradient):
    """Twelve strips of two queries, which see all keys as one block, share four spans."""
    q, k, v = (random(1, KEYS, 2, WIDTH, seed=s) for s in range(3))
    blocks = BlockSizes(2, KEYS, KEYS)
    seen = recorded(request_of(q, k, v, Mask(INDICES, INDICES), blocks), gradient)
    sizes = {int(rows[0]): len(columns) for rows, columns, _ in seen}
    assert sizes == {row: 6 * (1 + row // 6) for row in range(0, KEYS, 2)}


RULED_OUT = {  # the mask, and the keys that no query sees
    "causality": (Mask(INDICES[:4], INDICES), slice(4, None)),
    "window": (Mask(INDICES[-4:], INDICES, window=3), slice(None, 14)),
    "documents": (Mask(INDICES[12:], INDICES, DOCUMENTS[:, 12:], DOCUMENTS), slice(None, 12)),
    "mask": (
        Mask(INDICES[-4:], INDICES, given_B1LM=(COLUMNS >= 6) & np.ones((1, 1, 4, KEYS), bool)),
        slice(None, 4),
    ),
    "empty keys": (Mask(INDICES[-4:], np.where(INDICES < 9, -1, INDICES)), slice(None, 4)),
}
FEW = ("mask",)


@pytest.mark.parametrize(
    "mask, gone",
    [
        pytest.param(*case, id=name, marks=[] if name in FEW else pytest.mark.slow)
        for name, case in RULED_OUT.items()
    ],
)
def test_blocks_that_are_ruled_out_are_not_read(mask, gone):
    """NaN in their keys and values reaches nothing."""
    encoding = CoPE(CoPEConfig(npos_max=4), SHAPE, rngs=nnx.Rngs(0))
    encoding.table[...] = random(4, WIDTH, seed=3)
    q, k, v = (
        random(1, len(mask.q_indices_L), 2, WIDTH),
        *(random(1, KEYS, 2, WIDTH, seed=s) for s in (1, 2)),
    )
    clean, gradients = value_and_gradients(encoding, q, k, v, mask, BlockSizes(4, 2, 2))
    spoilt, others = value_and_gradients(
        encoding,
        q,
        k.at[:, gone].set(jnp.nan),
        v.at[:, gone].set(jnp.nan),
        mask,
        BlockSizes(4, 2, 2),
    )
    assert np.isfinite(clean).all() and np.abs(clean).max() > 0.1
    np.testing.assert_array_equal(spoilt, clean)
    for gradient, other in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(other, gradient)
    assert np.all(np.asarray(others[1])[:, gone] == 0) and np.all(
        np.asarray(others[2])[:, gone] == 0
    )


class Marked(CoPE):
    """Keys beyond saturation get no weight, so that the result shows which they were."""

    def tail(self, pairs, carry):
        return super().tail(pairs, carry) - 1e30


def open_gates():
    """q·k/√K = 40: all gates are 1 in float32, so positions are numbers of keys."""
    unit = jnp.ones((1, KEYS, 2, WIDTH), jnp.float32)
    return 20 * unit, unit


@pytest.mark.parametrize(
    "npos_max",
    [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)],
)
def test_blocks_beyond_the_largest_position_are_saturated(npos_max):
    """Queries count, two keys at a time, until the first of them has seen N−1; all that is farther
    is the tail.
    """
    (q, k), v = open_gates(), random(1, KEYS, 2, WIDTH)
    encoding = Marked(CoPEConfig(npos_max=npos_max), SHAPE, rngs=nnx.Rngs(0))
    out, (_, _, dv) = value_and_gradients(encoding, q, k, v, MASKS["causal"])
    exact, weight = np.zeros((KEYS, 2, WIDTH)), np.zeros(KEYS)
    for i in range(KEYS):
        start = i // BLOCKS.queries * BLOCKS.queries
        end = start + BLOCKS.queries
        while end > 0 and start + 1 - end < npos_max - 1:
            end -= BLOCKS.near
        counted = np.arange(end, i + 1)
        exact[i] = np.asarray(v)[0, counted].mean(axis=0)
        weight[counted] += 1 / len(counted)
    np.testing.assert_allclose(out[0], exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(dv[0, :, 0, 0], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 2], ids=["example", "head"])
def test_one_row_that_counts_keeps_its_block_counting(axis):
    """All gates of the second example or head are closed: its positions never reach the end of the
    table.
    """
    q, k = (jnp.concatenate([x] * 2, axis=0) for x in open_gates())
    k = k.at[(slice(None),) * axis + (1,)].multiply(-1)
    v = random(2, KEYS, 2, WIDTH)
    encoding = Marked(CoPEConfig(npos_max=4), SHAPE, rngs=nnx.Rngs(0))
    out = jax.jit(
        lambda q, k, v: blockwise_attention(encoding, request_of(q, k, v, MASKS["causal"]))
    )(q, k, v)
    mean = np.cumsum(np.asarray(v), axis=1) / np.arange(1, KEYS + 1)[None, :, None, None]
    np.testing.assert_allclose(out, mean, rtol=0, atol=1e-5)
