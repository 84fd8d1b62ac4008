"""Position encoding by accumulated Householder transformations."""

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
from cope_jax.encodings.common import blocks_of, project, sum_over_nearer
from cope_jax.ops.convolution import causal_convolution
from cope_jax.ops.grouped_matmul import group, ungroup
from cope_jax.ops.triangular import inverse_of_unit_lower
from cope_jax.registry import check_at_least, check_unused

BLOCK = 64  # keys whose transformations are joined by one triangular system


@dataclasses.dataclass(frozen=True)
class PaTHConfig:
    """The options of PaTH.

    Attributes:
      rank: the rank of the projection to w.
      width: the number of tokens in the convolution over w; 1 means none.
      forget: whether the forget gates of FoX are added ("PaTH-FoX").
      bias: initial bias of the forget gates.
    """

    rank: int = 32
    width: int = 3
    forget: bool = False
    bias: float = 0.0


@ENCODINGS.register("path")
class PaTH(Encoding):
    """Each token reflects the query a little: the logit of a key depends on all tokens between it
    and the query.

        a_ij = softmax_j(k_j·(H_{j+1} H_{j+2} … H_i) q_i/√K [+ Σ_{l=j+1..i} log f_l]),   H_l = I − β_l w_l w_lᵀ,
        w_l = SiLU(conv(W_2 W_1 x_l)) divided by its norm,   β_l = 2σ(u·x_l + b) in (0, 2).

    Yang et al. (arXiv 2505.16381). H_i acts on the query first. x is the input of the layer, and
    there is one w and one β for each key/value head. With `forget` it is PaTH-FoX; its released
    code also divides the sum of log f by √K, which the paper does not.

    The carry's state is the transformed query c_i, `[B, H, L, K]`. Blocks of 64 keys are joined by
    one triangular system, U = (I + strictLower(D W Wᵀ))⁻¹ D with D = diag(β):  logits = (c Kᵀ − (c
    Wᵀ) U strictLower(W Kᵀ))/√K, and c ← c − (c Wᵀ) U W. Memory is linear in the length. Each query
    must see an unbroken run of keys that ends with its own token, as with causality, windows and
    packed documents, so a given mask is refused.

    Raises:
      ConfigError: `features` is called without x.
    """

    Config = PaTHConfig
    traits = Traits(causal_only=True, excludes=("rotate",), takes_masks=False, reads_logits=False)

    def __init__(self, config: PaTHConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "path", rank=config.rank, width=config.width)
        initial, groups = jax.nn.initializers.lecun_normal(), shape.kv_heads
        self.into = nnx.Param(initial(rngs.params(), (shape.width, config.rank)))
        out = initial(rngs.params(), (config.rank, groups * shape.head_dim))
        self.out = nnx.Param(
            out.reshape(config.rank, groups, shape.head_dim), axes=(None, "kv_heads", None)
        )
        bound = config.width**-0.5
        size = (config.width, groups, shape.head_dim)
        convolution = jax.random.uniform(rngs.params(), size, minval=-bound, maxval=bound)
        self.convolution = nnx.Param(convolution, axes=(None, "kv_heads", None))
        self.beta_kernel = nnx.Param(
            initial(rngs.params(), (shape.width, groups)), axes=("embed", "kv_heads")
        )
        self.beta_bias = nnx.Param(jnp.zeros((groups,)), axes=("kv_heads",))
        if config.forget:
            forget_kernel = 0.02 * jax.random.normal(rngs.params(), (shape.width, shape.num_heads))
            self.forget_kernel = nnx.Param(forget_kernel, axes=("embed", "heads"))
            self.forget_bias = nnx.Param(jnp.full((shape.num_heads,), config.bias), axes=("heads",))
        else:
            check_unused(config, "path", bias="without forget")

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        coordinates = project("path", tokens.x, self.into[...])
        dtype = coordinates.dtype
        raw_BMGK = project("path", coordinates, self.out[...])
        size, kernel = raw_BMGK.shape, self.convolution[...].astype(dtype)
        mixed, state = causal_convolution(
            raw_BMGK.reshape(*size[:2], -1),
            kernel.reshape(len(kernel), -1),
            tokens.segment_ids,
            state,
        )
        w_BMGK = jax.nn.silu(mixed).reshape(size)
        w_BMGK = w_BMGK * jax.lax.rsqrt(jnp.sum(w_BMGK**2, axis=-1, keepdims=True) + 1e-6)
        features = {
            "w": w_BMGK,
            "beta": 2
            * jax.nn.sigmoid(project("path", tokens.x, self.beta_kernel[...], self.beta_bias[...])),
        }
        if self.config.forget:
            logits = project("path", tokens.x, self.forget_kernel[...], self.forget_bias[...])
            features["log_f"] = jax.nn.log_sigmoid(logits)
        return features, state

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        dtype = accumulator_dtype(q_BHLK.dtype)
        sums = jnp.zeros(q_BHLK.shape[:3], dtype) if self.config.forget else ()
        return Carry(sums=sums, state=q_BHLK.astype(dtype))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        # Errors of the state would grow along the keys.
        with jax.default_matmul_precision("highest"):
            logits_BHLM, state = _transformed_logits(pairs, carry.state)
        if not self.config.forget:
            return logits_BHLM, carry._replace(state=state)
        sums_BHLM, after_BHL = sum_over_nearer(pairs.k_features["log_f"], pairs, carry.sums)
        return logits_BHLM + sums_BHLM, carry._replace(sums=after_BHL, state=state)


def _transformed_logits(pairs: Pairs, c_BHLK: Array) -> tuple[Array, Array]:
    """Returns (logits_BHLM, the transformed queries after the block)."""
    dtype, (_, groups, keys, width) = c_BHLK.dtype, pairs.k.shape
    size = min(BLOCK, keys)
    mask = jnp.broadcast_to(pairs.mask, (*pairs.mask.shape[:2], c_BHLK.shape[2], keys))
    k, w, beta = pairs.k.astype(dtype), pairs.k_features["w"], pairs.k_features["beta"]

    def step(c_BGRLK: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        k_BGMK, w_BGMK, beta_BGM, mask_B1LM = block
        products = jnp.einsum("BGMK,BGNK->BGMN", w_BGMK, w_BGMK)
        u_BGMN = (
            inverse_of_unit_lower(jnp.tril(beta_BGM[..., None] * products, -1))
            * beta_BGM[:, :, None]
        )
        seen = jnp.where(
            mask_B1LM[:, None],
            jnp.einsum("BGRLK,BGMK->BGRLM", c_BGRLK, w_BGMK),
            jnp.zeros((), dtype),
        )
        reflected = jnp.einsum("BGRLM,BGMN->BGRLN", seen, u_BGMN)
        between = jnp.tril(jnp.einsum("BGMK,BGNK->BGMN", w_BGMK, k_BGMK), -1)
        logits = jnp.einsum("BGRLK,BGMK->BGRLM", c_BGRLK, k_BGMK) - jnp.einsum(
            "BGRLM,BGMN->BGRLN", reflected, between
        )
        return c_BGRLK - jnp.einsum("BGRLM,BGMK->BGRLK", reflected, w_BGMK), logits

    parts = (
        jnp.moveaxis(blocks_of(x, axis, size), axis, 0)
        for x, axis in ((k, 2), (w, 2), (beta, 2), (mask, 3))
    )
    # The nearest keys first.
    c_BGRLK, blocks = jax.lax.scan(step, group(c_BHLK, groups), tuple(parts), reverse=True)
    logits_BGRLM = jnp.concatenate(jnp.unstack(blocks), axis=-1)[..., -keys:]
    return ungroup(logits_BGRLM) * width**-0.5, ungroup(c_BGRLK)
