"""The self-attention layer."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.attention import Cache, attend, attend_cached, prepare
from cope_jax.attention.full import weights_of
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.layers.attention_options import AttentionOptions
from cope_jax.layers.basic import create_linear
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layout import WHOLE, Layout


@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs that all layers of one forward pass share.

    Attributes:
      positions: `[B, L]` or `[1, L]`, int32 or float32.
      segment_ids: `[B, L]`; None means one document in each row.
      causal: whether each token sees only itself and earlier tokens; if False, each token sees all
        tokens.
      layout: how activations are sharded.
    """

    positions: Any
    segment_ids: Array | None = None
    causal: bool = True
    layout: Layout = WHOLE


class SelfAttention(nnx.Module):
    """Multi-head self-attention, W_o attend(W_q x, W_k x, W_v x), with grouped key/value heads.

    See `AttentionOptions` for what a config may add around `attend`.
    """

    def __init__(self, config: BlockConfig, residual_scale: float, *, rngs: nnx.Rngs):
        shape, width = config.attention_shape(None), config.model_dim
        self.config = config
        self.shape = shape
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        bias: Any = {"use_bias": config.qkv_bias, "rngs": rngs}
        self.query = create_linear(config, width, heads, ("embed", "heads"), **bias)
        self.key = create_linear(config, width, kv_heads, ("embed", "kv_heads"), **bias)
        self.value = create_linear(config, width, kv_heads, ("embed", "kv_heads"), **bias)
        self.out = create_linear(
            config, heads, width, ("heads", "embed"), scale=residual_scale, rngs=rngs
        )
        self.options = AttentionOptions(config, rngs=rngs) if config.attention_options else None

    def __call__(
        self, x_BLD: Array, encoding: Encoding, context: Context, dropout_key: Array | None = None
    ) -> Array:
        q, k, v, _ = self._heads(x_BLD, context, context.segment_ids)
        options = self._attend_options(x_BLD, encoding, context)
        options |= {"dropout_rate": self.config.dropout, "dropout_key": dropout_key}
        out_BLHK = attend(q, k, v, **self._execution(context), **options)
        return self._merge_heads(x_BLD, out_BLHK)

    def extend(
        self,
        x_BLD: Array,
        encoding: Encoding,
        context: Context,
        cache: Cache,
        layer: Any,
        *,
        first: bool,
    ) -> tuple[Array, Cache]:
        """Adds keys and values of the newest tokens to the cache, and attends from them to all.

        The newest tokens are the tokens of the last `Cache.enter`. The cache is for all layers of
        the model; `layer` is the index of this layer. If `first` is true, the cache was empty
        before these tokens, so they attend only to each other.
        """
        segment_ids_BL = cache.latest(x_BLD.shape[1])[1]
        q, k, v, windows = self._heads(x_BLD, context, segment_ids_BL, cache.windows_of(layer))
        x = self._layer_input(x_BLD)
        cache = cache.append(q, k, v, encoding=encoding, x_BLD=x, layer=layer).with_windows(
            windows, layer
        )
        if first:
            options = self._attend_options(x_BLD, encoding, context)
            out_BLHK = attend(q, k, v, **self._execution(context), **options)
        else:
            options = self._logits_options()
            out_BLHK = attend_cached(
                q, cache, encoding=encoding, embedded=True, layer=layer, **options
            )
        return self._merge_heads(x_BLD, out_BLHK), cache

    def maps(self, x_BLD: Array, encoding: Encoding, context: Context) -> dict[str, Array]:
        """The weights, as "attention", and the encoding's maps by name, each `[B, H, L, L]`."""
        q, k, v, _ = self._heads(x_BLD, context, context.segment_ids)
        request = prepare(q, k, v, **self._attend_options(x_BLD, encoding, context))
        return {"attention": weights_of(encoding, request)[0], **encoding.maps(request.pairs())}

    def windows(self, batch: int) -> PyTree:
        """Shapes and types of the layer's state in a cache, besides keys and values."""
        if self.options is None:
            return {}
        options, dtype, width = self.options, self.config.dtype, self.shape.head_dim
        x_BLD = jax.ShapeDtypeStruct((batch, 1, self.config.model_dim), dtype)
        q, k = (
            jax.ShapeDtypeStruct((batch, 1, heads, width), dtype)
            for heads in (self.shape.num_heads, self.shape.kv_heads)
        )
        return jax.eval_shape(
            lambda x_BLD, q, k: options.before(x_BLD, q, k, k, None)[3], x_BLD, q, k
        )

    def _layer_input(self, x_BLD: Array) -> Array:
        """Returns what encodings and options read."""
        return x_BLD

    def _execution(self, context: Context) -> dict[str, Any]:
        # Ring attention needs a sequence that is split over devices. It is not split while a config
        # is checked.
        alone = self.config.attention == "ring" and context.layout.length is None
        return {
            "implementation": "auto" if alone else self.config.attention,
            "blocks": self.config.attention_blocks,
            "sequence_axis": context.layout.length,
            "batch_axes": context.layout.batch,
            "head_axis": context.layout.width,
        }

    def _merge_heads(self, x_BLD: Array, out_BLHK: Array) -> Array:
        if self.options is not None:
            out_BLHK = self.options.after(self._layer_input(x_BLD), out_BLHK)
        return self.out(out_BLHK.reshape(*out_BLHK.shape[:2], -1))

    def _heads(
        self, x_BLD: Array, context: Context, segment_ids_BL: Array | None, windows: PyTree = None
    ) -> tuple[Array, Array, Array, PyTree]:
        """Returns (q_BLHK, k_BMGK, v_BMGK, the windows of the options after these tokens)."""
        heads = (*x_BLD.shape[:2], -1, self.shape.head_dim)
        q_BLHK, k_BMGK, v_BMGK = (
            context.layout.constrain(linear(x_BLD).reshape(heads), "batch", "length", "width", None)
            for linear in (self.query, self.key, self.value)
        )
        if self.options is None:
            return q_BLHK, k_BMGK, v_BMGK, {}
        return self.options.before(x_BLD, q_BLHK, k_BMGK, v_BMGK, segment_ids_BL, windows)

    def _logits_options(self) -> dict[str, Any]:
        return {
            "window": self.config.window,
            "scale": self.config.attention_scale,
            "logits_soft_cap": self.config.attention_cap,
        }

    def _attend_options(self, x_BLD: Array, encoding: Encoding, context: Context) -> dict[str, Any]:
        if encoding.traits.causal_only and not context.causal:
            raise ConfigError(
                "the encoding is for causal attention, and this model sees tokens on both sides: choose another, such "
                "as rope, t5(bidirectional=True), relative(signed=True) or cope_two_sided"
            )
        return {
            "encoding": encoding,
            "x": self._layer_input(x_BLD),
            "embedded": True,
            "q_positions": context.positions,
            "k_positions": context.positions,
            "q_segment_ids": context.segment_ids,
            "k_segment_ids": context.segment_ids,
            "causal": context.causal,
            **self._logits_options(),
        }
