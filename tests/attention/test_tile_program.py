"""Functions translated to rows and columns compute what they compute with all their axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.attention.kernels.tile.tile_program import TileProgram
from cope_jax.attention.kernels.tile.tile_values import NotATile, Spec, natural

L, M, K = 3, 5, 2
ROWS = Spec((1, 1, L), jnp.float32, (2, None))
PAIRS = natural((1, 1, L, M), jnp.float32)
KEYS = natural((1, M), jnp.float32)
Q = natural((1, 1, L, K), jnp.float32)


def run(function, args, like):
    """(what the program gives, what the function gives, the program) for random arguments."""
    rng = np.random.default_rng(0)
    whole = [rng.normal(size=spec.shape).astype(np.float32) for spec in args]
    program = TileProgram({}, function, args, like)
    tiles = tuple(x.reshape(spec.size) for x, spec in zip(whole, args, strict=True))
    computed = program(program.constants, tiles)
    return computed, jax.tree.leaves(function(*whole)), program


@pytest.mark.parametrize(
    ("function", "args", "like"),
    [
        (lambda rows, pairs: rows[..., None] * pairs, (ROWS, PAIRS), PAIRS),
        (lambda rows, keys: rows[..., None] - keys[:, None, None], (ROWS, KEYS), PAIRS),
        (lambda rows: jnp.broadcast_to(rows[..., None], (1, 1, L, M)).sum(axis=-1), (ROWS,), ROWS),
        (
            lambda keys: jnp.broadcast_to(keys[:, None, None], (1, 1, L, M)).max(axis=2)[:, 0],
            (KEYS,),
            KEYS,
        ),
        (lambda pairs: pairs.sum(axis=(0, 1, 2)), (PAIRS,), natural((M,), jnp.float32)),
        (
            lambda pairs: jnp.moveaxis(pairs, 3, 2).sum(axis=3),
            (PAIRS,),
            natural((1, 1, M), jnp.float32),
        ),
        (
            lambda q, pairs: jnp.einsum("bhlk,bhlm->bhkm", q, pairs),
            (Q, PAIRS),
            natural((1, 1, K, M), jnp.float32),
        ),
        (lambda rows, keys: jnp.einsum("bhl,bm->bhlm", rows, keys), (ROWS, KEYS), PAIRS),
        (
            lambda rows: jnp.stack([rows, 2 * rows], axis=-1),
            (ROWS,),
            natural((1, 1, L, 2), jnp.float32),
        ),
        (lambda pairs: jnp.concatenate([pairs[..., 1:], pairs[..., :1]], axis=-1), (PAIRS,), PAIRS),
        (lambda pairs: pairs[..., 0], (PAIRS,), ROWS),
        (
            lambda rows: rows[..., None] * jnp.ones((1, 1, 1, M)) + jnp.zeros((1, 1, 1, M)),
            (ROWS,),
            PAIRS,
        ),
        (lambda pairs: jax.grad(lambda x: (x[..., 1] ** 3).sum())(pairs), (PAIRS,), PAIRS),
        (
            lambda pairs: pairs + jnp.arange(L, dtype=jnp.float32)[None, None, :, None],
            (PAIRS,),
            PAIRS,
        ),
        (lambda pairs: pairs * np.arange(M, dtype=np.float32)[None, None, None], (PAIRS,), PAIRS),
        (
            lambda pairs: jnp.where(jnp.ones((1, 1, L, M), bool) & (pairs > 0), pairs, 0.0),
            (PAIRS,),
            PAIRS,
        ),
    ],
)
def test_a_program_computes_what_the_function_does(function, args, like):
    (computed,), (exact,), _ = run(function, args, like)
    assert computed.shape == like.size
    np.testing.assert_allclose(np.asarray(computed).ravel(), np.asarray(exact).ravel(), rtol=1e-6)


def test_what_is_not_needed_is_neither_read_nor_written():
    program = TileProgram(
        {}, lambda rows, pairs: (jnp.zeros_like(rows), pairs * 1), (ROWS, PAIRS), (ROWS, PAIRS)
    )
    assert (program.used, program.results) == ((False, True), [None, PAIRS])
    zero, same = program([], (None, np.ones((L, M), np.float32)))
    assert zero is None and same.shape == (L, M)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda pairs: jnp.cumsum(pairs, axis=-1),
            "a kernel has no cumsum, only the sums of cope_jax.ops.sums",
        ),
        (
            lambda pairs: pairs[..., None] * jnp.ones((1, 1, 1, 1, 4)),
            r"\[1, 1, 3, 5, 4\] has more than two axes",
        ),
        (lambda pairs: pairs.reshape(1, 1, M, L), "a reshape from .* moves entries"),
        (lambda pairs: pairs[..., ::-1], "a kernel has no rev"),
    ],
)
def test_what_is_no_tile_has_a_reason(function, reason):
    with pytest.raises(NotATile, match=reason):
        TileProgram({}, function, (PAIRS,), PAIRS)
