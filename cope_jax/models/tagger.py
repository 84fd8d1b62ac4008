"""A tagger: a bidirectional LSTM over features of words, or a linear probe of given vectors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.layers.char_cnn import CharCNN, CharCNNConfig
from cope_jax.layers.recurrent import Bidirectional, Cell
from cope_jax.layers.scalar_mix import ScalarMix
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.model import MODELS, Model, ModelOptions, SumAndWeight, check_shapes
from cope_jax.ops.dropout import dropout
from cope_jax.ops.gather import lookup
from cope_jax.ops.losses import token_measures
from cope_jax.registry import check_at_least, check_fields

CHARACTER_DIM, CHARACTER_WIDTH = 16, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggerOptions(ModelOptions):
    """The options that an experiment chooses for a `Tagger`.

    Attributes:
      name: the model's name in the registry.
      word_dim: width of the word embedding; 0 means no embedding.
      characters: number of filters of a character CNN, each over 3 characters; 0 means no CNN.
      vectors: whether to read the vectors in the batch, which are not trained, as a learned mix of
        all layers.
      layer: index of the one layer of these vectors to read instead of the mix; negative indices
        count from the top. If None, the tagger reads the mix.
      layer_norm: whether to normalise the layers before the mix.
      penalty: strength of an L2 penalty on the mix's weights, which is added to the loss.
      recurrent: width of each direction, for each layer of the bidirectional LSTM; () means a
        linear probe.
      dropout: dropout rate on the input of the LSTM, between its layers, and on its output.
    """

    name: Literal["tagger"] = "tagger"
    word_dim: int = 100
    characters: int = 0
    vectors: bool = False
    layer: int | None = None
    layer_norm: bool = False
    penalty: float = 0.0
    recurrent: tuple[int, ...] = (100,)
    dropout: float = 0.5

    def __post_init__(self):
        check_fields(self, "tagger")
        check_at_least(
            0, "tagger", word_dim=self.word_dim, characters=self.characters, penalty=self.penalty
        )
        for width in self.recurrent:
            check_at_least(1, "tagger", recurrent=width)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"tagger.dropout must lie in [0, 1), got {self.dropout}")
        if not (self.word_dim or self.characters or self.vectors):
            raise ConfigError("tagger reads nothing: set word_dim, characters or vectors")
        if not self.vectors and (self.layer is not None or self.layer_norm or self.penalty):
            raise ConfigError(
                "tagger.layer, layer_norm and penalty need vectors: set tagger.vectors"
            )
        if self.layer is not None and (self.layer_norm or self.penalty):
            raise ConfigError(
                "tagger.layer_norm and penalty need the mix of all layers: leave out tagger.layer"
            )

    def complete(
        self, task: Any, encoding: Any, max_length: int, layout: Layout, **decided: Any
    ) -> Any:
        shape = getattr(task, "vector_shape", None) if self.vectors else None
        if self.vectors and shape is None:
            raise ConfigError(
                "tagger.vectors needs vectors, which the task does not have: give the task an embedder"
            )
        return super().complete(task, encoding, max_length, layout, vector_shape=shape, **decided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaggerConfig(TaggerOptions):
    """The config of a `Tagger`: its options and what the task decides.

    Attributes:
      num_tags: T, the number of tags.
      vocab_size: V, the number of known words.
      vector_shape: (J, D), the number of layers and the width of the vectors; None if the tagger
        reads no vectors.
      layout: how activations are sharded over a mesh.
    """

    num_tags: int
    vocab_size: int
    vector_shape: tuple[int, ...] | None = None
    layout: Layout = WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "tagger", num_tags=self.num_tags, vocab_size=self.vocab_size)
        if self.vectors:
            if self.vector_shape is None or len(self.vector_shape) != 2:
                raise ConfigError(
                    f"tagger.vector_shape must be (layers, width), got {self.vector_shape}"
                )
            layers = self.vector_shape[0]
            if self.layer is not None and not -layers <= self.layer < layers:
                raise ConfigError(
                    f"tagger.layer={self.layer} is out of range: give {-layers} to {layers - 1}"
                )

    @property
    def stochastic(self) -> bool:
        return self.dropout > 0

    @property
    def char_cnn(self) -> CharCNNConfig:
        """The config of the character CNN, if there is one."""
        return CharCNNConfig(
            CHARACTER_DIM, ((CHARACTER_WIDTH, self.characters),), num_highways=0, projection=None
        )

    @property
    def inputs(self) -> int:
        """The width of the features of a word."""
        return (
            self.word_dim
            + self.characters
            + (self.vector_shape[1] if self.vectors and self.vector_shape else 0)
        )

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a word: 6 × the parameters in matrices of LSTM and output.

        The number does not depend on `length`. The character CNN is not counted, because its FLOPs
        depend on the number of characters.
        """
        del length
        matrices, width = 0, self.inputs
        for hidden in self.recurrent:
            matrices, width = matrices + 2 * Cell(width=hidden).matrices(width), 2 * hidden
        return 6.0 * (matrices + width * self.num_tags)


@MODELS.register("tagger")
class Tagger(Model):
    """Tags words by softmax(W h_t + b), h = BiLSTM([E[w_t]; CharCNN(w_t); mix of vectors]).

    Plank et al. (arXiv 1604.05529) describe the tagger without contextual vectors. Peters et al.
    (arXiv 1802.05365) add contextual vectors, which are not trained further. Without the LSTM, the
    tagger is a linear probe, as in Liu et al. (arXiv 1903.08855).

    >>> config = TaggerConfig(num_tags=3, vocab_size=10, vectors=True, vector_shape=(2, 4), recurrent=())
    >>> model = Tagger(config, rngs=nnx.Rngs(0))
    >>> batch = {"inputs": jnp.ones((1, 5), jnp.int32), "weights": jnp.ones((1, 5)), "vectors": jnp.ones((1, 5, 2, 4))}
    >>> model(batch).shape, model.mix_weights().tolist()
    ((1, 5, 3), [0.5, 0.5])
    """

    losses = ("tag_loss", "penalty")
    Options = TaggerOptions
    Config = TaggerConfig

    def __init__(self, config: TaggerConfig, *, rngs: nnx.Rngs):
        mixed = config.vectors and config.layer is None and config.vector_shape is not None
        layers = config.vector_shape[0] if mixed and config.vector_shape else 0
        widths = [config.inputs, *(2 * width for width in config.recurrent)]
        pairs = zip(config.recurrent, widths[:-1], strict=True)
        self.config = config
        shape = config.vocab_size, config.word_dim
        table = 0.1 * jax.random.normal(rngs.params(), shape) if config.word_dim else None
        self.embedding_VD = None if table is None else nnx.Param(table, axes=("vocab", "embed"))
        self.characters = CharCNN(config.char_cnn, rngs=rngs) if config.characters else None
        self.mix = ScalarMix(layers, layer_norm=config.layer_norm, rngs=rngs) if mixed else None
        self.recurrent = nnx.List(
            [
                Bidirectional(Cell(width=width, forget_bias=1.0), inputs, rngs=rngs)
                for width, inputs in pairs
            ]
        )
        self.out = nnx.Linear(
            widths[-1],
            config.num_tags,
            kernel_init=jax.nn.initializers.normal(widths[-1] ** -0.5),
            rngs=rngs,
        )

    def __call__(self, batch: Mapping[str, Array], dropout_key: Array | None = None) -> Array:
        """Returns logits_BLT of the batch's words. Padding has weight 0 and follows real words.

        Raises:
          ConfigError: the batch lacks a field that the model reads, or its vectors have another
            shape.
        """
        mask_BL = batch["weights"] != 0
        # Rows are read up to the last word with a weight: a word without a known tag inside a
        # sentence is read too.
        lengths_B = jnp.max(
            jnp.where(mask_BL, np.arange(1, mask_BL.shape[1] + 1, dtype=np.int32)[None], 0), axis=1
        )
        keys = [None] * (len(self.recurrent) + 1)
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, len(keys)))
        x_BLD = dropout(
            jnp.concatenate(self._parts(batch, mask_BL), axis=-1), self.config.dropout, keys[0]
        )
        for layer, key in zip(self.recurrent, keys[1:], strict=True):
            x_BLD = dropout(layer(x_BLD, lengths_B=lengths_B)[0], self.config.dropout, key)
        return self.out(x_BLD)

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Computes `tag_loss`, `penalty`, `token_error` and `sequence_error`.

        `penalty` is the L2 penalty of the mix. `sequence_error` is the share of sentences with an
        error. The weight of `penalty` is the number of words in the batch, so the mean over the
        parts of a split batch is the penalty of the entire batch.
        """
        check_shapes("tagger", {"targets": batch["targets"], "weights": batch["weights"]})
        measures = token_measures(self(batch, dropout_key), batch["targets"], batch["weights"])
        tag_loss = measures.pop("loss")
        count = tag_loss[1]
        penalty = (
            jnp.zeros((), count.dtype)
            if self.mix is None
            else self.mix.penalty(self.config.penalty)
        )
        return {"tag_loss": tag_loss, "penalty": (penalty * count, count), **measures}, carry

    def mix_weights(self) -> np.ndarray:
        """Returns the share of each layer in the vectors that the tagger reads, `[J]`.

        Without a mix, the share of the chosen layer is 1.

        Raises:
          ConfigError: the tagger has no vectors.
        """
        if not self.config.vectors or self.config.vector_shape is None:
            raise ConfigError("this tagger reads no vectors, so it has no mix: set tagger.vectors")
        if self.mix is not None:
            return np.asarray(self.mix.shares())
        shares_J = np.zeros(self.config.vector_shape[0], np.float32)
        shares_J[self.config.layer] = 1
        return shares_J

    def _parts(self, batch: Mapping[str, Array], mask_BL: Array) -> list[Array]:
        parts = []
        if self.embedding_VD is not None:
            parts.append(lookup(self.embedding_VD[...], _field(batch, "inputs")))
        if self.characters is not None:
            parts.append(self.characters(_field(batch, "characters")))
        if self.config.vectors:
            vectors_BLJD = _field(batch, "vectors")
            if vectors_BLJD.shape[2:] != tuple(self.config.vector_shape or ()):
                shape = list(vectors_BLJD.shape[2:])
                raise ConfigError(
                    f"the tagger's vectors have (layers, width) {shape}, not {self.config.vector_shape}: use the "
                    "embedder that the tagger was created for"
                )
            layers_JBLD = jnp.moveaxis(vectors_BLJD, 2, 0)
            parts.append(
                layers_JBLD[self.config.layer]
                if self.mix is None
                else self.mix(layers_JBLD, mask_BL)
            )
        return parts


def _field(batch: Mapping[str, Array], name: str) -> Array:
    if name not in batch:
        raise ConfigError(f"tagger needs {name!r} in its batches: use a task that provides it")
    return batch[name]
