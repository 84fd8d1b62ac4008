"""Contextual position encoding for attention to both sides (experimental)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.ops.interpolate import interpolate, table_logits
from cope_jax.ops.sums import prefix_sum, suffix_sum
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class CoPETwoSidedConfig:
    """The options of two-sided CoPE.

    Attributes:
      npos_max: N, the number of rows of each side's table; positions are clipped to N−1.
      share_table: use one table for both sides, so that the sides differ only by their gates.
      scale_position_logits: divide q·e[p] by √K, as in `cope`.
    """

    npos_max: int = 64
    share_table: bool = False
    scale_position_logits: bool = False


@ENCODINGS.register("cope_two_sided")
class CoPETwoSided(Encoding):
    """On each side of the query, positions count only the tokens that the query's gates select.

        g_ij = σ(q_i·k_j/√K),
        p_ij = min(Σ_{j'=j..i} g_ij', N−1) and e = e_left   for keys at the query's position or before,
        p_ij = min(Σ_{j'=i..j} g_ij', N−1) and e = e_right  for keys after it,
        a_ij = softmax_j(q_i·k_j/√K + (1−w) q_i·e[⌊p_ij⌋] + w q_i·e[⌈p_ij⌉]),   w = p_ij − ⌊p_ij⌋.

    No paper defines this encoding. It extends Golovneva et al. (arXiv 2405.18719) by a second count
    on the right. The gate of the query's own token counts on both sides, so p_ij = min(|i−j|+1,
    N−1) if all gates are 1. The positions of tokens decide on which side a key is, so positions
    must not decrease along the keys that a query sees. The tables `[2, N, K]` (`[1, N, K]` if
    shared) start at 0, so initially the logits are q·k/√K. With a causal mask this encoding is
    equal to `cope`.

    Counts on the right begin at the query, but attention visits blocks of keys from the far right.
    So this encoding cannot keep the law of blocks, and attention takes all keys as one block.
    """

    Config = CoPETwoSidedConfig
    traits = Traits(splits_keys=False)

    def __init__(self, config: CoPETwoSidedConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "cope_two_sided", npos_max=config.npos_max)
        tables = 1 if config.share_table else 2
        self.tables = nnx.Param(jnp.zeros((tables, config.npos_max, shape.head_dim)))

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        dtype = accumulator_dtype(q_BHLK.dtype)
        scale = self.shape.head_dim**-0.5 if self.config.scale_position_logits else 1.0
        tables_2NK = scale * self.tables[...].astype(dtype)
        table_NK = tables_2NK.reshape(-1, self.shape.head_dim)
        return Carry(constants=table_logits(q_BHLK.astype(dtype), table_NK))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        positions_BHLM = self._positions(_gates(pairs), pairs)
        # The tables of both sides follow each other in one row.
        second = 0 if self.config.share_table else self.config.npos_max
        first_B1LM = jnp.where(pairs.distance < 0, jnp.int32(second), jnp.int32(0))
        added_BHLM = interpolate(carry.constants, positions_BHLM, first=first_B1LM)
        return pairs.logits + added_BHLM, carry

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Returns the maps "gates" (g_ij in [0, 1]) and "positions" (p_ij), both for keys on both
        sides.
        """
        gates_BHLM = _gates(pairs)
        return {"gates": gates_BHLM, "positions": self._positions(gates_BHLM, pairs)}

    def _positions(self, gates_BHLM: Array, pairs: Pairs) -> Array:
        distance_B1LM, zero = pairs.distance, jnp.zeros((), gates_BHLM.dtype)
        left_BHLM = suffix_sum(jnp.where(distance_B1LM < 0, zero, gates_BHLM))
        right_BHLM = prefix_sum(jnp.where(distance_B1LM > 0, zero, gates_BHLM))
        counts_BHLM = jnp.where(distance_B1LM < 0, right_BHLM, left_BHLM)
        return jnp.minimum(counts_BHLM, jnp.asarray(self.config.npos_max - 1, counts_BHLM.dtype))


def _gates(pairs: Pairs) -> Array:
    return jnp.where(pairs.mask, jax.nn.sigmoid(pairs.logits), jnp.zeros((), pairs.logits.dtype))
