"""Contextual position encoding with steps forward and backward (ours)."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.ops.interpolate import interpolate, table_logits
from cope_jax.ops.sums import suffix_sum
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class CoPESignedConfig:
    """The options of signed CoPE.

    Attributes:
      npos_max: N; positions are clipped to [−(N−1), N−1], and the table has 2N−1 rows.
      scale_position_logits: divide q·e[p] by √K, as in `cope`.
    """

    npos_max: int = 64
    scale_position_logits: bool = False


@ENCODINGS.register("cope_signed")
class CoPESigned(Encoding):
    """CoPE whose gates may also step backward, so that a step and its opposite cancel.

        g_ij = tanh(q_i·k_j/(2√K)) ∈ (−1, 1),   p_ij = Σ_{j'=j..i} g_ij', clipped to [−(N−1), N−1],
        a_ij = softmax_j(q_i·k_j/√K + (1−w) q_i·e[⌊p_ij⌋] + w q_i·e[⌈p_ij⌉]),   w = p_ij − ⌊p_ij⌋.

    No paper defines this encoding; it is ours, after Golovneva et al. (arXiv 2405.18719). CoPE's
    gates σ(s) only count upward; here they are 2σ(s) − 1 = tanh(s/2). The table e, `[2N−1, K]`, has
    a row for each whole position and starts at 0. A query and key without relation give no step. No
    row saturates, because positions can return from an end of the table. It is for causal
    attention.

    The carry contains z_i = e q_i, and the sum of the gates of all nearer keys.
    """

    Config = CoPESignedConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: CoPESignedConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "cope_signed", npos_max=config.npos_max)
        self.table = nnx.Param(jnp.zeros((2 * config.npos_max - 1, shape.head_dim)))

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        dtype = accumulator_dtype(q_BHLK.dtype)
        scale = self.shape.head_dim**-0.5 if self.config.scale_position_logits else 1.0
        z_BHLN = table_logits(q_BHLK.astype(dtype), scale * self.table[...].astype(dtype))
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], dtype), constants=z_BHLN)

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        sums_BHLM = carry.sums[..., None] + suffix_sum(_gates(pairs))
        last = self.config.npos_max - 1
        added_BHLM = interpolate(carry.constants, self._clip(sums_BHLM) + last)
        return pairs.logits + added_BHLM, carry._replace(sums=sums_BHLM[..., 0])

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Returns the maps "gates" (g_ij in [−1, 1]) and "positions" (p_ij, clipped)."""
        gates_BHLM = _gates(pairs)
        return {"gates": gates_BHLM, "positions": self._clip(suffix_sum(gates_BHLM))}

    def _clip(self, sums_BHLM: Array) -> Array:
        last = jnp.asarray(self.config.npos_max - 1, sums_BHLM.dtype)
        # Two selections: in a kernel their derivatives are cheaper than those of minimum and maximum.
        at_least_BHLM = jnp.where(sums_BHLM < -last, -last, sums_BHLM)
        return jnp.where(at_least_BHLM > last, last, at_least_BHLM)


def _gates(pairs: Pairs) -> Array:
    return jnp.where(pairs.mask, jnp.tanh(pairs.logits / 2), jnp.zeros((), pairs.logits.dtype))
