"""The transformer block: attention and feed-forward with residual connections."""

from typing import Any, ClassVar

import jax
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.attention import Cache
from cope_jax.encodings import AttentionShape, Composed, EncodingConfig
from cope_jax.layers.basic import MLP, Norm
from cope_jax.layers.block_config import KINDS, BlockConfig
from cope_jax.layers.recurrent_mixer import RecurrentMixer
from cope_jax.layers.self_attention import Context, SelfAttention
from cope_jax.layout import Layout
from cope_jax.ops.dropout import dropout


class Block(nnx.Module):
    """A transformer block: attention, then the feed-forward layer, each with a norm and a residual.

    Pre-norm: x ← x + f(norm(x)), Xiong et al. (arXiv 2002.04745). Post-norm: x ← norm(x + f(x)),
    Vaswani et al. (arXiv 1706.03762). Both: x ← x + norm(f(norm(x))), as in Gemma 2. Here f is
    first attention, and then the feed-forward layer; with `parallel` both read the same x.

    Args:
      config: sizes and choices.
      encoding: the parts of the encoding that the layers do not share.
      shape: the sizes that the encoding is built for.
      num_layers: the number of layers of the model. What each layer adds to the residual stream is
        initially scaled by 1/√(2·num_layers), unless `config.initial_stddev` is set.
    """

    mixers: ClassVar[dict[str, Any]] = {"attention": SelfAttention} | dict.fromkeys(
        KINDS, RecurrentMixer
    )

    def __init__(
        self,
        config: BlockConfig,
        encoding: EncodingConfig,
        shape: AttentionShape,
        num_layers: int,
        *,
        rngs: nnx.Rngs,
    ):
        residual_scale = (2 * num_layers) ** -0.5
        self.config = config
        self.shape = shape
        self.encoding = encoding.build(shape, rngs=rngs)
        self.attention = self.mixers[config.mixer](config, residual_scale, rngs=rngs)
        self.attention_norm = Norm(config, rngs=rngs)
        self.normed = config.norms_input
        self.mlp = MLP(config, residual_scale, rngs=rngs)
        self.mlp_norm = Norm(config, rngs=rngs)
        both = config.norm_position == "both"
        self.attention_output_norm = Norm(config, rngs=rngs) if both else None
        self.mlp_output_norm = Norm(config, rngs=rngs) if both else None

    def __call__(
        self, x_BLD: Array, shared: Composed, context: Context, dropout_key: Array | None = None
    ) -> Array:
        """The residual stream x_BLD after the block, with the `shared` encoding of all layers."""
        keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        attended_BLD = self.attention(
            self._attention_input(x_BLD), self.compose(shared), context, keys[0]
        )
        return self._add(x_BLD, attended_BLD, context.layout, keys[1], keys[2])[0]

    def extend(
        self,
        x_BLD: Array,
        shared: Composed,
        context: Context,
        cache: Cache,
        layer: Any,
        *,
        first: bool,
    ) -> tuple[Array, Cache]:
        """Like `__call__`, for tokens that follow those in a cache: see `SelfAttention.extend`."""
        attended_BLD, cache = self.attention.extend(
            self._attention_input(x_BLD), self.compose(shared), context, cache, layer, first=first
        )
        return self._add(x_BLD, attended_BLD, context.layout)[0], cache

    def maps(self, x_BLD: Array, shared: Composed, context: Context) -> dict[str, Array]:
        """The attention maps of this block, by name: see `SelfAttention.maps`."""
        return self.attention.maps(self._attention_input(x_BLD), self.compose(shared), context)

    def value(self) -> Any:
        """The width and type of a head's value in a cache; None if they are those of a key."""
        return None

    def compose(self, shared: Composed) -> Composed:
        """The encoding of this layer's attention: the shared parts and its own."""
        return Composed(shared.parts | self.encoding.parts, self.shape)

    def _attention_input(self, x_BLD: Array) -> Array:
        return self.attention_norm(x_BLD) if self.normed else x_BLD

    def _add(
        self,
        x_BLD: Array,
        attended_BLD: Array,
        layout: Layout,
        attention_key: Array | None = None,
        mlp_key: Array | None = None,
    ) -> tuple[Array, Array]:
        """Adds attention's output to the residual stream x, then f, the feed-forward layer's.

        Returns:
          (x_BLD, f_BLD).
        """
        rate, pre = self.config.dropout, self.config.norms_input
        input_BLD = x_BLD
        if self.attention_output_norm is not None:
            attended_BLD = self.attention_output_norm(attended_BLD)
        x_BLD = layout.constrain(
            x_BLD + dropout(attended_BLD, rate, attention_key), "batch", "length", None
        )
        x_BLD = x_BLD if pre else self.attention_norm(x_BLD)
        read_BLD = input_BLD if self.config.parallel else x_BLD
        fed_BLD = self.mlp(self.mlp_norm(read_BLD) if pre else read_BLD, layout)
        if self.mlp_output_norm is not None:
            fed_BLD = self.mlp_output_norm(fed_BLD)
        fed_BLD = dropout(fed_BLD, rate, mlp_key)
        x_BLD = x_BLD + fed_BLD
        return layout.constrain(
            x_BLD if pre else self.mlp_norm(x_BLD), "batch", "length", None
        ), fed_BLD
