"""Stick-breaking attention."""

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
from cope_jax.encodings.common import is_own_token, sum_over_nearer, token_indices

# A stick of e^−104 is 0 in float32.
_NOTHING_LEFT = -104.0


@dataclasses.dataclass(frozen=True)
class StickBreakingConfig:
    """The options of stick-breaking attention.

    Attributes:
      see_itself: whether a query also sees the key of its own token. In the released code it does
        not.
      remainder: the value that receives the rest of the stick. "zero" means 0, and "own" means the
        value of the query's own token, as in the released models.
    """

    see_itself: bool = False
    remainder: Literal["zero", "own"] = "zero"


@ENCODINGS.register("stick_breaking")
class StickBreaking(Encoding):
    """Each key, from the nearest to the farthest, breaks a share off the stick that the nearer keys
    have left.

        a_ij = σ(s_ij) Π_{j<l<i} (1 − σ(s_il)),   s_ij = q_i·k_j/√K,   out_i = Σ_{j<i} a_ij v_j + (1 − Σ_j a_ij) r_i.

    Tan et al. (arXiv 2410.17980). There is no softmax, no parameter and no position: a near key
    hides the far ones. Yet it is a softmax over log a_ij with a sink whose logit is the log of the
    remaining stick, because these weights sum to 1. So it runs wherever softmax attention runs.

    The carry is the log of the remaining stick, Σ log(1 − σ(s_il)) over the nearer keys. Once it is
    below −104 in every row, all farther keys have weight 0 and are skipped. It is for causal
    attention.
    """

    Config = StickBreakingConfig
    traits = Traits(causal_only=True, excludes=("score",))

    def __init__(self, config: StickBreakingConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.traits = dataclasses.replace(self.traits, sink_value=config.remainder)

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        return ((), ()) if self.config.see_itself else token_indices(tokens.k, state)

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(sums=jnp.zeros(q_BHLK.shape[:3], accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        kept_BHLM, left_BHLM = jax.nn.log_sigmoid(pairs.logits), jax.nn.log_sigmoid(-pairs.logits)
        if self.config.see_itself:
            sums_BHLM, after_BHL = sum_over_nearer(left_BHLM, pairs, carry.sums)
            return kept_BHLM + sums_BHLM, carry._replace(sums=after_BHL)
        own_B1LM = is_own_token(pairs.q_features, pairs.k_features)
        left_BHLM = jnp.where(own_B1LM, jnp.zeros((), left_BHLM.dtype), left_BHLM)
        sums_BHLM, after_BHL = sum_over_nearer(left_BHLM, pairs, carry.sums)
        hidden = jnp.full((), jnp.finfo(left_BHLM.dtype).min, left_BHLM.dtype)
        return jnp.where(own_B1LM, hidden, kept_BHLM + sums_BHLM), carry._replace(sums=after_BHL)

    def done(self, carry: Carry) -> Array:
        return carry.sums < _NOTHING_LEFT

    def sink(self, carry: Carry) -> Array:
        return carry.sums
