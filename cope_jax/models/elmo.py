"""ELMo: a bidirectional language model that makes contextual vectors of words from characters."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.layers.char_cnn import ORIGINAL_FILTERS, CharCNN, CharCNNConfig
from cope_jax.layers.recurrent import Cell
from cope_jax.layers.word_softmax import WordSoftmax
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.embedder import ModelEmbedder, Sentence, Window, jitted, numbered, whole
from cope_jax.models.model import MODELS, check_shapes
from cope_jax.models.recurrent_lm import Carries, RecurrentLM, RecurrentLMOptions, create_directions
from cope_jax.registry import check_at_least, unknown
from cope_jax.tokenizers.characters import batch_sentences


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElmoOptions(RecurrentLMOptions):
    """The options that an experiment chooses for an `Elmo`. The defaults are the original sizes.

    Attributes:
      name: the model's name in the registry.
      character_dim: width of the embedding of a character.
      filters: pairs (width of a filter in characters, number of these filters).
      num_highways: number of highway layers after the filters.
      max_characters: maximum number of characters of a word, including the marks at its start and
        end.
      cell_dim: N, the width of an LSTM's cell.
      projection_dim: P, the width of an LSTM's output and of a word's vector.
      residual: whether each layer after the first adds its input to its output.
      cell_clip: cell states are clipped to ± this value; None means no bound.
      projection_clip: projected outputs are clipped to ± this value; None means no bound.
    """

    name: Literal["elmo"] = "elmo"
    character_dim: int = 16
    filters: tuple[tuple[int, ...], ...] = ORIGINAL_FILTERS
    num_highways: int = 2
    max_characters: int = 50
    cell_dim: int = 4096
    projection_dim: int = 512
    residual: bool = True
    cell_clip: float | None = 3.0
    projection_clip: float | None = 3.0
    dropout: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "elmo", cell_dim=self.cell_dim, projection_dim=self.projection_dim)
        widest = max(width for width, _ in self.characters.filters)
        check_at_least(max(3, widest), "elmo", max_characters=self.max_characters)
        check_at_least(0, "elmo", cell_clip=self.cell_clip, projection_clip=self.projection_clip)

    @classmethod
    def preset(cls, size: str, **options: Any) -> "ElmoOptions":
        """Returns the options of a published size: "small", "medium" or "original".

        The arguments `options` replace the options of this size.

        >>> ElmoOptions.preset("small").cell_dim
        1024
        """
        if size not in PRESETS:
            raise unknown("size of elmo", size, PRESETS)
        return cls(**PRESETS[size] | options)

    @property
    def characters(self) -> CharCNNConfig:
        """The config of the network that computes a word's vector from its characters."""
        return CharCNNConfig(
            self.character_dim, self.filters, self.num_highways, self.projection_dim
        )

    @property
    def cell(self) -> Cell:
        """The cell of every layer, with a forget bias of 1, as in TensorFlow."""
        return Cell(
            "lstm",
            self.cell_dim,
            self.projection_dim,
            self.cell_clip,
            self.projection_clip,
            forget_bias=1.0,
        )


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"cell_dim": 1024, "projection_dim": 128, "num_highways": 1},
    "medium": {"cell_dim": 2048, "projection_dim": 256, "num_highways": 1},
    "original": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElmoConfig(ElmoOptions):
    """The config of an `Elmo`: its options, the size of the vocabulary, and the layout.

    Attributes:
      vocab_size: V, the number of words that the model can predict. If 0, the model has no output
        layer, so it can encode words but not predict them.
      layout: how activations are sharded over a mesh.
    """

    vocab_size: int
    layout: Layout = WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, "elmo", vocab_size=self.vocab_size)

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a token: 3 × the forward FLOPs of character CNN, LSTMs and softmax.

        The number includes both directions. It does not depend on `length`.
        """
        del length
        matrices = self.num_layers * self.cell.matrices(self.projection_dim)
        matrices += self.projection_dim * (self.num_sampled or self.vocab_size)
        return 2 * (3 * self.characters.flops_per_word(self.max_characters) + 6.0 * matrices)


@MODELS.register("elmo")
class Elmo(RecurrentLM):
    """A forward and a backward language model over word vectors made from characters.

        x_t = CharCNN(w_t),  h¹ = LSTM¹(x),  hʲ = LSTMʲ(hʲ⁻¹) + hʲ⁻¹,  P(w_{t±1}) = softmax(W h_t + b)

    Each direction has its own layers, with projection and clipping. Both directions share the
    character encoder and the softmax. Peters et al., "Deep contextualized word representations"
    (arXiv 1802.05365), as in their code, `bilm-tf`.

    >>> options = ElmoOptions(filters=((1, 4),), cell_dim=8, projection_dim=4, num_highways=1)
    >>> model = Elmo(ElmoConfig(**dataclasses.asdict(options), vocab_size=10), rngs=nnx.Rngs(0))
    >>> model.layers(jnp.full((1, 5, 50), 261), jnp.array([5]))[0].shape
    (3, 1, 5, 8)
    """

    Options = ElmoOptions
    Config = ElmoConfig
    token_fields = ("targets", "weights")

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        self.config, self.residual = config, config.residual
        self.characters = CharCNN(config.characters, rngs=rngs)
        self.directions = create_directions(
            config.cell, [config.projection_dim] * config.num_layers, 2, rngs
        )
        self.softmax = (
            WordSoftmax(config.vocab_size, config.projection_dim, rngs=rngs)
            if config.vocab_size
            else None
        )

    def layers(
        self, characters_BLC: Array, lengths_B: Array | None = None, carry: Carries | None = None
    ) -> tuple[Array, Carries]:
        """Computes the vectors of every layer, each a forward vector followed by a backward vector.

        Layer 0 is the output of the character CNN, followed by the same output again.

        Args:
          characters_BLC: int32 characters of words, as from `tokenizers.characters`. The function
            `batch_sentences` of that module adds marks around sentences, as in training, and
            `strip_marks` removes the vectors of the marks.
          lengths_B: number of real words of each row; the vectors of the other words are 0. If
            None, all words are real.
          carry: the states before the first words, for the forward direction, and after the last
            words, for the backward direction. If None, the states are 0.

        Returns:
          (layers_JBLD with J = 1 + num_layers and D = 2 P, the last states).
        """
        check_shapes("elmo", {"characters": characters_BLC}, rank=3)
        layers, last = self._states(self.characters(characters_BLC), carry, lengths_B)
        return jnp.stack(layers), last

    def _inputs(self, words: Sequence[Array]) -> Iterator[Array]:
        for characters_BLC in words:
            check_shapes("elmo", {"inputs": characters_BLC}, rank=3)
        # The words of both directions are encoded at once: one larger product is faster than two.
        x_BLP = self.config.layout.constrain(
            self.characters(jnp.concatenate(words)), "batch", None, None
        )
        batch_size = len(words[0])
        for number in range(len(words)):
            yield x_BLP[number * batch_size : (number + 1) * batch_size]

    def embedder(
        self, folder: Path | None = None, *, lowercase: bool = True, name: str | None = None
    ) -> "ElmoEmbedder":
        del folder, lowercase  # characters need no vocabulary
        return ElmoEmbedder(self, name=name)


class ElmoEmbedder(ModelEmbedder):
    """Embeds each word by its vectors in all layers of an ELMo.

    Layer 0 is (x; x), where x is the output of the character CNN. Every other layer is (forward;
    backward). Each sentence is enclosed in two marks and starts with zero states. The vectors of
    the marks are left out. Peters et al. 2018 (arXiv 1802.05365). The options are those of
    `ModelEmbedder`.
    """

    title = "ELMo"

    def __init__(self, model: Elmo, *, name: str | None = None, **options: Any):
        super().__init__(name, ("words", *numbered(model.config.num_layers)), **options)
        self._max_characters = model.config.max_characters
        self.forward = jitted(
            model, lambda model, characters, lengths: model.layers(characters, lengths)[0]
        )

    def windows(self, sentence: Sentence) -> list[Window]:
        rows_1LC, _ = batch_sentences([sentence], self._max_characters)
        return [whole(rows_1LC[0], begin=1, end=1)]
