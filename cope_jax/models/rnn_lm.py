"""Recurrent language models over words, in one direction or in both."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.layers.recurrent import Cell, CellName
from cope_jax.layers.word_softmax import WordSoftmax
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.embedder import ModelEmbedder, Sentence, Window, jitted, numbered, whole
from cope_jax.models.model import MODELS, check_shapes
from cope_jax.models.recurrent_lm import Carries, RecurrentLM, RecurrentLMOptions, create_directions
from cope_jax.ops.gather import lookup
from cope_jax.registry import check_at_least
from cope_jax.tokenizers.word_level import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNLMOptions(RecurrentLMOptions):
    """The options that an experiment chooses for an `RNNLM`.

    Attributes:
      name: the model's name in the registry.
      cell: "tanh" or "lstm".
      embed_dim: width of the embedding.
      hidden_dim: width of every layer's state.
      tie_embeddings: whether the output layer is the embedding; if so, `embed_dim` and `hidden_dim`
        must be equal.
      forget_bias: a constant added to the LSTM's forget gate; this constant is not a parameter.
      bidirectional: whether a second model reads the reversed text. The two models share the
        embedding and the output layer.
    """

    name: Literal["rnn_lm"] = "rnn_lm"
    cell: CellName = "lstm"
    embed_dim: int = 256
    hidden_dim: int = 256
    tie_embeddings: bool = False
    forget_bias: float = 1.0
    bidirectional: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "rnn_lm", embed_dim=self.embed_dim, hidden_dim=self.hidden_dim)
        if self.tie_embeddings and self.embed_dim != self.hidden_dim:
            raise ConfigError(
                f"rnn_lm.tie_embeddings does not allow embed_dim={self.embed_dim} and hidden_dim={self.hidden_dim}: "
                "make them equal"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNLMConfig(RNNLMOptions):
    """The config of an `RNNLM`: its options, the size of the vocabulary, and the layout."""

    vocab_size: int
    layout: Layout = WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "rnn_lm", vocab_size=self.vocab_size)

    @property
    def recurrent_cell(self) -> Cell:
        """The cell of every layer."""
        return Cell(
            self.cell, self.hidden_dim, forget_bias=self.forget_bias if self.cell == "lstm" else 0.0
        )

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a token: 6 × the parameters in matrices, over all directions.

        The number does not depend on `length`.

        >>> RNNLMConfig(vocab_size=10, embed_dim=2, hidden_dim=3, num_layers=1).flops_per_token(35)
        540.0
        """
        del length
        cell, width = self.recurrent_cell, self.hidden_dim
        layers = cell.matrices(self.embed_dim) + (self.num_layers - 1) * cell.matrices(width)
        return (
            6.0
            * (2 if self.bidirectional else 1)
            * (layers + width * (self.num_sampled or self.vocab_size))
        )


@MODELS.register("rnn_lm")
class RNNLM(RecurrentLM):
    """Predicts each word from a recurrent state, which depends on all earlier words.

        h⁰_t = E[w_t],  hʲ_t = cellʲ(hʲ_{t−1}, hʲ⁻¹_t),  P(w_{t+1}) = softmax(W h_t + b)

    Elman (1990) and Mikolov et al. (2010) with "tanh"; Zaremba et al. (arXiv 1409.2329) with
    "lstm".

    >>> config = RNNLMConfig(vocab_size=10, embed_dim=4, hidden_dim=4)
    >>> model = RNNLM(config, rngs=nnx.Rngs(0))
    >>> model.states(jnp.zeros((1, 5), jnp.int32)).shape
    (3, 1, 5, 4)
    """

    Options = RNNLMOptions
    Config = RNNLMConfig
    abilities = frozenset({"generate"})
    softmax: WordSoftmax

    def __init__(self, config: RNNLMConfig, *, rngs: nnx.Rngs):
        widths = [config.embed_dim] + [config.hidden_dim] * (config.num_layers - 1)
        scale = config.embed_dim**-0.5 if config.tie_embeddings else 0.1
        table_VD = scale * jax.random.normal(rngs.params(), (config.vocab_size, config.embed_dim))
        self.config = config
        self.embedding_VD = nnx.Param(table_VD, axes=("vocab", "embed"))
        self.directions = create_directions(
            config.recurrent_cell, widths, 2 if config.bidirectional else 1, rngs
        )
        self.softmax = WordSoftmax(
            config.vocab_size, config.hidden_dim, tied=config.tie_embeddings, rngs=rngs
        )

    def __call__(
        self, tokens_BL: Array, carry: Carries | None = None, lengths_B: Array | None = None
    ) -> tuple[Array, Carries]:
        """Returns (logits_BLV of each next word, of the forward model; the last state).

        If `lengths_B` is given, the model reads only the first `lengths_B` words of each row.
        """
        check_shapes("rnn_lm", {"tokens": tokens_BL})
        carry = self._cleared(len(tokens_BL)) if carry is None else carry
        states, last = self._read(0, self._embed(tokens_BL), carry[0], lengths_B=lengths_B)
        return self.softmax(states[-1], self._tied(), self.config.layout), (last, *carry[1:])

    def prefill(
        self, tokens_BL: Array, capacity: int, *, lengths_B: Array | None = None
    ) -> tuple[Array, Carries]:
        """Reads prompts: the last `lengths_B` words of each row, at least one, or all words.

        Returns (logits_BV of the next word, the state); no state depends on `capacity`.
        """
        del capacity
        batch, length = tokens_BL.shape
        lengths_B = jnp.full(batch, length, jnp.int32) if lengths_B is None else lengths_B
        # Padding is moved behind the words, so that it does not reach the state.
        tokens_BL = jax.vmap(jnp.roll)(tokens_BL, lengths_B - length)
        carry = self._cleared(batch)
        states, last = self._read(0, self._embed(tokens_BL), carry[0], lengths_B=lengths_B)
        final_B1D = jnp.take_along_axis(states[-1], (lengths_B - 1)[:, None, None], axis=1)
        logits_B1V = self.softmax(final_B1D, self._tied(), self.config.layout)
        return logits_B1V[:, 0], (last, *carry[1:])

    def decode(self, tokens_B1: Array, carry: Carries) -> tuple[Array, Carries]:
        """Returns (logits_BV after one more word, the state); the backward state is unchanged."""
        logits_B1V, carry = self(tokens_B1, carry)
        return logits_B1V[:, 0], carry

    def states(
        self, tokens_BL: Array, carry: Carries | None = None, lengths_B: Array | None = None
    ) -> Array:
        """Computes the states of every layer: contextual vectors, directions concatenated.

        Args:
          tokens_BL: int32 words.
          carry: the state before the words and, for the backward model, the state after the words.
            If None, both are 0.
          lengths_B: number of real words of each row; the states of the other words are 0. If None,
            all words are real.

        Returns:
          states_JBLD; layer 0 is the embedding. Narrower layers are padded with zeros.
        """
        check_shapes("rnn_lm", {"tokens": tokens_BL})
        layers, _ = self._states(self._embed(tokens_BL), carry, lengths_B)
        width = max(layer.shape[-1] for layer in layers)
        return jnp.stack(
            [jnp.pad(layer, ((0, 0), (0, 0), (0, width - layer.shape[-1]))) for layer in layers]
        )

    def embedder(
        self, folder: Path, *, lowercase: bool = True, name: str | None = None
    ) -> "RnnEmbedder":
        del lowercase
        return RnnEmbedder(self, Vocabulary.load(folder / "words.txt"), name=name)

    def _embed(self, tokens_BL: Array) -> Array:
        return self.config.layout.constrain(
            lookup(self.embedding_VD[...], tokens_BL), "batch", None, None
        )

    def _inputs(self, words: Sequence[Array]) -> Iterator[Array]:
        return map(self._embed, words)

    def _tied(self) -> Array | None:
        return self.embedding_VD[...] if self.config.tie_embeddings else None


class RnnEmbedder(ModelEmbedder):
    """Embeds words by states of a recurrent language model, v_l(w_i) = h_i^l, of its directions.

    A forward state depends on the words up to i, and a backward state on the words from i to the
    end. Layer 0 is the embedding. A sentence starts with zero states. Peters et al. 2017 (arXiv
    1705.00108). The options are those of `ModelEmbedder`.
    """

    title = "RNN"

    def __init__(
        self, model: RNNLM, vocabulary: Vocabulary, *, name: str | None = None, **options: Any
    ):
        super().__init__(name, ("embeddings", *numbered(model.config.num_layers)), **options)
        self._vocabulary = vocabulary
        self.forward = jitted(
            model, lambda model, tokens, lengths: model.states(tokens, lengths_B=lengths)
        )

    def windows(self, sentence: Sentence) -> list[Window]:
        return [whole(self._vocabulary.encode(sentence))]
