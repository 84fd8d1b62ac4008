"""Contextual position encoding to both sides, an experiment."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding
from cope_jax.ops.interpolate import interpolate
from cope_jax.ops.linear import linear
from cope_jax.ops.suffix_sum import suffix_sum
from cope_jax.registry import check_at_least
from cope_jax.typing import Array, PyTree, accumulator_dtype


@dataclasses.dataclass(frozen=True)
class CoPETwoSidedConfig:
    """Attributes:
    npos_max: N, rows of the table of each side; positions are clipped to N−1.
    share_table: one table for both sides, which then differ by their gates alone.
    scale_position_logits: divide q·e[p] by √K, as `cope` can.
    """

    npos_max: int = 64
    share_table: bool = False
    scale_position_logits: bool = False


@ENCODINGS.register("cope_two_sided")
class CoPETwoSided(Encoding):
    """Positions count the tokens between query and key that the query's gates let through, outward on either side.

        g_ij = σ(q_i·k_j/√K),
        p_ij = min(Σ_{j'=j..i} g_ij', N−1) and e = e_left   for keys at the query's position or before,
        p_ij = min(Σ_{j'=i..j} g_ij', N−1) and e = e_right  for keys after it,
        a_ij = softmax_j(q_i·k_j/√K + (1−w) q_i·e[⌊p_ij⌋] + w q_i·e[⌈p_ij⌉]),   w = p_ij − ⌊p_ij⌋.

    No paper defines this: it is Golovneva et al. (arXiv 2405.18719) with the count begun anew on the right. The query's
    own gate counts on both sides, so that with all gates 1 both count |i−j|+1. Sides go by positions, which must not
    fall along the sequence within what a query sees. The tables `[2, N, K]` (`[1, N, K]` if shared) start at 0, as no
    encoding at all. Under a causal mask this is `cope`.

    Counts on the right begin at the query while blocks of keys are visited from the far right on, so the block law
    cannot hold: `slopes` stays None, and streaming attention takes all keys of a strip as one block.
    """

    Config = CoPETwoSidedConfig

    def __init__(self, config: CoPETwoSidedConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "cope_two_sided", npos_max=config.npos_max)
        tables = 1 if config.share_table else 2
        self.tables_2NK = nnx.Param(jnp.zeros((tables, config.npos_max, shape.head_dim)))

    def initial_carry(self, q_BLHK: Array) -> PyTree:
        dtype = accumulator_dtype(q_BLHK.dtype)
        scale = self.shape.head_dim**-0.5 if self.config.scale_position_logits else 1.0
        q_BHLK = jnp.swapaxes(q_BLHK.astype(dtype), 1, 2)
        # Left alone, XLA gathers from a transposed z, which is slow.
        return tuple(
            jax.lax.optimization_barrier(linear(q_BHLK, scale * table_NK.T))
            for table_NK in self.tables_2NK[...].astype(dtype)
        )

    def score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> tuple[Array, PyTree]:
        gates_BHLM = _gates(logits_BHLM, mask_B1LM)
        after_B1LM = _after(q_positions_BL, k_positions_BM)
        positions_BHLM = self._positions(gates_BHLM, q_positions_BL, k_positions_BM)
        if self.config.share_table:
            return logits_BHLM + interpolate(carry[0], positions_BHLM), carry
        left_BHLM, right_BHLM = (interpolate(z_BHLN, positions_BHLM) for z_BHLN in carry)
        return logits_BHLM + jnp.where(after_B1LM, right_BHLM, left_BHLM), carry

    def diagnostics(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
    ) -> dict[str, Array]:
        """`gates` g_ij in [0, 1] and `positions` p_ij, on the right as on the left."""
        gates_BHLM = _gates(logits_BHLM, mask_B1LM)
        return {"gates": gates_BHLM, "positions": self._positions(gates_BHLM, q_positions_BL, k_positions_BM)}

    def _positions(self, gates_BHLM: Array, q_positions_BL: Array, k_positions_BM: Array) -> Array:
        after_B1LM, zero = _after(q_positions_BL, k_positions_BM), jnp.zeros((), gates_BHLM.dtype)
        before_B1LM = (k_positions_BM[:, None, :] < q_positions_BL[:, :, None])[:, None]
        left_BHLM = suffix_sum(jnp.where(after_B1LM, zero, gates_BHLM))
        right_BHLM = jnp.flip(suffix_sum(jnp.flip(jnp.where(before_B1LM, zero, gates_BHLM), -1)), -1)
        counts_BHLM = jnp.where(after_B1LM, right_BHLM, left_BHLM)
        return jnp.minimum(counts_BHLM, jnp.asarray(self.config.npos_max - 1, counts_BHLM.dtype))


def _gates(logits_BHLM: Array, mask_B1LM: Array) -> Array:
    return jnp.where(mask_B1LM, jax.nn.sigmoid(logits_BHLM), jnp.zeros((), logits_BHLM.dtype))


def _after(q_positions_BL: Array, k_positions_BM: Array) -> Array:
    return (k_positions_BM[:, None, :] > q_positions_BL[:, :, None])[:, None]
