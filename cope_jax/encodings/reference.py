"""CoPE, RoPE, FoX and PaTH as plain functions, to read or to copy: one example, one head, causal.

`jax.vmap` maps them over examples and heads. They need L² memory. The encodings of the same names,
which run in every implementation of attention, give the same values and gradients.
"""

import jax
import jax.numpy as jnp
from jax import Array


def cope(q_LK: Array, k_LK: Array, v_LK: Array, table_NK: Array) -> Array:
    """Positions count the tokens that the query's gates select (arXiv 2405.18719)."""
    logits_LL = q_LK @ k_LK.T / q_LK.shape[1] ** 0.5
    visible_LL = jnp.tril(jnp.ones(logits_LL.shape, bool))
    gates_LL = jnp.where(visible_LL, jax.nn.sigmoid(logits_LL), 0.0)
    counts_LL = jnp.cumsum(gates_LL[:, ::-1], axis=1)[:, ::-1]  # from the query back to the key
    positions_LL = jnp.minimum(counts_LL, len(table_NK) - 1)
    below_LL = jnp.floor(positions_LL)
    row_LN = q_LK @ table_NK.T
    lower_LL = jnp.take_along_axis(row_LN, below_LL.astype(int), axis=1)
    upper_LL = jnp.take_along_axis(row_LN, jnp.ceil(positions_LL).astype(int), axis=1)
    share_LL = positions_LL - below_LL
    logits_LL += (1 - share_LL) * lower_LL + share_LL * upper_LL
    return jax.nn.softmax(jnp.where(visible_LL, logits_LL, -jnp.inf)) @ v_LK


def rope(q_LK: Array, k_LK: Array, v_LK: Array, base: float = 10_000.0) -> Array:
    """Angles proportional to the position turn pairs of features (arXiv 2104.09864)."""
    length, width = q_LK.shape
    rates_C = base ** (-jnp.arange(0, width, 2, dtype=q_LK.dtype) / width)
    angles_LC = jnp.arange(length, dtype=q_LK.dtype)[:, None] * rates_C[None]
    cos_LC, sin_LC = jnp.cos(angles_LC), jnp.sin(angles_LC)

    def turn(x_LK: Array) -> Array:
        a_LC, b_LC = x_LK[:, : width // 2], x_LK[:, width // 2 :]
        return jnp.concatenate(
            [a_LC * cos_LC - b_LC * sin_LC, b_LC * cos_LC + a_LC * sin_LC], axis=1
        )

    logits_LL = turn(q_LK) @ turn(k_LK).T / width**0.5
    visible_LL = jnp.tril(jnp.ones(logits_LL.shape, bool))
    return jax.nn.softmax(jnp.where(visible_LL, logits_LL, -jnp.inf)) @ v_LK


def fox(q_LK: Array, k_LK: Array, v_LK: Array, x_LD: Array, kernel_D: Array, bias: Array) -> Array:
    """Each token's forget gate lowers the weights of all keys before it (arXiv 2503.02130)."""
    sums_L = jnp.cumsum(jax.nn.log_sigmoid(x_LD @ kernel_D + bias))
    logits_LL = q_LK @ k_LK.T / q_LK.shape[1] ** 0.5 + sums_L[:, None] - sums_L[None, :]
    visible_LL = jnp.tril(jnp.ones(logits_LL.shape, bool))
    return jax.nn.softmax(jnp.where(visible_LL, logits_LL, -jnp.inf)) @ v_LK


def path(q_LK: Array, k_LK: Array, v_LK: Array, w_LK: Array, beta_L: Array) -> Array:
    """Each token reflects the query on its way to earlier keys (arXiv 2505.16381).

    w and β, which the paper computes from the layer's input, are the directions and the strengths
    of the reflections: H_l = I − β_l w_l w_lᵀ, with |w_l| = 1 and 0 < β_l < 2.
    """
    length, width = q_LK.shape

    def visit(c_LK: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        j, k_K, w_K, beta = token  # the next key: c_i is what is left of query i when it gets there
        reflected_LK = c_LK - beta * (c_LK @ w_K)[:, None] * w_K[None]
        sees_L = j <= jnp.arange(length)
        return jnp.where(sees_L[:, None], reflected_LK, c_LK), c_LK @ k_K

    tokens = (jnp.arange(length), k_LK, w_LK, beta_L)
    logits_LL = jax.lax.scan(visit, q_LK, tokens, reverse=True)[1].T / width**0.5
    visible_LL = jnp.tril(jnp.ones(logits_LL.shape, bool))
    return jax.nn.softmax(jnp.where(visible_LL, logits_LL, -jnp.inf)) @ v_LK
