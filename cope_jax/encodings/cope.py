"""Contextual position encoding."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.base import (
    ENCODINGS,
    AttentionShape,
    Carry,
    Encoding,
    Pairs,
    PerHead,
    Tokens,
    Traits,
)
from cope_jax.encodings.common import layer_input
from cope_jax.errors import ConfigError
from cope_jax.ops.grouped_matmul import content_logits
from cope_jax.ops.interpolate import interpolate, table_logits
from cope_jax.ops.sums import suffix_sum
from cope_jax.registry import check_at_least, check_unused


@dataclasses.dataclass(frozen=True)
class CoPEConfig:
    """The options of CoPE.

    Attributes:
      npos_max: N, the number of rows of the table; positions are clipped to N−1. With slopes it is
        ignored, so that one config can be for all forms.
      gate: what the gate compares the query with. "query_key" means the key, "separate_key" means a
        separate gate key W_g x, and "value" means the value.
      scale_position_logits: divide q·e[p] by √K, as the released code does. Listing 1 of the paper
        does not divide.
      position: what a position p adds to the logit. "table" adds the interpolated q·e[p]. "mlp"
        adds q·e(p), where a small network, e(p) = W relu(u p/(N−1) + b), replaces the table
        ("CoPE_MLP"). "slope" adds a fixed multiple of p ("CoPE_ALiBi"). "learned_slope" adds a
        learned multiple of p for each head, starting at 0. With slopes, positions are not clipped.
      hidden: width of the network if position="mlp". The paper does not state it.
      slope: m, used if position="slope". Then p is multiplied by −m·2^(−8h/H), h = 0 … H−1, a
        geometric sequence over the heads as in ALiBi.
    """

    npos_max: int = 64
    gate: Literal["query_key", "separate_key", "value"] = "query_key"
    scale_position_logits: bool = False
    position: Literal["table", "mlp", "slope", "learned_slope"] = "table"
    slope: float = 1.0
    hidden: int = 32


@ENCODINGS.register("cope")
class CoPE(Encoding):
    """Positions count only the tokens that the query's gates select, instead of all tokens.

        g_ij = σ(q_i·k_j/√K),   p_ij = min(Σ_{j'=j..i} g_ij', N−1),
        a_ij = softmax_j(q_i·k_j/√K + (1−w) z_i[⌊p_ij⌋] + w z_i[⌈p_ij⌉]),   z_i[n] = q_i·e[n],   w = p_ij − ⌊p_ij⌋.

    Golovneva et al. (arXiv 2405.18719), Eq 3–9 and Listing 1. The table e, `[N, K]`, is shared by
    the heads and starts at 0. Each head has its own gates. If all gates are 1, this is the learned
    relative encoding with p_ij = i−j+1.

    The carry contains z_i, and the sum P_i of the gates of all nearer keys. With position="mlp",
    z_i is q_i W. Once P_i ≥ N−1, every farther key is at the last position. The row is then
    saturated and needs no more gates. CoPE is for causal attention, because it would also count a
    visible key after the query. For attention to both sides use `cope_two_sided`.
    """

    Config = CoPEConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: CoPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(2, "cope", npos_max=config.npos_max)
        check_at_least(1, "cope", hidden=config.hidden)
        if config.position != "mlp":
            check_unused(config, "cope", hidden="without position=mlp")
        if config.position != "slope":
            check_unused(config, "cope", slope="without position=slope")
        if not self._clips():
            check_unused(config, "cope", scale_position_logits="with slopes, which add no q·e")
        if config.gate == "value":
            # The gate is that of values as they are.
            self.traits = dataclasses.replace(self.traits, excludes=("rotate_values",))
        if config.position == "table":
            self.table = nnx.Param(jnp.zeros((config.npos_max, shape.head_dim)))
        elif config.position == "mlp":
            self.hidden_kernel = nnx.Param(jax.random.normal(rngs.params(), (config.hidden,)))
            self.hidden_bias = nnx.Param(
                jax.random.uniform(rngs.params(), (config.hidden,), minval=-1.0, maxval=1.0)
            )
            self.table = nnx.Param(jnp.zeros((config.hidden, shape.head_dim)))
        elif config.position == "learned_slope":
            self.slopes = nnx.Param(jnp.zeros((shape.num_heads,)), axes=("heads",))
        else:
            exponents = (-8.0 * head / shape.num_heads for head in range(shape.num_heads))
            self.fixed_slopes = PerHead(
                tuple(-config.slope * 2.0**exponent for exponent in exponents)
            )
        if config.gate == "separate_key":
            self.gate_key = nnx.Param(
                jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))(
                    rngs.params(), (shape.width, shape.kv_heads, shape.head_dim)
                ),
                axes=("embed", "kv_heads", None),
            )

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        if self.config.gate != "separate_key":
            return (), ()
        kernel_DGK = self.gate_key[...]
        x_BMD = layer_input("cope(gate=separate_key)", tokens.x, len(kernel_DGK))
        return jnp.einsum("BMD,DGK->BMGK", x_BMD, kernel_DGK.astype(x_BMD.dtype)), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        dtype = accumulator_dtype(q_BHLK.dtype)
        counts_BHL = jnp.zeros(q_BHLK.shape[:3], dtype)
        if not self._clips():
            return Carry(sums=counts_BHL)
        return Carry(
            sums=counts_BHL, constants=table_logits(q_BHLK.astype(dtype), self._table_NK(dtype))
        )

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        counts_BHLM = carry.sums[..., None] + suffix_sum(self._gates(pairs))
        if self.config.position == "table":
            # Gates are not negative.
            added_BHLM = interpolate(carry.constants, self._clip(counts_BHLM), True)
        elif self.config.position == "mlp":
            added_BHLM = self._network(carry.constants, self._clip(counts_BHLM))
        else:
            added_BHLM = self._slopes_1H11(counts_BHLM.dtype) * counts_BHLM
        return pairs.logits + added_BHLM, carry._replace(sums=counts_BHLM[..., 0])

    def saturated(self, carry: Carry) -> Array | None:
        return carry.sums >= self.config.npos_max - 1 if self._clips() else None

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        if self.config.position == "mlp":
            last_BHL1 = jnp.full_like(carry.sums[..., None], self.config.npos_max - 1)
            return pairs.logits + self._network(carry.constants, last_BHL1)
        return pairs.logits + carry.constants[..., -1:]

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        """Returns the maps "gates" (g_ij in [0, 1]) and "positions" (p_ij, not clipped with
        slopes).
        """
        gates_BHLM = self._gates(pairs)
        return {"gates": gates_BHLM, "positions": self._clip(suffix_sum(gates_BHLM))}

    def _gates(self, pairs: Pairs) -> Array:
        if self.config.gate == "query_key":
            gate_logits_BHLM = pairs.logits
        else:
            gate_keys_BGMK = pairs.v if self.config.gate == "value" else pairs.k_features
            if gate_keys_BGMK.shape[-1] != self.shape.head_dim:
                raise ConfigError(
                    f"cope(gate=value) multiplies queries with values, so values need the width of the queries, "
                    f"{self.shape.head_dim}, but have {gate_keys_BGMK.shape[-1]}: choose another gate"
                )
            gate_logits_BHLM = content_logits(pairs.q, gate_keys_BGMK)
        return jnp.where(
            pairs.mask, jax.nn.sigmoid(gate_logits_BHLM), jnp.zeros((), gate_logits_BHLM.dtype)
        )

    def _network(self, z_BHLF: Array, positions_BHLM: Array) -> Array:
        """Returns q·e(p): z is q·W for each hidden unit."""
        dtype = z_BHLF.dtype
        kernel_F, bias_F = (
            x[...].astype(dtype)[(None,) * 4] for x in (self.hidden_kernel, self.hidden_bias)
        )
        hidden = jax.nn.relu(
            positions_BHLM[..., None] / (self.config.npos_max - 1) * kernel_F + bias_F
        )
        # Not a matrix product, so that XLA does not store a hidden layer for each pair.
        return jnp.sum(hidden * z_BHLF[..., None, :], axis=-1)

    def _clips(self) -> bool:
        return self.config.position in ("table", "mlp")

    def _clip(self, counts_BHLM: Array) -> Array:
        if not self._clips():
            return counts_BHLM
        return jnp.minimum(counts_BHLM, jnp.asarray(self.config.npos_max - 1, counts_BHLM.dtype))

    def _table_NK(self, dtype: Any) -> Array:
        table_NK = self.table[...].astype(dtype)
        return (
            table_NK / self.shape.head_dim**0.5 if self.config.scale_position_logits else table_NK
        )

    def _slopes_1H11(self, dtype: Any) -> Array:
        learned = self.config.position == "learned_slope"
        slopes_H = (
            self.slopes[...].astype(dtype)
            if learned
            else jnp.asarray(self.fixed_slopes.values, dtype)
        )
        return slopes_H[None, :, None, None]
