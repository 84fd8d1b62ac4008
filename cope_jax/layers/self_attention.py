"""The self-attention layer."""

import dataclasses
from typing import Any

from flax import nnx

from cope_jax.array_types import Array
from cope_jax.attention import Cache, attend, attend_cached, attention_weights, prepare
from cope_jax.encodings import Encoding, features_of
from cope_jax.layers.basic import create_linear
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import WHOLE, Layout


@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs that all layers of one forward pass share.

    Attributes:
      positions: `[B, L]` or `[1, L]`, int32.
      segment_ids: `[B, L]`; None means one document in each row.
      causal: whether each token sees only itself and earlier tokens; if False, each token sees all tokens.
      layout: how activations are sharded.
    """

    positions: Any
    segment_ids: Array | None = None
    causal: bool = True
    layout: Layout = WHOLE


class SelfAttention(nnx.Module):
    """Multi-head self-attention, out = W_o attend(W_q x, W_k x, W_v x), with grouped key/value heads."""

    def __init__(self, config: BlockConfig, residual_scale: float, *, rngs: nnx.Rngs):
        shape, width = config.attention_shape(None), config.model_dim
        self.config = config
        self.shape = shape
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.query = create_linear(config, width, heads, ("embed", "heads"), rngs=rngs)
        self.key = create_linear(config, width, kv_heads, ("embed", "kv_heads"), rngs=rngs)
        self.value = create_linear(config, width, kv_heads, ("embed", "kv_heads"), rngs=rngs)
        self.out = create_linear(config, heads, width, ("heads", "embed"), scale=residual_scale, rngs=rngs)

    def __call__(self, x_BLD: Array, encoding: Encoding, context: Context, dropout_key: Array | None = None) -> Array:
        q, k, v, options = self._attend_arguments(x_BLD, encoding, context)
        options |= {"dropout_rate": self.config.dropout, "dropout_key": dropout_key}
        out_BLHK = attend(q, k, v, **self._execution(context), **options)
        return self._merge_heads(out_BLHK)

    def extend(
        self, x_BLD: Array, encoding: Encoding, context: Context, cache: Cache, layer: Any, *, first: bool
    ) -> tuple[Array, Cache]:
        """Adds the keys and values of the newest tokens to the cache, and attends from them to all tokens in the cache.

        The newest tokens are the tokens of the last `Cache.enter`. The cache is for all layers of the model; `layer` is
        the index of this layer. If `first` is true, the cache was empty before these tokens, so they attend only to
        each other.
        """
        q, k, v, options = self._attend_arguments(x_BLD, encoding, context)
        cache = cache.append(q, k, v, encoding=encoding, x_BLD=x_BLD, layer=layer)
        if first:
            out_BLHK = attend(q, k, v, **self._execution(context), **options)
        else:
            out_BLHK = attend_cached(q, cache, encoding=encoding, embedded=True, layer=layer)
        return self._merge_heads(out_BLHK), cache

    def maps(self, x_BLD: Array, encoding: Encoding, context: Context) -> dict[str, Array]:
        """The attention weights, as "attention", and the encoding's maps by name, each `[B, H, L, L]`."""
        q, k, v, options = self._attend_arguments(x_BLD, encoding, context)
        inputs = prepare(q, k, v, **options)
        return {"attention": attention_weights(encoding, inputs), **encoding.maps(inputs.pairs())}

    def _execution(self, context: Context) -> dict[str, Any]:
        # Ring attention needs a sequence that is split over devices. It is not split while a config is checked.
        alone = self.config.attention == "ring" and context.layout.length is None
        return {
            "implementation": "auto" if alone else self.config.attention,
            "blocks": self.config.attention_blocks,
            "sequence_axis": context.layout.length,
            "batch_axes": context.layout.batch,
            "head_axis": context.layout.width,
        }

    def _merge_heads(self, out_BLHK: Array) -> Array:
        return self.out(out_BLHK.reshape(*out_BLHK.shape[:2], -1))

    def _attend_arguments(
        self, x_BLD: Array, encoding: Encoding, context: Context
    ) -> tuple[Array, Array, Array, dict[str, Any]]:
        heads = (*x_BLD.shape[:2], -1, self.shape.head_dim)
        q_BLHK, k_BMGK, v_BMGK = (
            context.layout.constrain(linear(x_BLD).reshape(heads), "batch", "length", "width", None)
            for linear in (self.query, self.key, self.value)
        )
        options = {
            "encoding": encoding,
            "features": features_of(encoding, x_BLD, q_BLHK, k_BMGK, v_BMGK, None, context.segment_ids)[0],
            "embedded": True,
            "q_positions": context.positions,
            "k_positions": context.positions,
            "q_segment_ids": context.segment_ids,
            "k_segment_ids": context.segment_ids,
            "causal": context.causal,
        }
        return q_BLHK, k_BMGK, v_BMGK, options
