"""The bidirectional encoder, its options and its published sizes."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings import EncodingConfig, Sharing
from cope_jax.errors import ConfigError
from cope_jax.layers.basic import Norm, create_linear
from cope_jax.layers.block import Block
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.layer_forms import check_layers, full_encoding, layer_forms
from cope_jax.layers.self_attention import Context
from cope_jax.layers.stack import Remat, create_stack, scan_stack
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.model import MOST_LAYERS, ModelOptions, check_shapes
from cope_jax.ops.dropout import dropout
from cope_jax.ops.gather import lookup
from cope_jax.registry import check_at_least, check_fields, unknown

SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Published sizes: layers, width, heads. Devlin et al. (1810.04805); Turc et al. (1908.08962)."""

Options = TypeVar("Options", bound="EncoderOptions")


def bert_block(model_dim: int = 256, num_heads: int = 4, **choices: Any) -> BlockConfig:
    """BERT's block: post-norm, exact GELU, ε = 1e-12, dropout 0.1, stddev 0.02, truncated."""
    defaults: dict[str, Any] = {
        "activation": "gelu_erf",
        "norm_position": "post",
        "norm_epsilon": 1e-12,
        "dropout": 0.1,
        "initial_stddev": 0.02,
    }
    return BlockConfig(model_dim=model_dim, num_heads=num_heads, **(defaults | choices))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions(ModelOptions):
    """The options that an experiment chooses for every model with an encoder.

    Attributes:
      num_layers: number of blocks.
      encoding_sharing: "layer" if each layer has its own encoding, "model" if all layers share one
        encoding.
      type_vocab_size: number of segment types; each token has one type. With 0 there are none.
      embedding_dim: E, the width of the embeddings; None means D. Otherwise a linear layer goes from
        E to D below the first block, as in ELECTRA.
      full_layers: the layers, from 0, without `block.window`; None means that all have it.
      full_encoding: the encoding of these layers, the same with other options, such as
        "rope(base=1e6)"; "" means the encoding of the others.
      first_norm: whether the first block normalises the input of its attention, which is already
        normalised, if `block.norm_position` is not "post".
      remat: what each block keeps for the backward pass, as in `DecoderOptions`.
      block: the config of every block.
    """

    num_layers: int = 4
    encoding_sharing: Sharing = "layer"
    type_vocab_size: int = 2
    embedding_dim: int | None = None
    full_layers: tuple[int, ...] | None = None
    full_encoding: str = ""
    first_norm: bool = True
    remat: Remat = "none"
    block: BlockConfig = bert_block()

    def variant(self) -> dict[str, Any]:
        names = ("embedding_dim", "full_layers", "full_encoding", "first_norm")
        return self.changed(*names) | super().variant()

    @classmethod
    def of_size(cls: type[Options], size: str, **options: Any) -> Options:
        """Options of a published size: "tiny", "mini", "small", "medium", "base" or "large".

        >>> options = EncoderOptions.of_size("base")
        >>> options.num_layers, options.block.model_dim, options.block.num_heads
        (12, 768, 12)
        """
        if size not in SIZES:
            raise unknown("size of BERT", size, SIZES)
        layers, width, heads = SIZES[size]
        sizes: dict[str, Any] = {"num_layers": layers, "block": bert_block(width, heads)}
        return cls(**(sizes | options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(EncoderOptions):
    """The config of an encoder.

    Attributes:
      vocab_size: V, the number of different tokens.
      max_length: maximum length of a sequence, in tokens. The table of `learned`, the
        encoding of BERT, has this many rows.
      encoding: the position encoding.
      layout: how activations are sharded over a mesh.
    """

    vocab_size: int
    max_length: int = 512
    encoding: EncodingConfig = EncodingConfig((("learned", {}),))
    layout: Layout = WHOLE

    def __post_init__(self):
        name = self.name or "bert"
        check_fields(self, name)
        check_at_least(1, name, vocab_size=self.vocab_size, max_length=self.max_length)
        check_at_least(1, name, MOST_LAYERS, num_layers=self.num_layers)
        check_at_least(0, name, type_vocab_size=self.type_vocab_size)
        check_at_least(1, name, embedding_dim=self.embedding_dim)
        if self.embedding_dim is not None and self.encoding_sharing == "model":
            raise ConfigError(
                f"{name}.embedding_dim needs encoding_sharing='layer': a shared encoding has one width"
            )
        check_layers(self, name)
        if self.block.norm_position == "post" and not self.first_norm:
            raise ConfigError(
                f"{name}.first_norm=False has no effect with block.norm_position=post: set pre"
            )

    @property
    def stochastic(self) -> bool:
        return self.block.dropout > 0

    @property
    def embedding_block(self) -> BlockConfig:
        """The config of a block as wide as the embeddings."""
        head_dim = self.block.attention_shape(None).head_dim
        width = self.embedding_dim or self.block.model_dim
        return dataclasses.replace(self.block, model_dim=width, head_dim=head_dim)

    def encoder_flops(self, length: int) -> float:
        """FLOPs of training the blocks on a token, as in `DecoderConfig.flops_per_token`."""
        matrices, heads = self.block.matrix_parameters()
        widening = 6 * (self.embedding_dim or 0) * self.block.model_dim
        return float(self.num_layers * (6 * matrices + 12 * heads * length) + widening)


class Encoder(nnx.Module):
    """Turns tokens into contextual vectors, each of which depends on the tokens on both sides.

        x⁰ = norm(E[token] + S[segment] + position),   xˡ = block_l(xˡ⁻¹),   pooled = tanh(W x[CLS] + b).

    Devlin et al. (arXiv 1810.04805). `position` is what the encoding adds to the embeddings. BERT
    uses `learned`. If `block.norm_position` is not "post", a norm follows the last block, as in
    ModernBERT. Any encoding that makes sense without a causal mask may replace it: see
    docs/encodings.md.
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        block, width = config.block, config.block.model_dim
        narrow = config.embedding_block
        shape = block.attention_shape(config.max_length)
        shared, of_block = config.encoding.split(config.encoding_sharing)
        initial = jax.nn.initializers.truncated_normal(
            narrow.model_dim**-0.5 if (s := block.initial_stddev) is None else s
        )

        def embedding(rows: int, axes: tuple[str | None, str]) -> nnx.Embed:
            metadata = {"axes": axes}
            return nnx.Embed(
                rows,
                narrow.model_dim,
                embedding_init=initial,
                embedding_metadata=metadata,
                rngs=rngs,
            )

        self.config = config
        self.words = embedding(config.vocab_size, ("vocab", "embed"))
        kinds = config.type_vocab_size
        self.segments = embedding(kinds, (None, "embed")) if kinds else None
        self.encoding = shared.build(narrow.attention_shape(config.max_length), rngs=rngs)
        self.full_encoding = full_encoding(config, shape, rngs=rngs)
        self.norm = Norm(narrow, rngs=rngs)
        self.widen = (
            None
            if config.embedding_dim is None
            else create_linear(block, config.embedding_dim, width, ("embed", "heads"), rngs=rngs)
        )
        self.blocks = create_stack(
            lambda rngs: Block(block, of_block, shape, config.num_layers, rngs=rngs),
            config.num_layers,
            rngs=rngs,
        )
        self.last_norm = Norm(block, rngs=rngs) if block.norms_input else None
        self.pooler = create_linear(block, width, width, ("embed", "heads"), rngs=rngs)

    def __call__(
        self,
        tokens_BL: Array,
        segments_BL: Array | None = None,
        mask_BL: Array | None = None,
        *,
        positions_BL: Any = None,
        dropout_key: Array | None = None,
        every_layer: bool = False,
    ) -> Array:
        """Returns the states of the last layer, or of every layer.

        Args:
          tokens_BL: int32 pieces. A piece outside the vocabulary gives NaN.
          segments_BL: int32, the segment type of each piece. If None, all types are 0. An unknown
            type gives NaN. Without segment types they are ignored.
          mask_BL: 1 for real tokens and 0 for padding. No real token attends to padding. If None,
            all tokens are real. Real tokens should be neighbours: encodings that sum over tokens
            start their sums again after padding between them.
          positions_BL: numbers, `[B, L]` or `[1, L]`. If None, the positions are 0 … L−1.
          dropout_key: random key; None means no dropout.
          every_layer: whether to return every layer.

        Returns:
          x_BLD or, with `every_layer`, x_JBLD. J is num_layers + 1, because the embeddings come
          first. Values at padding are meaningless.

        Raises:
          ConfigError: a sequence is longer than a table of the encoding.
        """
        check_shapes(
            self.config.name or "encoder",
            {"tokens": tokens_BL, "segments": segments_BL, "mask": mask_BL},
        )
        if positions_BL is None:  # NumPy, so that a table's length can be checked while tracing
            positions_BL = np.arange(tokens_BL.shape[1], dtype=np.int32)[None]
        # Padding sees padding only, so that its softmax has something to sum over.
        segment_ids_BL = None if mask_BL is None else mask_BL.astype(jnp.int32)
        context = Context(positions_BL, segment_ids_BL, causal=False, layout=self.config.layout)
        layer_keys = None
        if dropout_key is not None:
            dropout_key, layers_key = jax.random.split(dropout_key)
            layer_keys = jax.random.split(layers_key, self.config.num_layers)

        def layer(block: Block, x_BLD: Array, key: Array | None) -> tuple[Array, Array | None]:
            x_BLD = block(x_BLD, self.encoding, context, key)
            return x_BLD, x_BLD if every_layer else None

        x_BLD = dropout(
            self._embed(tokens_BL, segments_BL, context), self.config.block.dropout, dropout_key
        )
        forms = layer_forms(self.config, self.full_encoding)
        last_BLD, states = scan_stack(
            self.blocks, layer, x_BLD, layer_keys, self.config.remat, forms
        )
        if self.last_norm is not None:
            last_BLD = self.last_norm(last_BLD)
            states = states.at[-1].set(last_BLD) if every_layer else states
        return jnp.concatenate([x_BLD[None], states]) if every_layer else last_BLD

    def layers(self, *inputs: Any, **options: Any) -> Array:
        """The states of every layer, x_JBLD, the embeddings first; arguments as of a call."""
        return self(*inputs, every_layer=True, **options)

    def pool(self, x_BLD: Array) -> Array:
        """A vector of each sequence, from the state of its first token: tanh(W x[CLS] + b)."""
        return jnp.tanh(self.pooler(x_BLD[:, 0]))

    def _embed(self, tokens_BL: Array, segments_BL: Array | None, context: Context) -> Array:
        layout, dtype = context.layout, self.config.block.dtype
        # The table is gathered first: see the decoder.
        table_VD = layout.constrain(self.words.embedding[...].astype(dtype), "width", None)
        x_BLD = lookup(table_VD, tokens_BL)
        if self.segments is not None:
            segments_SD = self.segments.embedding[...].astype(dtype)
            x_BLD += (
                segments_SD[:1][None] if segments_BL is None else lookup(segments_SD, segments_BL)
            )
        x_BLD = self.encoding.embed(
            layout.constrain(x_BLD, "batch", "length", None), context.positions
        )
        x_BLD = self.norm(x_BLD)
        return x_BLD if self.widen is None else self.widen(x_BLD)
