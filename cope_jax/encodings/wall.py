"""Wall attention."""

import dataclasses

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
from cope_jax.encodings.common import blocks_of, project
from cope_jax.ops.grouped_matmul import group, ungroup
from cope_jax.registry import check_at_least

BLOCK = 32  # keys that are visited at a time


@dataclasses.dataclass(frozen=True)
class WallConfig:
    """The options of Wall.

    Attributes:
      bias: initial b. With b = 8 a feature loses a 3,000th of its size with each token.
      stddev: standard deviation of the initial W.
    """

    bias: float = 8.0
    stddev: float = 0.02


@ENCODINGS.register("wall")
class Wall(Encoding):
    """Each token has a forget gate for each feature of a head, which shrinks this feature in the
    products with all earlier keys.

        f_jn = σ(w_n·x_j + b_n),   a_ij = softmax_j(Σ_n q_in k_jn Π_{l=j+1..i} f_ln /√K).

    Wall attention (blog.tilderesearch.com/blog/wall-attn); x is the input of the layer, and each
    query head has gates of its own. With a scalar forget gate it is `wall+fox`. It is for causal
    attention. It replaces q·k, so no encoding that rotates can be combined with it.

    The keys are visited from the nearest to the farthest, in blocks. The state is c_i = q_i Π f
    over the nearer tokens; the logits of a block are products of c_i with keys that shrink towards
    its end. All exponents are sums of log f, so nothing overflows. A query's own block is computed
    feature by feature. The keys that a query sees must be unbroken up to its own token, as with
    causality, windows and packed documents, so a given mask is refused.

    Raises:
      ConfigError: `features` is called without x.
    """

    Config = WallConfig
    traits = Traits(causal_only=True, excludes=("rotate",), takes_masks=False, reads_logits=False)

    def __init__(self, config: WallConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(0, "wall", stddev=config.stddev)
        size = (shape.num_heads, shape.head_dim)
        kernel = config.stddev * jax.random.normal(rngs.params(), (shape.width, *size))
        self.kernel = nnx.Param(kernel, axes=("embed", "heads", None))
        self.bias = nnx.Param(jnp.full(size, config.bias), axes=("heads", None))

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        return jax.nn.log_sigmoid(project("wall", tokens.x, self.kernel[...], self.bias[...])), ()

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return Carry(state=q_BHLK.astype(accumulator_dtype(q_BHLK.dtype)))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        logits_BHLM, state = _decayed_logits(pairs, carry.state)
        return logits_BHLM, carry._replace(state=state)


def _decayed_logits(pairs: Pairs, c_BHLK: Array) -> tuple[Array, Array]:
    """Returns (logits_BHLM, the state after the block)."""
    dtype, (_, groups, keys, width) = c_BHLK.dtype, pairs.k.shape
    size = min(BLOCK, keys)
    padding = -keys % size
    mask_BLM = jnp.broadcast_to(pairs.mask[:, 0], (len(c_BHLK), c_BHLK.shape[2], keys))
    seen_BLSM = blocks_of(mask_BLM, 2, size)
    k_BGSMK = blocks_of(pairs.k.astype(dtype), 2, size)
    log_f_BGRSMK = blocks_of(group(pairs.k_features, groups), 3, size)
    after_MM = jnp.triu(jnp.ones((size, size), dtype), 1)
    exact = jax.lax.Precision.HIGHEST

    def step(c_BGRLK: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        k_BGMK, log_f_BGRMK, seen_BLM = block
        to_end_BGRMK = jnp.einsum("MN,BGRNK->BGRMK", after_MM, log_f_BGRMK, precision=exact)
        logits = jnp.einsum(
            "BGRLK,BGRMK->BGRLM", c_BGRLK, k_BGMK[:, :, None] * jnp.exp(to_end_BGRMK)
        )
        passed_BGRLK = jnp.einsum(
            "BLM,BGRMK->BGRLK", seen_BLM.astype(dtype), log_f_BGRMK, precision=exact
        )
        return c_BGRLK * jnp.exp(passed_BGRLK), logits

    parts = (
        jnp.moveaxis(k_BGSMK, 2, 0),
        jnp.moveaxis(log_f_BGRSMK, 3, 0),
        jnp.moveaxis(seen_BLSM, 2, 0),
    )
    q_BGRLK = group(c_BHLK, groups)
    c_BGRLK, logits_SBGRLM = jax.lax.scan(step, q_BGRLK, parts, reverse=True)

    # A query's own token is the nearest key that it sees. In its block, only the tokens that it
    # sees count.
    own_BL = padding + jnp.max(jnp.where(mask_BLM, jnp.arange(keys)[None, None], 0), axis=-1)
    block_BL = own_BL // size
    seen_BLM = jnp.take_along_axis(seen_BLSM, block_BL[:, :, None, None], axis=2)[:, :, 0]
    k_BGLMK = jnp.take_along_axis(k_BGSMK, block_BL[:, None, :, None, None], axis=2)
    log_f_BGRLMK = jnp.take_along_axis(log_f_BGRSMK, block_BL[:, None, None, :, None, None], axis=3)
    log_f_BGRLMK = jnp.where(
        seen_BLM[:, None, None, :, :, None], log_f_BGRLMK, jnp.zeros((), dtype)
    )
    decay_BGRLMK = jnp.exp(jnp.einsum("MN,BGRLNK->BGRLMK", after_MM, log_f_BGRLMK, precision=exact))
    own_BGRLM = jnp.einsum("BGRLK,BGLMK,BGRLMK->BGRLM", q_BGRLK, k_BGLMK, decay_BGRLMK)
    is_own_SBL = jnp.arange(len(logits_SBGRLM))[:, None, None] == block_BL[None]
    logits_SBGRLM = jnp.where(is_own_SBL[:, :, None, None, :, None], own_BGRLM[None], logits_SBGRLM)
    logits_BGRLM = jnp.moveaxis(logits_SBGRLM, 0, -2).reshape(*q_BGRLK.shape[:-1], -1)[
        ..., padding:
    ]
    return ungroup(logits_BGRLM) * width**-0.5, ungroup(c_BGRLK)
