"""BERT and its pretraining: masked tokens and next sentences."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.layers.basic import ACTIVATIONS, Norm, create_linear, logits
from cope_jax.models.embedder import (
    LENGTHS,
    ModelEmbedder,
    Sentence,
    Window,
    jitted,
    numbered,
    overlapping,
)
from cope_jax.models.encoder import Encoder, EncoderConfig, EncoderOptions
from cope_jax.models.encoder import bert_block as bert_block
from cope_jax.models.model import MODELS, Model, SumAndWeight, check_shapes
from cope_jax.ops.gather import take_tokens
from cope_jax.ops.losses import cross_entropy, is_wrong
from cope_jax.registry import check_at_least, unknown
from cope_jax.tokenizers.wordpiece import WordPiece

Pooling = Literal["first", "mean"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertOptions(EncoderOptions):
    """The options that an experiment chooses for BERT's pretraining.

    Attributes:
      name: "bert".
      predictions: maximum number of predicted tokens of a sequence. The output layer runs only on
        this many tokens of each sequence, because most tokens have weight 0. If None, the output
        layer runs on all tokens. If a sequence has more predicted tokens than this number, the loss
        is NaN.
    """

    name: Literal["bert"] = "bert"
    predictions: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(BertOptions, EncoderConfig):
    """The config of BERT with its two heads."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, "bert", predictions=self.predictions)

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a token: `encoder_flops` and a share of those of the heads.

        The heads need 6 (P·(D² + D·V) + D² + 2·D) FLOPs for each sequence. The term with P is for
        the P predicted tokens, D² is for the pooler, and 2·D is for the layer after the pooler.
        Each of the L tokens has the share 1/L.

        >>> options = BertOptions.of_size("base", predictions=20)
        >>> round(BertConfig(**options.fields(), vocab_size=30522).flops_per_token(128) / 1e6)
        546
        """
        width, narrow = self.block.model_dim, self.embedding_block.model_dim
        predictions = length if self.predictions is None else min(self.predictions, length)
        heads = predictions * narrow * (width + self.vocab_size) + width * (width + 2)
        return self.encoder_flops(length) + 6.0 * heads / length


@MODELS.register("bert")
class Bert(Model):
    """BERT, which learns to predict masked tokens and whether one text follows another.

        mlm = E norm(gelu(W x + b)) + c  at each predicted token,
        nsp = W₂ pooled + b₂  (0: the second text follows the first, 1: it is random).

    The loss is the mean cross entropy of mlm over the predicted tokens plus the mean cross entropy
    of nsp over the sequences. Devlin et al. (arXiv 1810.04805). E is the embedding of the tokens.

    >>> config = BertConfig(vocab_size=16, max_length=8, num_layers=2, block=bert_block(8, 2))
    >>> mlm_BLV, nsp_B2 = Bert(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 8), jnp.int32))
    >>> mlm_BLV.shape, nsp_B2.shape
    ((1, 8, 16), (1, 2))
    """

    Options: ClassVar[type] = BertOptions
    Config: ClassVar[type] = BertConfig
    losses: ClassVar[tuple[str, ...]] = ("mlm_loss", "nsp_loss")

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        block, width = config.block, config.block.model_dim
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        narrow = config.embedding_block
        self.transform = create_linear(
            block, width, narrow.model_dim, ("embed", "heads"), rngs=rngs
        )
        self.transform_norm = Norm(narrow, rngs=rngs)
        self.bias_V = nnx.Param(jnp.zeros((config.vocab_size,)), axes=("vocab",))
        self.next_sentence = create_linear(block, width, 2, ("embed", None), rngs=rngs)

    def __call__(
        self,
        tokens_BL: Array,
        segments_BL: Array | None = None,
        mask_BL: Array | None = None,
        *,
        indices_BP: Array | None = None,
        positions_BL: Any = None,
        dropout_key: Array | None = None,
    ) -> tuple[Array, Array]:
        """Predicts tokens, and whether the second text follows the first.

        The arguments are those of `Encoder`, and `indices_BP`, int32: the indices of the tokens to
        predict in each sequence. If `indices_BP` is None, the model predicts all tokens. An index
        outside the sequence gives NaN.

        Returns:
          (mlm_BPV, nsp_B2), logits in float32, or in float64 if the compute type is float64.
          Without `indices_BP`, P is L.
        """
        x_BLD = self.encoder(
            tokens_BL, segments_BL, mask_BL, positions_BL=positions_BL, dropout_key=dropout_key
        )
        chosen_BPD = x_BLD if indices_BP is None else take_tokens(x_BLD, indices_BP)
        return self.predict(chosen_BPD), logits(self.next_sentence, self.encoder.pool(x_BLD))

    def layers(
        self, tokens_BL: Array, segments_BL: Array | None = None, mask_BL: Array | None = None
    ) -> Array:
        """Returns the states of every layer, x_JBLD, the embeddings first."""
        return self.encoder.layers(tokens_BL, segments_BL, mask_BL)

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Computes losses and errors of predicted tokens (`mlm_…`) and of sequences (`nsp_…`).

        The batch has the fields `inputs`, `segments`, `mask`, `targets` and `weights`, all
        `[B, L]`, and `next`, `[B]`. `next` is 0 if the second text follows the first, and 1 if it
        is random. The field `positions` is optional. Rows whose first token is padding do not count
        in the metrics of the sequences.
        """
        next_B = batch["next"]
        check_shapes("bert", {name: batch[name] for name in ("inputs", "targets", "weights")})
        weights_BP, targets_BP, indices_BP = batch["weights"], batch["targets"], None
        predictions = self.config.predictions
        if predictions is not None and predictions < weights_BP.shape[1]:
            count_B = jnp.sum(weights_BP > 0, axis=1)
            weights_BP, indices_BP = jax.lax.top_k(weights_BP, predictions)
            targets_BP = jnp.take_along_axis(targets_BP, indices_BP, axis=1)
            too_many = jnp.any(count_B > predictions)
            weights_BP = jnp.where(too_many, jnp.full((), jnp.nan, weights_BP.dtype), weights_BP)
        mlm_BPV, nsp_B2 = self(
            batch["inputs"],
            batch["segments"],
            batch["mask"],
            indices_BP=indices_BP,
            positions_BL=batch.get("positions"),
            dropout_key=dropout_key,
        )
        weights_B = batch["mask"][:, 0].astype(weights_BP.dtype)
        mlm = _measure("mlm", mlm_BPV, targets_BP, weights_BP)
        return mlm | _measure("nsp", nsp_B2[:, None], next_B[:, None], weights_B[:, None]), carry

    def embedder(
        self, folder: Path, *, lowercase: bool = True, name: str | None = None
    ) -> "BertEmbedder":
        return BertEmbedder(
            self, WordPiece.load(folder / "vocab.txt", lowercase=lowercase), name=name
        )

    def predict(self, x_BPD: Array) -> Array:
        """Returns the logits of each token from its state in the last layer, mlm_BPV."""
        block, layout = self.config.block, self.config.layout
        hidden_BPD = self.transform_norm(ACTIVATIONS[block.activation](self.transform(x_BPD)))
        table_VD = layout.constrain(
            self.encoder.words.embedding[...].astype(hidden_BPD.dtype), "width", None
        )
        wide = self.encoder.norm.dtype
        logits_BPV = jnp.einsum("BPD,VD->BPV", hidden_BPD, table_VD, preferred_element_type=wide)
        return layout.constrain(
            logits_BPV + self.bias_V[...].astype(wide)[None, None], "batch", None, "width"
        )


def _measure(
    name: str, logits_BPV: Array, targets_BP: Array, weights_BP: Array
) -> dict[str, SumAndWeight]:
    """Returns the loss, in nats, and the share of wrong predictions, each as (sum, weight)."""
    total = jnp.sum(weights_BP)
    wrong_BP = is_wrong(logits_BPV, targets_BP).astype(weights_BP.dtype)
    loss_BP = weights_BP.astype(logits_BPV.dtype) * cross_entropy(logits_BPV, targets_BP)
    return {
        f"{name}_loss": (jnp.sum(loss_BP), total),
        f"{name}_error": (jnp.sum(weights_BP * wrong_BP), total),
    }


class BertEmbedder(ModelEmbedder):
    """Embeds words by all layers of a BERT: by first pieces, or by means over pieces.

    [CLS] and [SEP] enclose the sentence. A sentence that is too long is cut into windows that
    overlap by half. The vector of a word comes from the window in which the word is farthest from a
    cut. Devlin et al. (arXiv 1810.04805), section 5.3.

    Args:
      model: a module with `config` and `layers(tokens_BL, segments_BL, mask_BL)`. `layers` returns
        `[J, B, L, D]`, the embeddings first.
      tokenizer: splits words into pieces.
      pooling: what represents a word: its "first" piece, or the "mean" of its pieces.
      max_length: maximum number of tokens of a window, including [CLS] and [SEP]. A window is never
        longer than the model's `max_length`, which is also the default.
      name: see `ModelEmbedder`.
      options: see `ModelEmbedder`.
    """

    title = "BERT"

    def __init__(
        self,
        model: Any,
        tokenizer: WordPiece,
        *,
        pooling: Pooling = "first",
        max_length: int | None = None,
        name: str | None = None,
        **options: Any,
    ):
        if pooling not in get_args(Pooling):
            raise unknown("pooling", pooling, get_args(Pooling))
        tokenizer.check_specials()
        longest = (
            model.config.max_length
            if max_length is None
            else min(max_length, model.config.max_length)
        )
        check_at_least(3, name or self.title, max_length=longest)
        lengths = [
            *(length for length in options.pop("lengths", LENGTHS) if length < longest),
            longest,
        ]
        super().__init__(
            name, ("embeddings", *numbered(model.config.num_layers)), lengths=lengths, **options
        )
        self._tokenizer, self._pooling, self._room = tokenizer, pooling, longest - 2

        def layers(model: Any, tokens_BL: Array, lengths_B: Array) -> Array:
            mask_BL = jnp.arange(tokens_BL.shape[1], dtype=jnp.int32)[None] < lengths_B[:, None]
            return model.layers(tokens_BL, jnp.zeros_like(tokens_BL), mask_BL.astype(jnp.int32))

        self.forward = jitted(model, layers)

    def sentence_vectors(self, sentences: Sequence[Sentence]) -> np.ndarray:
        """Returns a vector of each sentence, `[S, D]`, of length 1.

        It is the mean over the states of all pieces in the last layer, [CLS] and [SEP] among them,
        as in MiniLM for sentences. Pieces that are too many for a window are left out.
        """

        def whole_sentence(sentence: Sentence) -> list[Window]:
            pieces, _ = self._tokenizer.encode_words(sentence)
            row = np.array(self._tokenizer.frame(pieces[: self._room])[0], np.int32)
            return [Window(row, np.zeros(1, np.int64), np.array([[0, len(row)]]))]

        layers = self.vectors(sentences, whole_sentence)
        means = np.stack([layers_JLD[-1, 0] for layers_JLD in layers])
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def windows(self, sentence: Sentence) -> list[Window]:
        pieces, starts = self._tokenizer.encode_words(sentence)
        of_words = [
            pieces[i:j][: self._room] for i, j in itertools.pairwise([*starts, len(pieces)])
        ]
        windows = []
        for words, owned in overlapping(
            [len(pieces_of_word) for pieces_of_word in of_words], self._room
        ):
            row, _ = self._tokenizer.frame([piece for word in words for piece in of_words[word]])
            ends = 1 + np.cumsum([0, *(len(of_words[word]) for word in words)])
            spans = np.stack(
                [ends[:-1], ends[:-1] + 1 if self._pooling == "first" else ends[1:]], axis=1
            )
            indices = np.array(owned, np.int64)
            windows.append(Window(np.array(row, np.int32), indices, spans[indices - words.start]))
        return windows
