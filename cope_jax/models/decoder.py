"""The decoder-only language model."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import Cache, create_cache
from cope_jax.encodings import EncodingConfig, Sharing
from cope_jax.errors import ConfigError
from cope_jax.layers.basic import Norm
from cope_jax.layers.block import Block
from cope_jax.layers.block_config import BlockConfig
from cope_jax.layers.layer_forms import check_layers, full_encoding, layer_forms
from cope_jax.layers.self_attention import Context
from cope_jax.layers.stack import Remat, create_stack, scan_stack
from cope_jax.layers.tape import TapeBlock, with_positions
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.model import (
    MODELS,
    MOST_LAYERS,
    Model,
    ModelOptions,
    SumAndWeight,
    check_shapes,
)
from cope_jax.ops.dropout import dropout
from cope_jax.ops.gather import lookup
from cope_jax.ops.losses import sampled_cross_entropy, token_measures
from cope_jax.registry import check_at_least, check_fields

PADDING = -1  # segment id of the padding in front of a shorter prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions(ModelOptions):
    """The options that an experiment chooses for a decoder-only transformer.

    Attributes:
      name: "decoder".
      num_layers: number of blocks.
      encoding_sharing: "layer" if each layer has its own encoding, "model" if all layers share one
        encoding.
      tie_embeddings: whether the output layer is the transposed embedding.
      logit_scale: factor of the logits; None means 1/√D if the embedding is tied, and 1 otherwise.
      logit_cap: c: a logit s becomes c·tanh(s/c); None means that it stays.
      embedding_scale: factor of the embeddings, as √D in Gemma.
      full_layers: the layers, from 0, without `block.window`; None means that all have it.
      full_encoding: the encoding of these layers, the same with other options, such as
        "rope(base=1e6)"; "" means the encoding of the others.
      remat: what each block keeps for the backward pass, which recomputes everything else. "none"
        keeps everything. "full" keeps only the input of the block. "attention" also keeps the
        output of attention. "dots" keeps what "attention" keeps, and the products with matrices of
        parameters.
      num_sampled: number of words that a sampled softmax samples in training; 0 means the full
        softmax. The sampling assumes a vocabulary sorted by decreasing frequency.
      tape: number of units of TAPE, in which layers change the positions of tokens; 0 means no
        TAPE. The paper has 48.
      block: the config of every block.
    """

    name: Literal["decoder"] = "decoder"
    num_layers: int = 2
    encoding_sharing: Sharing = "layer"
    tie_embeddings: bool = False
    logit_scale: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    full_layers: tuple[int, ...] | None = None
    full_encoding: str = ""
    remat: Remat = "none"
    num_sampled: int = 0
    tape: int = 0
    block: BlockConfig = BlockConfig()

    def variant(self) -> dict[str, Any]:
        names = ("tape", "logit_cap", "embedding_scale", "full_layers", "full_encoding")
        return self.changed(*names) | super().variant()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(DecoderOptions):
    """The config of a decoder-only transformer.

    Attributes:
      vocab_size: V, the number of different tokens.
      max_length: maximum length of a sequence, in tokens. It decides the size of the tables of some
        encodings.
      encoding: the position encoding.
      layout: how activations are sharded over a mesh.
    """

    vocab_size: int
    max_length: int
    encoding: EncodingConfig
    layout: Layout = WHOLE

    def __post_init__(self):
        check_fields(self, "decoder")
        check_at_least(1, "decoder", vocab_size=self.vocab_size, max_length=self.max_length)
        check_at_least(1, "decoder", MOST_LAYERS, num_layers=self.num_layers)
        check_at_least(
            0, "decoder", num_sampled=self.num_sampled, logit_scale=self.logit_scale, tape=self.tape
        )
        check_layers(self, "decoder")
        for name in ("logit_cap", "embedding_scale"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"decoder.{name} must be above 0, got {value}")
        if self.logit_cap is not None and self.num_sampled:
            raise ConfigError("logit_cap and num_sampled exclude each other: give one of them")
        shape = self.block.attention_shape(self.max_length)
        if self.tape and (
            self.block.mixer != "attention"
            or shape.kv_heads != shape.num_heads
            or shape.head_dim % 2
        ):
            raise ConfigError(
                "tape needs mixer=attention, as many key heads as query heads, and an even head_dim"
            )

    @property
    def stochastic(self) -> bool:
        return self.block.dropout > 0 or self.num_sampled > 0

    def flops_per_token(self, length: int) -> float:
        """Model FLOPs of training on one token, forward and backward.

            6 (layers · (D·(H + 2G)·K + H·K·D + n·D·M) + D·V) + 12 · layers · H·K·L,

        where D is the width of the model, H the number of query heads, G the number of key heads, K
        the width of a head (H·K·D more with an output gate), V the size of the vocabulary (or
        `num_sampled`, if it is not 0), L the length, M the hidden width of the feed-forward layer
        and n the number of its matrices, 2 or 3. For each token, a matrix costs 2 FLOPs per
        parameter forward and 4 backward. The products of queries with keys, and of weights with
        values, are counted in the same way. A causal mask hides half of the keys, but all L keys
        are counted, as in PaLM (Chowdhery et al., arXiv 2204.02311, appendix B). The output layer
        is counted, whether it is tied or not. The embedding lookup is not counted.

        Norms, biases, activations, softmax, loss and the optimizer are not counted. The work of the
        encoding and everything that is computed a second time to save memory are not counted
        either, so the numbers of different settings are comparable. Of a recurrent mixer only the
        products with q, k, v, gate and output are counted.

        >>> DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope")).flops_per_token(8)
        608256.0
        """
        matrices, heads = self.block.matrix_parameters()
        outputs = self.num_sampled or self.vocab_size
        products = float(6 * (self.num_layers * matrices + self.block.model_dim * outputs))
        return products + 12.0 * self.num_layers * heads * length


@MODELS.register("decoder")
class Decoder(Model):
    """A decoder-only transformer, which predicts each token from the tokens before it.

    x = block_n(… block_1(E[tokens])), logits = W_out norm(x), or E norm(x)/√D if the embedding is
    tied. Every parameter is float32. The blocks are stacked and run as one scan, so compile time
    does not grow with depth. Vaswani et al. (arXiv 1706.03762).

    E is initialised from a standard normal distribution, and every W from a normal distribution
    with variance 1/inputs. So tokens, logits and gates vary from the start at any width. Matrices
    whose output is added to the residual stream are initialised smaller by the factor
    1/√(2·layers), as in GPT-2.

    >>> config = DecoderConfig(vocab_size=16, max_length=8, encoding=EncodingConfig.parse("cope"))
    >>> model = Decoder(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 16)
    """

    Options = DecoderOptions
    Config = DecoderConfig
    abilities = frozenset({"generate", "score", "map"})

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        shape = config.block.attention_shape(config.max_length)
        shared, of_block = config.encoding.split(config.encoding_sharing)
        width, dtype = config.block.model_dim, config.block.dtype
        normal = jax.nn.initializers.normal

        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            width,
            dtype=dtype,
            embedding_init=normal(1.0),
            embedding_metadata={"axes": ("vocab", "embed")},
            rngs=rngs,
        )
        self.encoding = shared.build(shape, rngs=rngs)
        self.full_encoding = full_encoding(config, shape, rngs=rngs)
        sizes = (config.block, of_block, shape, config.num_layers)

        def block(rngs: nnx.Rngs) -> Block:
            return (
                TapeBlock(*sizes, config.tape, rngs=rngs)
                if config.tape
                else Block(*sizes, rngs=rngs)
            )

        self.blocks = create_stack(block, config.num_layers, rngs=rngs)
        self.norm = Norm(config.block, rngs=rngs) if config.block.norms_input else None
        self.out = (
            None
            if config.tie_embeddings
            else nnx.Linear(
                width,
                config.vocab_size,
                use_bias=False,
                kernel_init=normal(width**-0.5),
                kernel_metadata={"axes": ("embed", "vocab")},
                rngs=rngs,
            )
        )

    def __call__(
        self,
        tokens_BL: Array,
        *,
        positions_BL: Any = None,
        segment_ids_BL: Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Returns the logits of each next token.

        Args:
          tokens_BL: int32 tokens.
          positions_BL: numbers, `[B, L]` or `[1, L]`. If None, the positions are 0 … L−1.
          segment_ids_BL: int32, the number of each token's document in a packed row. A token
            attends only within its own document. If None, each row is one document.
          dropout_key: random key; None means no dropout.

        Returns:
          logits_BLV, float32, or float64 if the compute type is float64.

        Raises:
          ConfigError: a sequence is longer than a table of the encoding.
        """
        check_shapes("decoder", {"tokens": tokens_BL, "segment_ids": segment_ids_BL})
        context = self._context(tokens_BL, positions_BL, segment_ids_BL)
        return self._logits(self._read(tokens_BL, context, dropout_key))

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        fields = {name: batch[name] for name in ("inputs", "targets", "weights")}
        check_shapes("decoder", {**fields, "segments": batch.get("segments")})
        sample_key = None
        if dropout_key is not None and self.config.num_sampled:
            dropout_key, sample_key = jax.random.split(dropout_key)
        context = self._context(batch["inputs"], batch.get("positions"), batch.get("segments"))
        x_BLD = self._read(batch["inputs"], context, dropout_key)
        targets_BL, weights_BL = batch["targets"], batch["weights"]
        if sample_key is None:
            marks = (batch.get(name) for name in ("valid", "repeated"))
            return token_measures(self._logits(x_BLD), targets_BL, weights_BL, *marks), carry
        table_VD, bias_V = self._out().T, jnp.zeros(self.config.vocab_size)
        read_BLD, count = self._normed(x_BLD), self.config.num_sampled
        loss_BL = sampled_cross_entropy(read_BLD, table_VD, bias_V, targets_BL, sample_key, count)
        return {"loss": (jnp.sum(weights_BL * loss_BL), jnp.sum(weights_BL))}, carry

    def prefill(
        self, tokens_BL: Array, capacity: int, *, lengths_B: Array | None = None
    ) -> tuple[Array, Cache]:
        """Reads prompts into a new cache.

        Args:
          tokens_BL: int32 tokens.
          capacity: maximum number of tokens of a sequence, including padding and the tokens that
            `decode` will add.
          lengths_B: number of real tokens of each row. If None, all tokens are real. Padding comes
            first in a row. The positions of the real tokens start at 0.

        Returns:
          (logits_BV of the next token, the cache).

        Raises:
          ConfigError: a prompt is longer than the cache or than a table of the encoding, or lengths
            are not integers from 1 to L. A compiled program cannot check the lengths.
        """
        check_shapes("decoder", {"tokens": tokens_BL})
        batch, length = tokens_BL.shape
        if lengths_B is None:
            context = self._context(tokens_BL, None, None)
        else:
            _check_lengths(lengths_B, batch, length)
            lengths_B = jnp.asarray(lengths_B, jnp.int32)
            place_BL = jnp.arange(length, dtype=jnp.int32)[None] - (length - lengths_B[:, None])
            segments_BL = jnp.where(place_BL < 0, PADDING, 0)
            context = Context(jnp.maximum(place_BL, 0), segments_BL, layout=self.config.layout)
        graph, stacked = nnx.split(self.blocks)
        block = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], stacked))
        cache = create_cache(
            block.compose(self.encoding),
            batch=batch,
            capacity=capacity,
            num_layers=self.config.num_layers,
            dtype=self.config.block.dtype,
            value=block.value(),
            windows=block.attention.windows(batch),
        )
        return self._extend(tokens_BL, context, cache, first=True)

    def decode(self, tokens_BL: Array, cache: Cache) -> tuple[Array, Cache]:
        """Reads further tokens of each sequence, at the positions after those in the cache.

        Returns:
          (logits_BV of the token after `tokens_BL`, the cache with `tokens_BL`). If the cache is
          too small, the logits are NaN.
        """
        check_shapes("decoder", {"tokens": tokens_BL})
        position_B1, segment_id_B1 = cache.latest(1)
        step_1L = jnp.arange(1, tokens_BL.shape[1] + 1, dtype=jnp.int32)[None]
        context = Context(position_B1 + step_1L, jnp.broadcast_to(segment_id_B1, tokens_BL.shape))
        return self._extend(tokens_BL, context, cache, first=False)

    def maps(self, tokens_BL: Array, *, positions_BL: Any = None) -> dict[str, Array]:
        """Computes the attention weights of every layer and head, and the maps of the encoding.

        Returns:
          `attention` and the maps of the encoding, by name. For CoPE, these maps are `gates` and
          `positions`. Each map has the shape `[layers, B, H, L, L]`.
        """
        context = self._context(tokens_BL, positions_BL, None)

        def layer(block: Block, x_BLD: Array, key: Array | None) -> tuple[Array, dict[str, Array]]:
            return block(x_BLD, self.encoding, context, key), block.maps(
                x_BLD, self.encoding, context
            )

        return self._scan(layer, self._embed(tokens_BL, context), None)[1]

    def _extend(
        self, tokens_BL: Array, context: Context, cache: Cache, *, first: bool
    ) -> tuple[Array, Cache]:
        def layer(
            block: Block, carry: tuple[Array, Cache], index: Array
        ) -> tuple[tuple[Array, Cache], None]:
            x_BLD, cache = carry
            return block.extend(x_BLD, self.encoding, context, cache, index, first=first), None

        cache = cache.enter(context.positions, context.segment_ids)
        indices = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        (x_BLD, cache), _ = self._scan(layer, (self._embed(tokens_BL, context), cache), indices)
        return self._logits(x_BLD[:, -1:])[:, 0], cache

    def _read(self, tokens_BL: Array, context: Context, dropout_key: Array | None) -> Array:
        """Returns x_BLD after the last block."""
        layer_keys = None
        if dropout_key is not None:
            dropout_key, layers_key = jax.random.split(dropout_key)
            layer_keys = jax.random.split(layers_key, self.config.num_layers)

        def layer(block: Block, x_BLD: Array, key: Array | None) -> tuple[Array, None]:
            return block(x_BLD, self.encoding, context, key), None

        return self._scan(layer, self._embed(tokens_BL, context, dropout_key), layer_keys)[0]

    def _normed(self, x_BLD: Array) -> Array:
        if self.config.tape:
            x_BLD = x_BLD[..., : self.config.block.model_dim].astype(self.config.block.dtype)
        return x_BLD if self.norm is None else self.norm(x_BLD)

    def _out(self) -> Array:
        """Returns out_DV, the matrix of the output layer."""
        scale = self.config.logit_scale
        if self.out is None:
            out_DV = self.embedding.embedding[...].T
            return out_DV / self.config.block.model_dim**0.5 if scale is None else out_DV * scale
        return self.out.kernel[...] if scale is None else self.out.kernel[...] * scale

    def _logits(self, x_BLD: Array) -> Array:
        x_BLD, out_DV = self._normed(x_BLD), self._out()
        # The matrix is gathered, like the embedding. Otherwise the compiler may shard all
        # activations by width, only for this product.
        out_DV = self.config.layout.constrain(out_DV.astype(x_BLD.dtype), None, "width")
        wide = accumulator_dtype(x_BLD.dtype)
        logits_BLV = jnp.einsum("BLD,DV->BLV", x_BLD, out_DV, preferred_element_type=wide)
        if (cap := self.config.logit_cap) is not None:
            logits_BLV = cap * jnp.tanh(logits_BLV / cap)
        return self.config.layout.constrain(logits_BLV, "batch", "length", "width")

    def _context(
        self, tokens_BL: Array, positions_BL: Any, segment_ids_BL: Array | None
    ) -> Context:
        if positions_BL is None:  # NumPy, so that a table's length can be checked while tracing
            positions_BL = np.arange(tokens_BL.shape[1], dtype=np.int32)[None]
        return Context(positions_BL, segment_ids_BL, layout=self.config.layout)

    def _embed(self, tokens_BL: Array, context: Context, dropout_key: Array | None = None) -> Array:
        # The table is gathered first. Otherwise its rows, sharded by width, pass through every
        # device to be sharded by example.
        table_VD = self.embedding.embedding[...].astype(self.config.block.dtype)
        x_BLD = lookup(context.layout.constrain(table_VD, "width", None), tokens_BL)
        if self.config.embedding_scale != 1:
            x_BLD = x_BLD * self.config.embedding_scale
        x_BLD = context.layout.constrain(x_BLD, "batch", "length", None)
        x_BLD = dropout(
            self.encoding.embed(x_BLD, context.positions), self.config.block.dropout, dropout_key
        )
        if not self.config.tape:
            return x_BLD
        shape = self.config.block.attention_shape(self.config.max_length)
        return with_positions(x_BLD, context.positions, shape)

    def _scan(
        self, layer: Callable[..., tuple[Any, Any]], carry: Any, inputs: Any
    ) -> tuple[Any, Any]:
        forms = layer_forms(self.config, self.full_encoding)
        return scan_stack(self.blocks, layer, carry, inputs, self.config.remat, forms)


def _check_lengths(lengths_B: Any, batch: int, length: int) -> None:
    lengths_B = lengths_B if isinstance(lengths_B, jax.Array) else np.asarray(lengths_B)
    shape, dtype = lengths_B.shape, lengths_B.dtype
    if shape != (batch,) or not jnp.issubdtype(dtype, jnp.integer):
        raise ConfigError(
            f"lengths_B must be int32[{batch}], one length for each prompt, got {dtype}{list(shape)}"
        )
    if not isinstance(lengths_B, jax.core.Tracer):
        for real in np.asarray(lengths_B):
            if not 1 <= real <= length:
                raise ConfigError(
                    f"lengths_B must be between 1 and {length}, the length of the prompts, got {real}"
                )
