"""Shared code of rotations: frequencies, angles summed over tokens, and the rotation itself."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.custom_derivatives import SymbolicZero

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import AttentionShape, Encoding, Tokens
from cope_jax.encodings.common import last_segment, segment_starts
from cope_jax.errors import ConfigError
from cope_jax.ops.sums import sum_of_turns


def frequencies(base: float, features: int) -> np.ndarray:
    """Returns RoPE's θ_c = base^(−2c/R), c < R/2, for R rotated features."""
    return np.power(base, -np.arange(0, features, 2) / features)


def outer(x: Array, rates: Any) -> Array:
    """Returns x r_c for each c, as a product of matrices, so that the gradient of x is one too."""
    return jnp.einsum("...,c->...c", x, jnp.asarray(rates, x.dtype), precision="highest")


def even_head_dim(name: str, head_dim: int) -> int:
    """Returns the head width; ConfigError if it is odd, because an encoding that rotates needs
    pairs of features.
    """
    if head_dim % 2:
        raise ConfigError(f"{name} needs an even head_dim, got {head_dim}")
    return head_dim


def rotate_pairs(x_BLHK: Array, angles: Array, scale: Array | None = None) -> Array:
    """Rotates the pair of features (c, c + C) by angle c, and multiplies it by `scale`; features
    from 2C on stay.

    The angles are `[B, L, heads, C]`. Their number of heads is 1 or divides H; then each angle
    serves a group of heads.
    """
    heads = x_BLHK.shape[2]
    if angles.shape[2] not in (1, heads):
        angles = jnp.repeat(angles, heads // angles.shape[2], axis=2)
    if scale is None:
        return _rotated(x_BLHK, angles)
    cos, sin = cos_sin(angles)
    return turn_pairs(x_BLHK, scale * cos, scale * sin)


@jax.custom_jvp
def _rotated(x_BLHK: Array, angles: Array) -> Array:
    return turn_pairs(x_BLHK, *cos_sin(angles))


@functools.partial(_rotated.defjvp, symbolic_zeros=True)
def _rotated_tangent(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> Any:
    """The tangent is that of x, rotated, and for each pair that of its angle times the rotated pair, a
    quarter turn further. JAX would compute sine and cosine again.
    """
    (x_BLHK, angles), (dx, dangles) = primals, tangents
    cos, sin = cos_sin(angles)
    wide = turn_pairs(x_BLHK.astype(cos.dtype), cos, sin)
    out = wide.astype(x_BLHK.dtype)
    dout = jnp.zeros_like(out) if _is_zero(dx) else turn_pairs(dx, cos, sin)
    if not _is_zero(dangles):
        width = 2 * angles.shape[3]
        first, second = jnp.split(wide[..., :width], 2, axis=3)
        further = _for_heads(dangles, x_BLHK.shape[2])
        moved = jnp.concatenate([-second * further, first * further], axis=3).astype(out.dtype)
        rest = [(0, 0)] * 3 + [(0, out.shape[3] - width)]
        dout = dout + jnp.pad(moved, rest)
    return out, dout


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _for_heads(dangles: Array, heads: int) -> Array:
    """Gives all heads the tangents that they share. On a CPU they are copied: the gradient of copies
    is a sum of slices, and that of a broadcast a sum of products, which took XLA ten times as long
    for 8 heads of 64 and 2,048 tokens.
    """
    if dangles.shape[2] == heads:
        return dangles

    def copied(dangles: Array) -> Array:
        return jnp.concatenate([dangles] * heads, axis=2)

    def spread(dangles: Array) -> Array:
        return jnp.broadcast_to(dangles, (*dangles.shape[:2], heads, dangles.shape[3]))

    return lax.platform_dependent(dangles, cpu=copied, default=spread)


def cos_sin(angles: Array) -> tuple[Array, Array]:
    """Returns the cosine and the sine of angles, `[B, L, heads, C]`."""
    if angles.shape[1] == 1:  # one token needs no loop
        return jnp.cos(angles), jnp.sin(angles)
    return _computed_once(angles)


@jax.jit  # one function, which is compiled once where nothing else is
def _computed_once(angles: Array) -> tuple[Array, Array]:
    """The same behind a loop on CPUs, where XLA would else fuse both with all that they multiply,
    and compute them again for each head and each gradient. It fuses nothing across a loop.
    """

    def looped(angles: Array) -> tuple[Array, Array]:
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        waves = lax.map(lambda second: jnp.where(second, sin, cos), jnp.array([False, True]))
        return waves[0], waves[1]

    def at_once(angles: Array) -> tuple[Array, Array]:
        return jnp.cos(angles), jnp.sin(angles)

    return lax.platform_dependent(angles, cpu=looped, default=at_once)


def turn_pairs(x_BLHK: Array, cos: Array, sin: Array) -> Array:
    """Multiplies the pair of features (c, c + C), as a complex number, by cos_c + i sin_c;
    `[B, L, heads, C]`.
    """
    features = cos.shape[3]
    x = x_BLHK[..., : 2 * features].astype(cos.dtype)
    # Split, for the derivative of two slices pads both, which takes a CPU longer.
    first, second = lax.split(x, (features, features), axis=3)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x_BLHK.dtype), x_BLHK[..., 2 * features :]], axis=-1)


@dataclasses.dataclass(frozen=True)
class TurnedConfig:
    """The option of all encodings that turn by tokens.

    Attributes:
      values: whether values are turned too, and the output is turned back by the query's angle.
    """

    values: bool = False


class TurnedByTokens(Encoding):
    """Base class of encodings in which each token turns all later tokens: angles are sums over the
    tokens before.

    Pair c of a query or key at index t is rotated by θ_tc = Σ_{l≤t} δ_lc, so that q_i·k_j depends
    on what lies between them, Σ_{l=j+1..i} δ_lc. A subclass defines `steps`. In packed documents
    the sums start again with each document. The sums are float32 (float64 for float64 inputs) and
    adding them loses no digits at any length; see `sum_of_turns`. If heads differ in their angles,
    there is one angle for each key/value head, because the query heads of a group share their key.
    With `values`, out_i = Σ_j a_ij R(θ_j − θ_i) v_j, where R turns by these angles (arXiv
    2606.24975).

    Attributes:
      own_step_turns: whether a token's own step turns the token itself. If False, θ_t sums over l <
        t.
    """

    own_step_turns: bool = True

    def __init__(self, config: Any, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.traits = dataclasses.replace(self.traits, turns_values=config.values)

    def steps(self, tokens: Tokens, state: PyTree) -> tuple[Array, PyTree]:
        """Returns (δ in radians, `[B, M, heads, C]` with G or 1 heads, in the accumulator type; the
        state after it).

        The arguments are as in `features`.
        """
        raise NotImplementedError

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        before, last_B, state_of_steps = (None, None, None) if state is None else state
        steps, state_of_steps = self.steps(tokens, state_of_steps)
        turns = steps / (2 * math.pi)
        sums = sum_of_turns(turns, segment_starts(tokens.segment_ids, last_B), before)
        angles = 2 * math.pi * (sums if self.own_step_turns else sums - turns)
        return angles, (
            sums[:, -1],
            last_segment(tokens.segment_ids, len(tokens.k)),
            state_of_steps,
        )

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        return rotate_pairs(x_BLHK, features)

    def rotate_values(self, v_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        if not self.config.values:
            return v_BMGK
        if v_BMGK.shape[-1] < 2 * features.shape[-1]:
            raise ConfigError(
                f"values=True turns {2 * features.shape[-1]} features of each value, but values have "
                f"{v_BMGK.shape[-1]}: leave values=False, or give wider values"
            )
        return rotate_pairs(v_BMGK, features)

    def rotate_back(self, out_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        return rotate_pairs(out_BLHK, -features) if self.config.values else out_BLHK
