"""Recurrent language models over words, in one direction or in both."""

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
from cope_jax.layers.recurrent import Carry, Cell, CellName, Recurrent, clear
from cope_jax.layers.word_softmax import PREFIXES, WordSoftmax, check_directions, join_directions
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.embedder import ModelEmbedder, Sentence, jitted, numbered
from cope_jax.models.model import MODELS, Model, SumAndWeight, check_shapes
from cope_jax.models.sentence_windows import Window, whole
from cope_jax.ops.dropout import dropout
from cope_jax.ops.gather import take
from cope_jax.registry import check_at_least, check_choices
from cope_jax.tokenizers.vocabulary import Vocabulary

Carries = tuple[tuple[Carry, ...], ...]
"""The state of every layer of every direction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNLMOptions:
    """What an experiment chooses of an `RNNLM`.

    Attributes:
      name: of the model in the registry.
      cell: "tanh" or "lstm".
      num_layers: depth.
      embed_dim: width of the embedding.
      hidden_dim: width of every layer's state.
      tie_embeddings: the output layer is the embedding; both widths must be equal.
      dropout: rate on the embedding, between layers, and on the top: on what is not recurrent.
      forget_bias: of the LSTM, is added when it runs.
      bidirectional: a second language model reads the reversed text, with an embedding and an output layer in common.
      num_sampled: words drawn for a sampled softmax while training; 0: all of the vocabulary, which for sampling must
        be sorted by falling frequency.
    """

    name: Literal["rnn_lm"] = "rnn_lm"
    cell: CellName = "lstm"
    num_layers: int = 2
    embed_dim: int = 256
    hidden_dim: int = 256
    tie_embeddings: bool = False
    dropout: float = 0.0
    forget_bias: float = 1.0
    bidirectional: bool = False
    num_sampled: int = 0

    def __post_init__(self):
        check_choices(self, "rnn_lm")
        sizes = {"num_layers": self.num_layers, "embed_dim": self.embed_dim, "hidden_dim": self.hidden_dim}
        check_at_least(1, "rnn_lm", **sizes)
        check_at_least(0, "rnn_lm", num_sampled=self.num_sampled)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"rnn_lm.dropout must lie in [0, 1), got {self.dropout}")
        if self.tie_embeddings and self.embed_dim != self.hidden_dim:
            raise ConfigError(
                f"rnn_lm.tie_embeddings needs embed_dim={self.embed_dim} and hidden_dim={self.hidden_dim} to be equal"
            )

    def complete(self, task: Any, encoding: Any, max_length: int, layout: Layout) -> "RNNLMConfig":
        """The config of a model for `task`, of which it reads `vocab_size`."""
        del encoding, max_length
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(RNNLMOptions)}
        return RNNLMConfig(**options, vocab_size=task.vocab_size, layout=layout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RNNLMConfig(RNNLMOptions):
    """These options, the size of the vocabulary, and where activations lie."""

    vocab_size: int
    layout: Layout = WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "rnn_lm", vocab_size=self.vocab_size)

    @property
    def stochastic(self) -> bool:
        return self.dropout > 0 or self.num_sampled > 0

    @property
    def recurrent_cell(self) -> Cell:
        """The cell of every layer."""
        return Cell(self.cell, self.hidden_dim, forget_bias=self.forget_bias if self.cell == "lstm" else 0.0)

    def flops_per_token(self, length: int) -> float:
        """6 × the numbers in the matrices that a token meets, in each direction, whatever the length.

        >>> RNNLMConfig(vocab_size=10, embed_dim=2, hidden_dim=3, num_layers=1).flops_per_token(35)
        540.0
        """
        del length
        cell, width = self.recurrent_cell, self.hidden_dim
        layers = cell.matrices(self.embed_dim) + (self.num_layers - 1) * cell.matrices(width)
        return 6.0 * (2 if self.bidirectional else 1) * (layers + width * (self.num_sampled or self.vocab_size))


@MODELS.register("rnn_lm")
class RNNLM(Model):
    """Predicts each next word from a state that has read all words before it.

        h⁰_t = E[w_t],  hʲ_t = cellʲ(hʲ_{t−1}, hʲ⁻¹_t),  P(w_{t+1}) = softmax(W h_t + b)

    Elman (1990) and Mikolov et al. (2010) with "tanh"; Zaremba et al. (arXiv 1409.2329) with "lstm". States are carried
    from batch to batch, gradients are not: truncated backpropagation through time.

    >>> config = RNNLMConfig(vocab_size=10, embed_dim=4, hidden_dim=4)
    >>> model = RNNLM(config, rngs=nnx.Rngs(0))
    >>> model.states(jnp.zeros((1, 5), jnp.int32)).shape
    (3, 1, 5, 4)
    """

    Options = RNNLMOptions
    Config = RNNLMConfig

    def __init__(self, config: RNNLMConfig, *, rngs: nnx.Rngs):
        widths = [config.embed_dim] + [config.hidden_dim] * (config.num_layers - 1)
        scale = config.embed_dim**-0.5 if config.tie_embeddings else 0.1
        table_VD = scale * jax.random.normal(rngs.params(), (config.vocab_size, config.embed_dim))

        def stack() -> nnx.List[Recurrent]:
            return nnx.List([Recurrent(config.recurrent_cell, width, rngs=rngs) for width in widths])

        self.config = config
        self.embedding_VD = nnx.Param(table_VD, axes=("vocab", "embed"))
        self.directions = nnx.List([stack() for _ in range(2 if config.bidirectional else 1)])
        self.softmax = WordSoftmax(config.vocab_size, config.hidden_dim, tied=config.tie_embeddings, rngs=rngs)

    def initial_carry(self, batch_size: int) -> Carries:
        return tuple(tuple(layer.initial_carry(batch_size) for layer in stack) for stack in self.directions)

    def __call__(
        self, tokens_BL: Array, carry: Carries | None = None, lengths_B: Array | None = None
    ) -> tuple[Array, Carries]:
        """(the forward model's logits_BLV of each next word, the state after the first `lengths_B` words or all)."""
        check_shapes("rnn_lm", {"tokens": tokens_BL})
        carry = self.initial_carry(len(tokens_BL)) if carry is None else carry
        states, last = self._read(0, tokens_BL, carry[0], lengths_B=lengths_B)
        return self.softmax(states[-1], self._tied(), self.config.layout), (last, *carry[1:])

    def step(self, tokens_B: Array, carry: Carries) -> tuple[Array, Carries]:
        """(logits_BV of the word after `tokens_B`, the state); the backward model's is as it was."""
        logits_B1V, carry = self(tokens_B[:, None], carry)
        return logits_B1V[:, 0], carry

    def states(self, tokens_BL: Array, carry: Carries | None = None, lengths_B: Array | None = None) -> Array:
        """The states of every layer, of both directions one after the other: vectors of words in their context.

        Args:
          tokens_BL: int32 words.
          carry: the state before, and of the backward model behind, the words; None: zeros.
          lengths_B: how many words of each row are real; the states of others are 0. None: all.

        Returns:
          states_JBLD, layer 0 being the embedding, with zeros behind the narrower ones.
        """
        check_shapes("rnn_lm", {"tokens": tokens_BL})
        carry = self.initial_carry(len(tokens_BL)) if carry is None else carry
        runs = [
            self._read(number, tokens_BL, carry[number], lengths_B=lengths_B, reverse=number == 1)[0]
            for number in range(len(self.directions))
        ]
        layers = [jnp.concatenate(parts, axis=-1) for parts in zip(*runs, strict=True)]
        width = max(layer.shape[-1] for layer in layers)
        layers = [jnp.pad(layer, ((0, 0), (0, 0), (0, width - layer.shape[-1]))) for layer in layers]
        if lengths_B is not None:
            real_BL1 = (np.arange(tokens_BL.shape[1], dtype=np.int32)[None] < lengths_B[:, None])[..., None]
            layers[0] = jnp.where(real_BL1, layers[0], jnp.zeros((), layers[0].dtype))
        return jnp.stack(layers)

    def metrics(
        self, batch: Mapping[str, Array], carry: Any = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], Carries]:
        """`loss`, where no words are sampled `token_error`, and of both directions `forward_loss`, `backward_loss`.

        Both directions count alike: loss and error are those of all their tokens. Fields of the batch: `inputs`,
        `targets`, `weights`, the same of the reversed text under `backward_…`, and `reset`, `[B]`, not 0 where the
        state is to be cleared first.

        Raises:
          ConfigError: a bidirectional model and a batch without the reversed text.
        """
        check_directions(batch, len(self.directions), "rnn_lm")
        carry = carry if len(carry) else self.initial_carry(len(batch["inputs"]))
        carry = clear(jax.lax.stop_gradient(carry), batch.get("reset"))
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        sums, last = [], []
        for number, (prefix, key) in enumerate(zip(PREFIXES[: len(self.directions)], keys, strict=False)):
            fields = (f"{prefix}{name}" for name in ("inputs", "targets", "weights"))
            check_shapes("rnn_lm", {name: batch[name] for name in fields})
            sample_key, key = (None, None) if key is None else jax.random.split(key)
            states, end = self._read(number, batch[f"{prefix}inputs"], carry[number], key=key)
            losses = self.softmax.losses(
                states[-1],
                batch[f"{prefix}targets"],
                batch[f"{prefix}weights"],
                tied_VD=self._tied(),
                sample_key=sample_key,
                num_sampled=self.config.num_sampled,
                layout=self.config.layout,
            )
            sums.append((losses, jnp.sum(batch[f"{prefix}weights"])))
            last.append(end)
        return join_directions(sums), jax.lax.stop_gradient(tuple(last))

    def embedder(self, folder: Path, *, lowercase: bool = True, name: str | None = None) -> "RnnEmbedder":
        del lowercase
        return RnnEmbedder(self, Vocabulary.load(folder / "words.txt"), name=name)

    def _read(
        self,
        number: int,
        tokens_BL: Array,
        carry: tuple[Carry, ...],
        *,
        lengths_B: Array | None = None,
        reverse: bool = False,
        key: Array | None = None,
    ) -> tuple[list[Array], tuple[Carry, ...]]:
        """(the embedding and each layer's states, dropped on the way up, the last states)."""
        rate, stack = self.config.dropout, self.directions[number]
        keys = [None] * (len(stack) + 1) if key is None else list(jax.random.split(key, len(stack) + 1))
        x_BLD = self.config.layout.constrain(take(self.embedding_VD[...], tokens_BL), "batch", None, None)
        states, last = [dropout(x_BLD, rate, keys[0])], []
        for layer, before, layer_key in zip(stack, carry, keys[1:], strict=True):
            y_BLD, end = layer(states[-1], before, lengths_B=lengths_B, reverse=reverse)
            states.append(dropout(y_BLD, rate, layer_key))
            last.append(end)
        return states, tuple(last)

    def _tied(self) -> Array | None:
        return self.embedding_VD[...] if self.config.tie_embeddings else None


class RnnEmbedder(ModelEmbedder):
    """The states of a recurrent language model: v_l(w_i) = h_i^l, in one direction or in both.

    Forward states know the words up to i and backward ones those from i on; layer 0 is the embedding. A sentence starts
    with empty states. Peters et al. 2017 (arXiv 1705.00108).

    Args:
      model: the language model.
      vocabulary: gives words their numbers.
      name: see `Embedder`.
      options: see `ModelEmbedder`.
    """

    title = "RNN"

    def __init__(self, model: RNNLM, vocabulary: Vocabulary, *, name: str | None = None, **options: Any):
        super().__init__(name, ("embeddings", *numbered(model.config.num_layers)), **options)
        self._vocabulary = vocabulary
        self._states = jitted(model, lambda model, tokens, lengths: model.states(tokens, lengths_B=lengths))

    def windows(self, sentence: Sentence) -> list[Window]:
        return [whole(self._vocabulary.encode(sentence))]

    def forward(self, rows_BL: np.ndarray, lengths_B: np.ndarray) -> Array:
        return self._states(rows_BL, lengths_B)
