"""Contextual position encoding."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.encodings.base import ENCODINGS, AttentionShape, Encoding
from cope_jax.errors import ConfigError
from cope_jax.ops.interpolate import interpolate, interpolation_slope
from cope_jax.ops.linear import linear
from cope_jax.ops.logits import content_logits
from cope_jax.ops.suffix_sum import suffix_sum
from cope_jax.registry import check_at_least
from cope_jax.typing import Array, PyTree, accumulator_dtype


@dataclasses.dataclass(frozen=True)
class CoPEConfig:
    """Attributes:
    npos_max: N, rows of the table; positions are clipped to N−1.
    gate: what the query is compared with to decide whether a key counts: "query_key", the key itself; "separate_key", a
      key of its own, W_g x; "value", the value.
    scale_position_logits: divide q·e[p] by √K as the released code does; the paper's listing does not.
    position: what a position adds: "table", the interpolated q·e[p]; "slope", a fixed multiple of p ("CoPE_ALiBi");
      "learned_slope", a learned one for each head, from 0. The slopes need no clipping, and have none.
    slope: of "slope": the first head's penalty m; head h has m·2^(−8h/H), falling geometrically as ALiBi's do.
    """

    npos_max: int = 64
    gate: Literal["query_key", "separate_key", "value"] = "query_key"
    scale_position_logits: bool = False
    position: Literal["table", "slope", "learned_slope"] = "table"
    slope: float = 1.0


@ENCODINGS.register("cope")
class CoPE(Encoding):
    """Positions count the tokens that the query's gates let through, instead of all tokens.

        g_ij = σ(q_i·k_j/√K),   p_ij = min(Σ_{j'=j..i} g_ij', N−1),
        a_ij = softmax_j(q_i·k_j/√K + (1−w) z_i[⌊p_ij⌋] + w z_i[⌈p_ij⌉]),   z_i[n] = q_i·e[n],   w = p_ij − ⌊p_ij⌋.

    Golovneva et al. (arXiv 2405.18719), Eq 3–9 and Listing 1. The table e, `[N, K]`, is shared by the heads and starts
    at 0; the gates are each head's own. With all gates 1 this is the learned relative encoding (p_ij = i−j+1).

    The carry is P_i, the sum of the gates of all nearer keys, and z_i. Once P_i ≥ N−1 every farther key is at the last
    position: the row is settled, and needs no more gates. It is for causal attention: a key after the query that the
    mask lets through would count as well. For attention to both sides there is `cope_two_sided`.
    """

    Config = CoPEConfig

    def __init__(self, config: CoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "cope", npos_max=config.npos_max)
        if config.position == "table":
            self.table_NK = nnx.Param(jnp.zeros((config.npos_max, shape.head_dim)))
        elif config.position == "learned_slope":
            self.slopes_H = nnx.Param(jnp.zeros((shape.num_heads,)))
        if config.gate == "separate_key":
            self.gate_key_DGK = nnx.Param(
                jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))(
                    rngs.params(), (shape.width, shape.kv_heads, shape.head_dim)
                ),
                axes=("embed", "kv_heads", None),
            )

    def key_features(self, x_BMD: Array | None, k_BMGK: Array, v_BMGK: Array) -> PyTree:
        if self.config.gate == "query_key":
            return ()
        if self.config.gate == "value":
            return v_BMGK
        if x_BMD is None:
            raise ConfigError("cope(gate=separate_key) needs features=encoding.key_features(x_BMD, k_BMGK, v_BMGK)")
        return jnp.einsum("BMD,DGK->BMGK", x_BMD, self.gate_key_DGK[...].astype(x_BMD.dtype))

    def initial_carry(self, q_BLHK: Array) -> PyTree:
        dtype = accumulator_dtype(q_BLHK.dtype)
        batch, length, heads, _ = q_BLHK.shape
        counts_BHL = jnp.zeros((batch, heads, length), dtype)
        if self.config.position != "table":
            return counts_BHL, None
        table_KN = self.table_NK[...].astype(dtype).T
        if self.config.scale_position_logits:
            table_KN = table_KN / self.shape.head_dim**0.5
        z_BHLN = linear(jnp.swapaxes(q_BLHK.astype(dtype), 1, 2), table_KN)
        # Left alone, XLA gathers from a transposed z, which is slow.
        return counts_BHL, jax.lax.optimization_barrier(z_BHLN)

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
        nearer_BHL, z_BHLN = carry
        counts_BHLM = self._counts(q_BLHK, features, logits_BHLM, mask_B1LM, nearer_BHL)
        if z_BHLN is None:
            added_BHLM = self._slopes_1H11(counts_BHLM.dtype) * counts_BHLM
        else:
            added_BHLM = interpolate(z_BHLN, self._clip(counts_BHLM))
        return logits_BHLM + added_BHLM, (counts_BHLM[..., 0], z_BHLN)

    def settled(self, carry: PyTree) -> Array | None:
        counts_BHL, z_BHLN = carry
        return None if z_BHLN is None else counts_BHL >= self.config.npos_max - 1

    def settled_score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> Array:
        return logits_BHLM + carry[1][..., -1:]

    def slopes(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> PyTree | None:
        nearer_BHL, z_BHLN = carry
        if z_BHLN is None:
            return jnp.broadcast_to(self._slopes_1H11(logits_BHLM.dtype), logits_BHLM.shape), None
        counts_BHLM = self._counts(q_BLHK, features, logits_BHLM, mask_B1LM, nearer_BHL)
        return interpolation_slope(z_BHLN, self._clip(counts_BHLM)), None

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
        """`gates` g_ij in [0, 1] and `positions` p_ij, clipped where there is a table."""
        gates_BHLM = self._gates(q_BLHK, features, logits_BHLM, mask_B1LM)
        return {"gates": gates_BHLM, "positions": self._clip(suffix_sum(gates_BHLM))}

    def _gates(self, q_BLHK: Array, features: PyTree, logits_BHLM: Array, mask_B1LM: Array) -> Array:
        if self.config.gate == "query_key":
            gate_logits_BHLM = logits_BHLM
        else:
            gate_logits_BHLM = content_logits(q_BLHK, features)
        return jnp.where(mask_B1LM, jax.nn.sigmoid(gate_logits_BHLM), jnp.zeros((), gate_logits_BHLM.dtype))

    def _counts(
        self, q_BLHK: Array, features: PyTree, logits_BHLM: Array, mask_B1LM: Array, nearer_BHL: Array
    ) -> Array:
        return nearer_BHL[..., None] + suffix_sum(self._gates(q_BLHK, features, logits_BHLM, mask_B1LM))

    def _clip(self, counts_BHLM: Array) -> Array:
        if self.config.position != "table":
            return counts_BHLM
        return jnp.minimum(counts_BHLM, jnp.asarray(self.config.npos_max - 1, counts_BHLM.dtype))

    def _slopes_1H11(self, dtype: Any) -> Array:
        if self.config.position == "learned_slope":
            return self.slopes_H[...].astype(dtype)[None, :, None, None]
        heads = self.shape.num_heads
        slopes = [-self.config.slope * 2.0 ** (-8.0 * h / heads) for h in range(heads)]
        return jnp.asarray(slopes, dtype)[None, :, None, None]
