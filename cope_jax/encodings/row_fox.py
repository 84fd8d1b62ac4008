"""Forget gates that each query sets for itself."""

import dataclasses
from typing import Literal

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
    Tokens,
    Traits,
)
from cope_jax.encodings.common import is_own_token, project, token_indices
from cope_jax.ops.grouped_matmul import content_logits
from cope_jax.ops.sums import suffix_sum
from cope_jax.registry import check_at_least, check_unused


@dataclasses.dataclass(frozen=True)
class RowFoXConfig:
    """The options of row-wise forget gates.

    Attributes:
      gate: what a gate compares. "separate" means q'·k'/√d, small queries and keys of its own.
        "query_key" means q·k/√K, the logit of CoPE's gate; this is our variant.
      width: d, the width of the separate queries and keys of a head.
    """

    gate: Literal["separate", "query_key"] = "separate"
    width: int = 8


@ENCODINGS.register("row_fox")
class RowFoX(Encoding):
    """Like FoX, but each query decides for itself how much every token forgets: between FoX and
    CoPE.

        a_ij = softmax_j(q_i·k_j/√K + Σ_{l=j..i−1} log σ(q'_i·k'_l/√d)),   [q', k'] = W x.

    No paper; it is `PerRowDataDependentAlibi` of the library x-transformers. Unlike in FoX, the
    key's own gate is in the sum, and the query's own is out. With gate="query_key", the gates are
    those of CoPE, used as decay instead of positions (ours). W has no bias, so gates start near ½.
    x is the input of the layer.

    The carry is the sum of log gates over the nearer keys. Row-wise gates are for causal attention.

    Raises:
      ConfigError: gate="separate" and `features` is called without x.
    """

    Config = RowFoXConfig
    traits = Traits(causal_only=True)

    def __init__(self, config: RowFoXConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "row_fox", width=config.width)
        if config.gate == "separate":
            initial = jax.nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
            size = (shape.width, shape.num_heads, config.width)
            self.query = nnx.Param(initial(rngs.params(), size), axes=("embed", "heads", None))
            self.key = nnx.Param(initial(rngs.params(), size), axes=("embed", "heads", None))
        else:
            check_unused(config, "row_fox", width="with gate=query_key")

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        indices_BM1, count_B = token_indices(tokens.k, state)
        if self.config.gate == "query_key":
            return {"index": indices_BM1}, count_B
        q, k = (project("row_fox", tokens.x, kernel[...]) for kernel in (self.query, self.key))
        return {"index": indices_BM1, "q": q, "k": k}, count_B

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        gate_logits = pairs.logits
        if self.config.gate == "separate":
            gate_logits = content_logits(pairs.q_features["q"], pairs.k_features["k"])
        own_B1LM = is_own_token(pairs.q_features["index"], pairs.k_features["index"])
        zero = jnp.zeros((), gate_logits.dtype)
        log_gates_BHLM = jnp.where(pairs.mask & ~own_B1LM, jax.nn.log_sigmoid(gate_logits), zero)
        sums_BHLM = carry.sums[..., None] + suffix_sum(log_gates_BHLM)
        return pairs.logits + sums_BHLM, carry._replace(sums=sums_BHLM[..., 0])
