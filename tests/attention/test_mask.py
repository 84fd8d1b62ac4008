"""The mask against its definition pair by pair, and the ranges of keys that it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_jax.attention import Mask
from tests.oracle.attention import visible

KINDS = {
    "causal": dict(causal=True, window=None),
    "causal window": dict(causal=True, window=3),
    "bidirectional": dict(causal=False, window=None),
    "bidirectional window": dict(causal=False, window=2),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
LENGTH, KEYS, BATCH = 3, 9, 2
dense_and_span = jax.jit(lambda mask: (mask.dense(), mask.span()))
# One shape and one trace for each kind of mask, so that examples are cheap.
settings_ = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)


def ids(length, smallest=0, largest=2):
    return st.lists(st.integers(smallest, largest), min_size=length, max_size=length)


def segments():
    return st.tuples(*(ids(length) for length in (LENGTH, LENGTH, KEYS, KEYS)))


def int32(*rows):
    return np.array(rows, np.int32)


def by_loops(mask):
    """The pairs, from the definition; places stand for themselves."""
    allowed = np.zeros((BATCH, LENGTH, KEYS), bool)
    for b, i, j in np.ndindex(allowed.shape):
        q, k = int(mask.q_indices_L[i]), int(mask.k_indices_M[j])
        segments = {
            "q_segments": {q: mask.q_segment_ids_BL[b, i]},
            "k_segments": {k: mask.k_segment_ids_BM[b, j]},
        }
        # With as many queries as keys a number is a place.
        given = mask.given_B1LM is None or mask.given_B1LM[b, 0, i, j]
        allowed[b, i, j] = (
            k >= 0 and given and visible(q, k, 0, 0, mask.causal, mask.window, **segments)
        )
    return allowed


def check(mask):
    """Dense and span of a mask; returns (pairs, first, end, full, full_end)."""
    dense, span = dense_and_span(mask)
    pairs = by_loops(mask)
    np.testing.assert_array_equal(dense, pairs[:, None])
    first, end, full, full_end = (int(bound) for bound in span)
    outside = np.ones(KEYS, bool)
    outside[first:end] = False
    assert not pairs[..., outside].any(), "a pair lies outside of the range of all pairs"
    assert pairs[..., full:full_end].all(), "within the range of pairs alone, one is none"
    return pairs, first, end, full, full_end


@kinds
@settings_
@given(ids(LENGTH, -2, KEYS), ids(KEYS, -2, KEYS), segments())
def test_any_places_and_segments(kind, q_indices, k_indices, segments):
    """`dense` is exact, `span` is safe; negative places of keys are empty."""
    check(
        Mask(
            int32(*q_indices), int32(*k_indices), int32(*segments[:2]), int32(*segments[2:]), **kind
        )
    )


@kinds
@settings_
@given(
    ids(LENGTH, -2, KEYS),
    ids(KEYS, -2, KEYS),
    segments(),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.integers(0, 99),
)
def test_any_given_mask(kind, q_indices, k_indices, segments, share, seed):
    pairs = np.random.default_rng(seed).random((BATCH, 1, LENGTH, KEYS)) < share
    check(
        Mask(
            int32(*q_indices),
            int32(*k_indices),
            int32(*segments[:2]),
            int32(*segments[2:]),
            pairs,
            **kind,
        )
    )


@kinds
@settings_
@given(st.integers(-3, KEYS + 1), st.integers(0, 3), st.integers(0, 3), segments())
def test_ascending_places_give_tight_ranges(kind, q_start, k_start, empty, segments):
    """Tight in each row of one segment; the last places of keys may be empty, as in a cache."""
    k_indices = np.where(np.arange(KEYS) < KEYS - empty, np.arange(KEYS) + k_start, -1)
    q_indices = np.arange(LENGTH) + q_start
    one_segment = [np.zeros((BATCH, length), np.int32) for length in (LENGTH, KEYS)]
    pairs, first, end, full, full_end = check(
        Mask(int32(*q_indices), int32(*k_indices), *one_segment, **kind)
    )
    some, every = pairs.any(axis=(0, 1)), pairs.all(axis=(0, 1))
    if some.any():
        assert (first, end) == (some.argmax(), KEYS - some[::-1].argmax())
    else:
        assert first >= end
    assert max(full_end - full, 0) == every.sum()

    ascending = [np.sort(int32(*rows), axis=1) for rows in (segments[:2], segments[2:])]
    mask = Mask(int32(*q_indices), int32(*k_indices), *ascending, **kind)
    pairs, first, end, full, full_end = check(mask)
    if first < end:  # places and segments, each alone, allow the keys at the ends of the range
        loose, *_ = check(Mask(mask.q_indices_L, mask.k_indices_M, *one_segment, **kind))
        queries, keys = ascending
        for at in (first, end - 1):
            assert loose[..., at].any()
            assert (
                (keys[:, at] >= queries.min(axis=1)) & (keys[:, at] <= queries.max(axis=1))
            ).any()
    every = pairs.all(axis=(0, 1))
    assert max(full_end - full, 0) == every.sum()


def test_worked_by_hand():
    """Queries 4 … 6 of keys 0 … 8, packed documents 0 0 0 0 1 1 1 1 1."""
    q, k, ids = (
        np.arange(4, 7, dtype=np.int32),
        np.arange(9, dtype=np.int32),
        int32([0, 0, 0, 0, 1, 1, 1, 1, 1]),
    )
    spans = {
        (): (0, 7, 0, 5),
        ("causal",): (0, 9, 0, 9),
        ("window",): (2, 7, 4, 5),
        ("causal", "window"): (2, 9, 4, 7),
        ("segments",): (4, 7, 4, 5),
        ("causal", "segments"): (4, 9, 4, 9),
    }
    for changed, span in spans.items():
        mask = Mask(
            q,
            k,
            ids[:, 4:7] if "segments" in changed else None,
            ids if "segments" in changed else None,
            causal="causal" not in changed,
            window=3 if "window" in changed else None,
        )
        assert tuple(int(bound) for bound in mask.span()) == span, changed


def test_without_segments_one_row_serves_all_examples():
    places = np.arange(4, dtype=np.int32)
    dense = Mask(places, places).dense()
    assert dense.shape == (1, 1, 4, 4) and dense.dtype == bool
    np.testing.assert_array_equal(dense[0, 0], np.tril(np.ones((4, 4), bool)))
    same = np.ones((1, 4), np.int32)
    assert Mask(places, places, same, same).dense().shape == (1, 1, 4, 4)
    assert Mask(places, places, np.ones((3, 4), np.int32), same).dense().shape == (3, 1, 4, 4)


def test_a_hole_empties_the_range_of_pairs_alone():
    """A key in the middle that is none of theirs: the first keys and the last are not one range."""
    q, k = int32(9, 9, 9), np.arange(KEYS, dtype=np.int32)
    k[4] = -1
    first, end, full, full_end = (int(bound) for bound in Mask(q, k).span())
    assert (first, end) == (0, KEYS) and full >= full_end


def test_a_mask_is_a_tree_of_its_arrays():
    """So that it goes through jit and loops; the rule is known while tracing."""
    places = jnp.arange(3, dtype=jnp.int32)
    mask = Mask(places, places, causal=False, window=2)
    assert len(jax.tree.leaves(mask)) == 2
    same = jax.jit(lambda mask: mask)(mask)
    assert (same.causal, same.window) == (False, 2)
