"""TAPE: tokens carry their positions from layer to layer, and every layer changes them."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings import AttentionShape, EncodingConfig
from cope_jax.encodings.rotations import frequencies, turn_pairs
from cope_jax.layers.block import Block
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.self_attention import Context, SelfAttention
from cope_jax.layout import Layout

BASE = 10_000.0
# For products of positions, in float32.
exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def with_positions(x_BLD: Array, positions_BL: Any, shape: AttentionShape) -> Array:
    """Returns the stream x_BLE of tokens and positions, E = D + H·K, in the type of positions.

    The position of a token, e_HK, has K/2 pairs (cos, sin) for each head, at first those of RoPE.
    """
    dtype = accumulator_dtype(x_BLD.dtype)
    frequencies_C = frequencies(BASE, shape.head_dim).astype(dtype)
    angles = jnp.asarray(positions_BL, dtype)[..., None] * frequencies_C[None, None]
    e_BLK = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    e_BLE = jnp.broadcast_to(
        jnp.tile(e_BLK, shape.num_heads), (*x_BLD.shape[:2], shape.num_heads * shape.head_dim)
    )
    return jnp.concatenate([x_BLD.astype(dtype), e_BLE], axis=-1)


class TapeAttention(SelfAttention):
    """Self-attention that rotates q and k by the stream's positions, and sums these like values."""

    def _heads(
        self, x_BLD: Array, context: Context, segment_ids_BL: Array | None, windows: PyTree = None
    ) -> tuple[Array, Array, Array, PyTree]:
        q_BLHK, k_BLHK, v_BLHK, windows = super()._heads(
            self._layer_input(x_BLD), context, segment_ids_BL, windows
        )
        e_BLHK = x_BLD[..., self.config.model_dim :].reshape(q_BLHK.shape)
        e_BLHK = context.layout.constrain(e_BLHK, "batch", "length", "width", None)
        cos, sin = jnp.split(e_BLHK, 2, axis=-1)
        v_BLHV = jnp.concatenate([v_BLHK.astype(e_BLHK.dtype), e_BLHK], axis=-1)
        return turn_pairs(q_BLHK, cos, sin), turn_pairs(k_BLHK, cos, sin), v_BLHV, windows

    def _layer_input(self, x_BLD: Array) -> Array:
        return x_BLD[..., : self.config.model_dim].astype(self.config.dtype)

    def _merge_heads(self, x_BLD: Array, out_BLHK: Array) -> Array:
        out_BLHK, moved_BLHK = jnp.split(out_BLHK, 2, axis=-1)
        out_BLD = super()._merge_heads(x_BLD, out_BLHK.astype(self.config.dtype))
        moved_BLE = moved_BLHK.reshape(*moved_BLHK.shape[:2], -1)
        return jnp.concatenate([out_BLD.astype(moved_BLE.dtype), moved_BLE], axis=-1)


class TapeBlock(Block):
    """A block of TAPE, "contextualized equivariant position encoding" (Zhu et al., 2501.00712).

    Besides x_i, each token has a position e_i, K/2 pairs (cos, sin) for each head, which every
    block changes:

        a_ij = softmax_j (R(e_i) q_i · R(e_j) k_j / √K),
        e_i ← e_i + M Σ_j a_ij e_j,
        e_i ← e_i + W_down (silu(W_token f_i) ⊙ W_up e_i),

    where R(e) rotates pairs of features as RoPE does, with the cos and sin of e; f_i is the output
    of the feed-forward layer; M, W_up and W_down mix heads. So all positions turn together if all
    tokens move, and logits do not change. M and W_up are 0 at first: then the block is one with
    RoPE.

    The code of the paper sums M over its rows, so its heads do not mix: here they do, as in the
    paper. For training it adds a random offset to the positions of each sequence; here the
    positions are those of the task.

    Args:
      config, encoding, shape, num_layers: see `Block`.
      units: S, the number of rows of W_token and W_up; 48 in the paper.
    """

    mixers: ClassVar[dict[str, Any]] = {"attention": TapeAttention}

    def __init__(
        self,
        config: BlockConfig,
        encoding: EncodingConfig,
        shape: AttentionShape,
        num_layers: int,
        units: int,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, encoding, shape, num_layers, rngs=rngs)
        heads, normal = shape.num_heads, jax.nn.initializers.lecun_normal()
        self.mix_HH = nnx.Param(jnp.zeros((heads, heads)), axes=(None, None))
        self.up_HS = nnx.Param(jnp.zeros((heads, units)), axes=(None, None))
        self.token_DS = nnx.Param(
            normal(rngs.params(), (config.model_dim, units)), axes=("embed", None)
        )
        self.down_SH = nnx.Param(normal(rngs.params(), (units, heads)), axes=(None, None))

    def value(self) -> Any:
        return jax.ShapeDtypeStruct(
            (2 * self.shape.head_dim,), accumulator_dtype(self.config.dtype)
        )

    def _attention_input(self, x_BLD: Array) -> Array:
        x_BLD, e_BLE = self._split(x_BLD)
        return jnp.concatenate(
            [super()._attention_input(x_BLD).astype(e_BLE.dtype), e_BLE], axis=-1
        )

    def _add(
        self, x_BLD: Array, attended_BLD: Array, layout: Layout, *keys: Array | None
    ) -> tuple[Array, Array]:
        x_BLD, e_BLE = self._split(x_BLD)
        attended_BLD, moved_BLE = self._split(attended_BLD)
        x_BLD, fed_BLD = super()._add(x_BLD, attended_BLD, layout, *keys)
        dtype, heads = e_BLE.dtype, (*e_BLE.shape[:2], self.shape.num_heads, -1)
        token_BLD = fed_BLD.astype(dtype)
        mix, up, token, down = (
            p[...].astype(dtype) for p in (self.mix_HH, self.up_HS, self.token_DS, self.down_SH)
        )
        e_BLHK = e_BLE.reshape(heads) + exact_einsum("HG,BLGK->BLHK", mix, moved_BLE.reshape(heads))
        units_BLSK = exact_einsum("HS,BLHK->BLSK", up, e_BLHK)
        gates_BLS1 = jax.nn.silu(exact_einsum("BLD,DS->BLS", token_BLD, token))[..., None]
        e_BLHK += exact_einsum("SH,BLSK->BLHK", down, gates_BLS1 * units_BLSK)
        x_BLD = jnp.concatenate([x_BLD.astype(dtype), e_BLHK.reshape(e_BLE.shape)], axis=-1)
        return layout.constrain(x_BLD, "batch", "length", None), fed_BLD

    def _split(self, x_BLE: Array) -> tuple[Array, Array]:
        """Returns (tokens in the compute type, positions)."""
        width = self.config.model_dim
        return x_BLE[..., :width].astype(self.config.dtype), x_BLE[..., width:]
