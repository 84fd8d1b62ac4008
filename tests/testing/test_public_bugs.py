"""Public bugs, each re-created in a few lines: the right law finds it, at the right two tokens."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.testing import check, qkv, vectors


def attend(q, k, v, see=True, causal=True):
    """Softmax attention in NumPy, in float32; `see` is [B, 1, L, M] or broadcasts to it."""
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2).astype(np.float32) for a in (k, v))
    logits = np.einsum("blhk,bmhk->bhlm", q.astype(np.float32), k) / q.shape[-1] ** 0.5
    after = np.triu(np.ones(logits.shape[2:], bool), 1 + k.shape[1] - q.shape[1])
    logits = np.where(see & ~(after & causal), logits, -1e30)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhlm,bmhk->blhk", weights, v).astype(q.dtype)


def same(ids):
    """[B, 1, L, L], True for tokens of one document."""
    return (ids[:, :, None] == ids[:, None])[:, None]


def rotate(x, positions, dtype=np.float32):
    """RoPE; positions are [B, L], and angles have the type."""
    half = x.shape[-1] // 2
    fastest = (1000.0 ** -(np.arange(half) / half)).astype(dtype)
    angles = np.float32(positions.astype(dtype)[:, :, None, None] * fastest)
    a, b = x[..., :half].astype(np.float32), x[..., half:].astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def append(cache, *arrays):
    """A cache of arrays [B, M, …], with the next tokens."""
    if cache is None:
        return arrays
    return [np.concatenate(pair, axis=1) for pair in zip(cache, arrays, strict=True)]


def key_shift(mended):
    """marin-community/marin #5801: keys of the token before, across packed documents."""

    def attention(q, k, v, ids=None):
        ids = np.zeros(q.shape[:2], int) if ids is None else ids
        before = np.concatenate([k[:, :1], k[:, :-1]], 1)
        first = np.diff(ids, axis=1, prepend=-1) != 0
        shifted = np.where(first[:, :, None, None] & mended, k, before)
        return attend(q, shifted, v, same(ids))

    return check(attention, segments="ids")


def smear_gate(mended):
    """openai/parameter-golf #1797: SmearGate mixes a token with the one before it."""

    def layer(x, ids=None):
        ids = np.zeros(x.shape[:2], int) if ids is None else ids
        before = np.concatenate([0 * x[:, :1], x[:, :-1]], 1)
        first = np.diff(ids, axis=1, prepend=-1) != 0
        gate = np.where(first[:, :, None] & mended, 0, 1 / (1 + np.exp(-x[..., :1])))
        return x + gate * before

    return check(layer, vectors(8), segments="ids")


def positions_without_a_mask(mended):
    """DeepOpt-com/WrinkleFree-Monorepo #53: positions start again, but the mask is causal only."""

    def attention(q, k, v, ids=None, positions=None):
        positions = np.arange(q.shape[1])[None] if positions is None else positions
        see = same(ids) if mended and ids is not None else True
        return attend(rotate(q, positions), rotate(k, positions), v, see)

    return check(attention, segments="ids", positions="positions", shift=50)


def unwritten_gradients(mended):
    """fla-org/flash-linear-attention #892: rows after the last whole block of dq are not written."""

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    attention = jax.custom_vjp(plain)
    attention.defvjp(lambda *a: (plain(*a), a), lambda a, dout: backward(*a, dout))

    def backward(q, k, v, dout):
        dq, dk, dv = jax.vjp(plain, q, k, v)[1](dout)
        written = dq.shape[1] // 8 * 8
        return (dq if mended else dq.at[:, written:].set(0.5)), dk, dv

    return check(jax.jit(attention), qkv(2, head_dim=4), length=12)


def rows_without_keys(mended):
    """pytorch/pytorch #103749: softmax of a row that is masked completely is NaN."""

    @jax.jit
    def attention(q, k, v, mask=True):
        logits = jnp.einsum("blhk,bmhk->bhlm", q, k)
        logits = jnp.where(
            mask & jnp.tri(q.shape[1], dtype=bool)[None, None],
            logits,
            -1e30 if mended else -jnp.inf,
        )
        return jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(logits), v)

    return check(attention, qkv(2, head_dim=4), mask="mask", length=8)


def gradients_of_rows_without_keys(mended):
    """Xilinx/brevitas #1591: NaN set to 0 after the softmax leaves NaN in the gradients."""

    @jax.jit
    def attention(q, k, v, mask=True):
        logits = jnp.einsum("blhk,bmhk->bhlm", q, k)
        see = jnp.broadcast_to(mask & jnp.tri(q.shape[1], dtype=bool)[None, None], logits.shape)
        empty = ~see.any(-1, keepdims=True)
        bias = jnp.where(see | (empty & mended), 0.0, -jnp.inf)
        weights = jax.nn.softmax(logits + bias)
        return jnp.einsum("bhlm,bmhk->blhk", jnp.where(empty, 0.0, weights), v)

    return check(attention, qkv(2, head_dim=4), mask="mask", length=8)


def cache_off_by_one(mended):
    """fla-org/flash-linear-attention #766: the token that is read counts as a past one."""

    def attention(q, k, v, start=0):
        positions = np.arange(start, start + q.shape[1])[None]
        return attend(rotate(q, positions), rotate(k, np.arange(k.shape[1])[None]), v)

    def step(cache, q, k, v):
        past = 0 if cache is None else cache[0].shape[1]
        cache = append(cache, k, v)
        return attention(q, *cache, past + (past > 0 and not mended)), cache

    return check(attention, step=step)


def heads_are_tiled(mended):
    """ekzhang/jax-js #180: key heads are tiled over query heads, not repeated."""

    def attention(q, k, v):
        times = q.shape[2] // k.shape[2]
        tiled = [np.tile(a, (1, 1, times, 1)) for a in (k, v)]
        return attend(q, k, v) if mended else attend(q, *tiled)

    return check(attention, qkv(4, 2))


def positions_of_the_batch(mended):
    """unslothai/unsloth #3699: with left padding, all examples have the positions of the longest."""

    def attention(q, k, v, padding=None):
        padding = np.ones(q.shape[:2], bool) if padding is None else padding
        counted = np.maximum(padding.cumsum(1) - 1, 0)
        positions = counted if mended else np.arange(q.shape[1])[None]
        k = k + np.sin(positions)[:, :, None, None].astype(k.dtype)  # not relative
        return attend(q, k, v, padding[:, None, None])

    return check(attention, padding="padding")


def left_padding_in_the_cache(mended):
    """mosaicml/examples #257: with padding and a cache, positions forget the padding."""

    def placed(k, padding):
        counted = np.maximum(padding.cumsum(1) - 1, 0)[:, -k.shape[1] :]
        return k + np.sin(counted)[:, :, None, None].astype(k.dtype)

    def attention(q, k, v, padding=None):
        padding = np.ones(k.shape[:2], bool) if padding is None else padding
        return attend(q, placed(k, padding), v, padding[:, None, None])

    def step(cache, q, k, v, padding=None):
        width = k.shape[1] + (0 if cache is None else cache[0].shape[1])
        padding = np.ones((len(q), width), bool) if padding is None else padding
        seen = padding if mended or cache is None else np.ones_like(padding)
        cache = append(cache, placed(k, seen), v)
        return attend(q, *cache, padding[:, None, None]), cache

    return check(attention, padding="padding", step=step)


def causal_mask_at_the_top(mended):
    """pytorch/pytorch #144858: is_causal with a cache lets the last query see the first keys only."""

    def attention(q, k, v):
        see = np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1] if mended else 0, dtype=bool)
        return attend(q, k, v, see, causal=False)

    def step(cache, q, k, v):
        cache = append(cache, k, v)
        return attention(q, *cache), cache

    return check(attention, step=step)


def angles_in_bfloat16(mended):
    """huggingface/transformers #29285: RoPE's positions are rounded to bfloat16."""

    def attention(q, k, v, positions=None):
        positions = np.arange(q.shape[1])[None] if positions is None else positions
        dtype = np.float32 if mended else q.dtype
        return attend(rotate(q, positions, dtype), rotate(k, positions, dtype), v)

    return check(attention, positions="positions", shift=50, bfloat16=True, tolerance=1e-4)


def convolution_of_the_future(mended):
    """state-spaces/mamba #580: of a padded convolution the last outputs are taken, not the first."""

    def layer(x):
        kernel, length = np.float32([0.1, 0.2, 0.3, 0.4]), x.shape[1]
        padded = np.pad(x, [(0, 0), (3, 3), (0, 0)])
        out = sum(padded[:, n : n + length + 3] * kernel[n] for n in range(4))
        return out[:, :length] if mended else out[:, -length:]

    return check(layer, vectors(4))


class Caught(NamedTuple):
    """The law that finds a bug, and where."""

    bug: Callable[[bool], Any]
    law: str
    words: str
    tokens: tuple[int, int] | None = None


BUGS = [
    # Of 16 tokens, 0 to 4 are document 1, 5 is document 2, and the others are document 3. The
    # weights of the first token of a document are 1 for any key.
    Caught(key_shift, "packed documents", "token 5 (document 2) changes output 7", (5, 7)),
    Caught(smear_gate, "packed documents", "token 4 (document 1) changes output 5", (4, 5)),
    Caught(positions_without_a_mask, "packed documents", "(document 1) changes output 5", (1, 5)),
    Caught(unwritten_gradients, "gradients", "the gradient of q at token 8 gives"),
    Caught(rows_without_keys, "empty rows", "output 4 is not finite"),
    Caught(gradients_of_rows_without_keys, "empty rows", "the gradient of q at token 4"),
    Caught(cache_off_by_one, "decoding", "output 8 of example 0"),
    Caught(heads_are_tiled, "head groups", "query head 2 reads key head 0, not 1"),
    Caught(positions_of_the_batch, "left padding", "output 1 of example 1"),
    Caught(left_padding_in_the_cache, "left padding and cache", "output 6 of example 1"),
    Caught(causal_mask_at_the_top, "decoding", "output 8 of example 0"),
    Caught(angles_in_bfloat16, "bfloat16", "differs by"),
    Caught(convolution_of_the_future, "causality", "token 3 changes output 0", (3, 0)),
]


@pytest.mark.parametrize("caught", BUGS, ids=lambda caught: caught.bug.__name__)
def test_a_bug_is_caught_and_its_mended_version_passes(caught):
    start = time.process_time()
    report = caught.bug(False)
    assert time.process_time() - start < 10
    verdict = report[caught.law]
    assert verdict.verdict == "BROKEN" and caught.words in verdict.counterexample, report
    assert verdict.tokens == caught.tokens
    caught.bug(True).raise_if_broken()
