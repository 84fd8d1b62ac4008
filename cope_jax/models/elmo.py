"""ELMo: vectors of words in their context, from a language model in both directions over characters."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.layers.char_cnn import ORIGINAL_FILTERS, CharCNN, CharCNNConfig
from cope_jax.layers.recurrent import Carry, Cell, Recurrent, clear
from cope_jax.layers.word_softmax import PREFIXES, WordSoftmax, check_directions, join_directions
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.embedder import ModelEmbedder, Sentence, jitted, numbered
from cope_jax.models.model import MODELS, Model, SumAndWeight, check_shapes
from cope_jax.models.sentence_windows import Window, whole
from cope_jax.ops.dropout import dropout
from cope_jax.registry import check_at_least, check_choices, unknown
from cope_jax.tokenizers.characters import batch_sentences

Carries = tuple[tuple[Carry, ...], tuple[Carry, ...]]
"""The state of every layer, forward and backward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElmoOptions:
    """What an experiment chooses of an `Elmo`; by default the original sizes.

    Attributes:
      name: of the model in the registry.
      character_dim: width of the embedding of a character.
      filters: (characters that a filter sees, number of such filters), each.
      num_highways: highway layers after the filters.
      max_characters: of a word, with its two marks.
      num_layers: LSTM layers in each direction.
      cell_dim: N, the width of an LSTM's cell.
      projection_dim: P, the width of its output, and of a word's vector.
      residual: each layer but the first adds its input to its output.
      cell_clip: bound of the cells; None: no bound.
      projection_clip: bound of the projected outputs; None: no bound.
      dropout: rate on the input of each layer, and on the top.
      num_sampled: words drawn for a sampled softmax while training; 0: all of the vocabulary, which for sampling must
        be sorted by falling frequency.
    """

    name: Literal["elmo"] = "elmo"
    character_dim: int = 16
    filters: tuple[tuple[int, ...], ...] = ORIGINAL_FILTERS
    num_highways: int = 2
    max_characters: int = 50
    num_layers: int = 2
    cell_dim: int = 4096
    projection_dim: int = 512
    residual: bool = True
    cell_clip: float | None = 3.0
    projection_clip: float | None = 3.0
    dropout: float = 0.1
    num_sampled: int = 0

    def __post_init__(self):
        check_choices(self, "elmo")
        check_at_least(1, "elmo", num_layers=self.num_layers)
        check_at_least(0, "elmo", num_sampled=self.num_sampled)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"elmo.dropout must lie in [0, 1), got {self.dropout}")
        check_at_least(1, "elmo", cell_dim=self.cell_dim, projection_dim=self.projection_dim)
        widest = max(width for width, _ in self.characters.filters)
        check_at_least(max(3, widest), "elmo", max_characters=self.max_characters)
        check_at_least(0, "elmo", cell_clip=self.cell_clip, projection_clip=self.projection_clip)

    @classmethod
    def preset(cls, size: str, **options: Any) -> "ElmoOptions":
        """The published sizes "small", "medium" and "original", with `options` in place of theirs.

        >>> ElmoOptions.preset("small").cell_dim
        1024
        """
        if size not in PRESETS:
            raise unknown("size of elmo", size, PRESETS)
        return cls(**PRESETS[size] | options)

    def complete(self, task: Any, encoding: Any, max_length: int, layout: Layout) -> "ElmoConfig":
        """The config of a model for `task`, of which it reads `vocab_size`."""
        del encoding, max_length
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(ElmoOptions)}
        return ElmoConfig(**options, vocab_size=task.vocab_size, layout=layout)

    @property
    def characters(self) -> CharCNNConfig:
        """The encoder of words."""
        return CharCNNConfig(self.character_dim, self.filters, self.num_highways, self.projection_dim)

    @property
    def cell(self) -> Cell:
        """The cell of every layer; its forget gate starts open by 1, as TensorFlow's does."""
        return Cell("lstm", self.cell_dim, self.projection_dim, self.cell_clip, self.projection_clip, forget_bias=1.0)


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"cell_dim": 1024, "projection_dim": 128, "num_highways": 1},
    "medium": {"cell_dim": 2048, "projection_dim": 256, "num_highways": 1},
    "original": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElmoConfig(ElmoOptions):
    """These options, the size of the vocabulary, and where activations lie.

    Attributes:
      vocab_size: V, of the words that are predicted; 0: none are, and the model only encodes.
      layout: where activations lie on a mesh.
    """

    vocab_size: int
    layout: Layout = WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, "elmo", vocab_size=self.vocab_size)

    @property
    def stochastic(self) -> bool:
        return self.dropout > 0 or self.num_sampled > 0

    def flops_per_token(self, length: int) -> float:
        """3 × the forward FLOPs of a token in each direction: characters, LSTMs and softmax, whatever the length."""
        del length
        matrices = self.num_layers * self.cell.matrices(self.projection_dim)
        matrices += self.projection_dim * (self.num_sampled or self.vocab_size)
        return 2 * (3 * self.characters.flops_per_word(self.max_characters) + 6.0 * matrices)


@MODELS.register("elmo")
class Elmo(Model):
    """A language model in either direction over the same vectors of words, which come from their characters.

        x_t = CharCNN(w_t),  h¹ = LSTM¹(x),  hʲ = LSTMʲ(hʲ⁻¹) + hʲ⁻¹,  P(w_{t±1}) = softmax(W h_t + b)

    Every direction has its own layers, with projection and clips; the characters' encoder and the softmax are common.
    Peters et al., "Deep contextualized word representations" (arXiv 1802.05365), as its code `bilm-tf` builds it.

    >>> options = ElmoOptions(filters=((1, 4),), cell_dim=8, projection_dim=4, num_highways=1)
    >>> model = Elmo(ElmoConfig(**dataclasses.asdict(options), vocab_size=10), rngs=nnx.Rngs(0))
    >>> model.layers(jnp.full((1, 5, 50), 261), jnp.array([5]))[0].shape
    (3, 1, 5, 8)
    """

    Options = ElmoOptions
    Config = ElmoConfig

    def __init__(self, config: ElmoConfig, *, rngs: nnx.Rngs):
        def stack() -> nnx.List[Recurrent]:
            layers = range(config.num_layers)
            return nnx.List([Recurrent(config.cell, config.projection_dim, rngs=rngs) for _ in layers])

        self.config = config
        self.characters = CharCNN(config.characters, rngs=rngs)
        self.directions = nnx.List([stack(), stack()])
        self.softmax = WordSoftmax(config.vocab_size, config.projection_dim, rngs=rngs) if config.vocab_size else None

    def initial_carry(self, batch_size: int) -> Carries:
        forward, backward = (tuple(layer.initial_carry(batch_size) for layer in stack) for stack in self.directions)
        return forward, backward

    def layers(
        self, characters_BLC: Array, lengths_B: Array | None = None, carry: Carries | None = None
    ) -> tuple[Array, Carries]:
        """The vectors of every layer, forward and backward ones after each other; layer 0 is the word's, twice.

        Args:
          characters_BLC: as `tokenizers.characters` makes them, whose `batch_sentences` puts marks around sentences as
            in training, and whose `strip_marks` takes the marks' vectors away.
          lengths_B: how many words of each row are real; vectors of others are 0. None: all.
          carry: the states before the first words, and behind the last ones; None: zeros.

        Returns:
          (layers_JBLD with J = 1 + num_layers and D = 2 P, the states that follow).
        """
        check_shapes("elmo", {"characters": characters_BLC}, rank=3)
        x_BLP = self.characters(characters_BLC)
        if lengths_B is not None:
            real_BL1 = (np.arange(x_BLP.shape[1], dtype=np.int32)[None] < lengths_B[:, None])[..., None]
            x_BLP = jnp.where(real_BL1, x_BLP, jnp.zeros((), x_BLP.dtype))
        carry = self.initial_carry(len(x_BLP)) if carry is None else carry
        forward, last = self._read(0, x_BLP, carry[0], lengths_B=lengths_B)
        backward, first = self._read(1, x_BLP, carry[1], lengths_B=lengths_B, reverse=True)
        pairs = zip([x_BLP, *forward], [x_BLP, *backward], strict=True)
        return jnp.stack([jnp.concatenate(pair, axis=-1) for pair in pairs]), (last, first)

    def metrics(
        self, batch: Mapping[str, Array], carry: Any = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], Carries]:
        """`loss`, `forward_loss`, `backward_loss` and, where no words are sampled, `token_error`.

        Both directions count alike. Fields of the batch: `inputs`, characters `[B, L, C]`, `targets`, `weights`, the
        same of the reversed text under `backward_…`, and `reset`, `[B]`, not 0 where the state is to be cleared first.

        Raises:
          ConfigError: a model without a vocabulary, or a batch without the reversed text.
        """
        if self.softmax is None:
            raise ConfigError("elmo: this model has no output layer (vocab_size=0): it encodes, and cannot be trained")
        check_directions(batch, 2, "elmo")
        check_shapes("elmo", {"inputs": batch["inputs"]}, rank=3)
        batch_size = len(batch["inputs"])
        carry = carry if len(carry) else self.initial_carry(batch_size)
        carry = clear(jax.lax.stop_gradient(carry), batch.get("reset"))
        # The words of both directions at once: one larger product is faster than two.
        words = jnp.concatenate([batch[f"{prefix}inputs"] for prefix in PREFIXES])
        x_BLP = self.config.layout.constrain(self.characters(words), "batch", None, None)
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        parts, last = [], []
        for number, (prefix, key) in enumerate(zip(PREFIXES, keys, strict=True)):
            check_shapes("elmo", {"targets": batch[f"{prefix}targets"], "weights": batch[f"{prefix}weights"]})
            sample_key, key = (None, None) if key is None else jax.random.split(key)
            x_BLD = x_BLP[number * batch_size : (number + 1) * batch_size]
            tops, end = self._read(number, x_BLD, carry[number], key=key)
            losses = self.softmax.losses(
                tops[-1],
                batch[f"{prefix}targets"],
                batch[f"{prefix}weights"],
                sample_key=sample_key,
                num_sampled=self.config.num_sampled,
                layout=self.config.layout,
            )
            parts.append((losses, jnp.sum(batch[f"{prefix}weights"])))
            last.append(end)
        return join_directions(parts), jax.lax.stop_gradient((last[0], last[1]))

    def embedder(
        self, folder: Path | None = None, *, lowercase: bool = True, name: str | None = None
    ) -> "ElmoEmbedder":
        del folder, lowercase  # characters need no vocabulary
        return ElmoEmbedder(self, name=name)

    def _read(
        self,
        number: int,
        x_BLP: Array,
        carry: tuple[Carry, ...],
        *,
        lengths_B: Array | None = None,
        reverse: bool = False,
        key: Array | None = None,
    ) -> tuple[list[Array], tuple[Carry, ...]]:
        """(the outputs of each layer, the last one's dropped, and the last states)."""
        rate, stack = self.config.dropout, self.directions[number]
        keys = [None] * (len(stack) + 1) if key is None else list(jax.random.split(key, len(stack) + 1))
        outputs, last = [x_BLP], []
        for layer, before, layer_key in zip(stack, carry, keys[:-1], strict=True):
            x_BLP = dropout(outputs[-1], rate, layer_key)
            y_BLP, end = layer(x_BLP, before, lengths_B=lengths_B, reverse=reverse)
            # What is added has been dropped from, as in the original.
            outputs.append(y_BLP + x_BLP if self.config.residual and len(outputs) > 1 else y_BLP)
            last.append(end)
        return [*outputs[1:-1], dropout(outputs[-1], rate, keys[-1])], tuple(last)


class ElmoEmbedder(ModelEmbedder):
    """All layers of a bidirectional LSTM over characters: (x; x), then (forward; backward) of each layer.

    A sentence stands between its two marks, whose vectors are left out, and starts with empty states. Peters et al.
    2018 (arXiv 1802.05365).

    Args:
      model: the language model.
      name: see `Embedder`.
      options: see `ModelEmbedder`.
    """

    title = "ELMo"

    def __init__(self, model: Elmo, *, name: str | None = None, **options: Any):
        super().__init__(name, ("words", *numbered(model.config.num_layers)), **options)
        self._max_characters = model.config.max_characters
        self._layers = jitted(model, lambda model, characters, lengths: model.layers(characters, lengths)[0])

    def windows(self, sentence: Sentence) -> list[Window]:
        rows_1LC, _ = batch_sentences([sentence], self._max_characters)
        return [whole(rows_1LC[0], begin=1, end=1)]

    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        return self._layers(rows_BL, lengths_B)
