"""The inverse of a triangular matrix by matrix products."""

import jax
import jax.numpy as jnp

from cope_jax.array_types import Array


@jax.custom_jvp
def inverse_of_unit_lower(strict: Array) -> Array:
    """Returns X = (I + N)⁻¹ for the strictly lower triangular part N of matrices `[..., M, M]`.

    The inverses of the two halves of the diagonal are computed together, so there are log2 M steps,
    each with two matrix products:  [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]].  No entry
    becomes larger than those of inverses of parts of the matrix. It takes the place of a triangular
    solve, which on a CPU calls LAPACK: within a scan of a training step, that call has been seen to
    wait forever. Its derivative is two products:  dX = −X dN X.

    >>> inverse_of_unit_lower(jnp.array([[0.0, 0.0], [3.0, 0.0]])).tolist()
    [[1.0, 0.0], [-3.0, 1.0]]
    """
    return _by_halves(strict)


@inverse_of_unit_lower.defjvp
def _derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = inverse_of_unit_lower(*primals)
    with jax.default_matmul_precision("highest"):
        return inverse, -inverse @ jnp.tril(tangents[0], -1) @ inverse


def _by_halves(strict: Array) -> Array:
    size = strict.shape[-1]
    if size == 1:
        return jnp.ones_like(strict)
    if size % 2:
        wide = jnp.pad(strict, [(0, 0)] * (strict.ndim - 2) + [(0, 1), (0, 1)])
        return _by_halves(wide)[..., :size, :size]
    half = size // 2
    parts = jnp.stack([strict[..., :half, :half], strict[..., half:, half:]])
    first, second = jnp.unstack(_by_halves(parts))
    with jax.default_matmul_precision("highest"):
        below = -second @ strict[..., half:, :half] @ first
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([below, second], axis=-1)], axis=-2)
