"""A classifier of sequences and a tagger of words, both on a pretrained BERT."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.layers.basic import create_linear, logits
from cope_jax.layers.scalar_mix import ScalarMix
from cope_jax.layout import Layout
from cope_jax.models.encoder import Encoder, EncoderConfig, EncoderOptions
from cope_jax.models.model import MODELS, Model, SumAndWeight, check_shapes
from cope_jax.ops.dropout import dropout
from cope_jax.ops.gather import take_tokens
from cope_jax.ops.losses import token_measures
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(EncoderOptions):
    """The options that an experiment chooses for a head and the encoder under it.

    Attributes:
      head_dropout: dropout rate on the input of the head.
      frozen: whether to train only the head. The encoder then stays unchanged: it has no gradient,
        weight decay or dropout.
    """

    head_dropout: float = 0.1
    frozen: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(HeadOptions, EncoderConfig):
    """The config of a head and the encoder under it.

    Attributes:
      num_classes: C, the number of classes of sequences or words.
    """

    num_classes: int

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, self.name, num_classes=self.num_classes)
        if not 0 <= self.head_dropout < 1:
            raise ConfigError(
                f"{self.name}.head_dropout must lie in [0, 1), got {self.head_dropout}"
            )

    @property
    def stochastic(self) -> bool:
        return self.head_dropout > 0 or (self.block.dropout > 0 and not self.frozen)

    @property
    def frozen_modules(self) -> tuple[str, ...]:
        return ("encoder",) if self.frozen else ()

    def flops_per_token(self, length: int) -> float:
        """FLOPs of training on a token: `encoder_flops`, or a third if the encoder is frozen.

        A frozen encoder needs no backward pass.
        """
        return self.encoder_flops(length) / (3 if self.frozen else 1)


class _Head(Model):
    """An encoder with a linear layer on top."""

    def __init__(self, config: HeadConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = Encoder(config, rngs=rngs)
        self.out = create_linear(
            config.block, config.block.model_dim, config.num_classes, ("embed", None), rngs=rngs
        )

    def _logits(self, x_BLD: Array, key: Array | None) -> Array:
        return logits(self.out, dropout(x_BLD, self.config.head_dropout, key))

    def _keys(self, key: Array | None) -> tuple[Array | None, Array | None]:
        """Returns (the key of the encoder, the key of the head)."""
        if key is None:
            return None, None
        encoder_key, head_key = jax.random.split(key)
        return None if self.config.frozen else encoder_key, head_key

    def _freeze(self, x: Array) -> Array:
        return jax.lax.stop_gradient(x) if self.config.frozen else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertClassifierOptions(HeadOptions):
    """The options that an experiment chooses for a classifier of sequences."""

    name: Literal["bert_classifier"] = "bert_classifier"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertClassifierConfig(BertClassifierOptions, HeadConfig):
    """The config of a classifier of sequences."""


@MODELS.register("bert_classifier")
class BertClassifier(_Head):
    """Classifies sequences by the first token, W dropout(pooled) + b. Devlin et al. (1810.04805).

    >>> import jax.numpy as jnp
    >>> from cope_jax.models.encoder import bert_block
    >>> config = BertClassifierConfig(vocab_size=16, max_length=8, num_classes=3, num_layers=2, block=bert_block(8, 2))
    >>> BertClassifier(config, rngs=nnx.Rngs(0))(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 3)
    """

    Options: ClassVar[type] = BertClassifierOptions
    Config: ClassVar[type] = BertClassifierConfig

    def __call__(
        self,
        tokens_BL: Array,
        segments_BL: Array | None = None,
        mask_BL: Array | None = None,
        *,
        positions_BL: Any = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Returns logits_BC of each sequence. The arguments are those of `Encoder`."""
        encoder_key, head_key = self._keys(dropout_key)
        x_BLD = self.encoder(
            tokens_BL, segments_BL, mask_BL, positions_BL=positions_BL, dropout_key=encoder_key
        )
        pooled_B1D = self._freeze(self.encoder.pool(x_BLD))[:, None]
        return self._logits(pooled_B1D, head_key)[:, 0]

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Computes `loss`, and `sequence_error` = `token_error`, the share of wrong sequences.

        The batch has the fields `inputs`, `segments` and `mask`, `[B, L]`, and `targets` and
        `weights`, `[B]`. The field `positions` is optional.
        """
        logits_BC = self(
            *(batch[name] for name in ("inputs", "segments", "mask")),
            positions_BL=batch.get("positions"),
            dropout_key=dropout_key,
        )
        check_shapes(
            "bert_classifier", {"targets": batch["targets"], "weights": batch["weights"]}, rank=1
        )
        return token_measures(
            logits_BC[:, None], batch["targets"][:, None], batch["weights"][:, None]
        ), carry


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertTaggerOptions(HeadOptions):
    """The options that an experiment chooses for a tagger.

    Attributes:
      name: "bert_tagger".
      layers: what the tagger reads: the "last" layer, or a learned "mix" of the embeddings and all
        layers.
    """

    name: Literal["bert_tagger"] = "bert_tagger"
    layers: Literal["last", "mix"] = "last"

    def complete(
        self, task: Any, encoding: Any, max_length: int, layout: Layout, **decided: Any
    ) -> Any:
        return super().complete(
            task, encoding, max_length, layout, num_classes=task.num_tags, **decided
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertTaggerConfig(BertTaggerOptions, HeadConfig):
    """The config of a tagger."""


@MODELS.register("bert_tagger")
class BertTagger(_Head):
    """Tags words by their first pieces, W dropout(x[start]) + b. Devlin et al. (1810.04805).

    x is the output of the last layer, or the mix γ Σ_j softmax(w)_j xʲ of the outputs of all layers
    (`ScalarMix`).

    >>> import jax.numpy as jnp
    >>> from cope_jax.models.encoder import bert_block
    >>> config = BertTaggerConfig(vocab_size=16, max_length=8, num_classes=3, num_layers=2, block=bert_block(8, 2))
    >>> pieces_BP, starts_BL = jnp.zeros((1, 8), jnp.int32), jnp.array([[1, 3, 4]])
    >>> BertTagger(config, rngs=nnx.Rngs(0))(pieces_BP, starts_BL).shape
    (1, 3, 3)
    """

    Options: ClassVar[type] = BertTaggerOptions
    Config: ClassVar[type] = BertTaggerConfig

    def __init__(self, config: BertTaggerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.mix = ScalarMix(config.num_layers + 1, rngs=rngs) if config.layers == "mix" else None

    def __call__(
        self,
        tokens_BP: Array,
        starts_BL: Array,
        segments_BP: Array | None = None,
        mask_BP: Array | None = None,
        *,
        positions_BP: Any = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Returns logits_BLC of each word. The arguments are those of `Encoder`, and `starts_BL`.

        `starts_BL`, int32, has the index of each word's first piece. After the last word, any
        indices within [0, P) may follow. An index outside this range gives NaN.
        """
        encoder_key, head_key = self._keys(dropout_key)
        inputs = tokens_BP, segments_BP, mask_BP
        every = self.mix is not None
        x = self.encoder(
            *inputs, positions_BL=positions_BP, dropout_key=encoder_key, every_layer=every
        )
        x = self._freeze(x).astype(self.encoder.norm.dtype)
        x_BPD = x if self.mix is None else self.mix(x, mask_BP)
        return self._logits(take_tokens(x_BPD, starts_BL), head_key)

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Computes `loss`, `token_error` and `sequence_error` of the words.

        The batch has the fields `inputs`, `segments` and `mask`, `[B, P]`, and `starts`, `targets`
        and `weights`, `[B, L]`. The field `positions`, which has the positions of the pieces, is
        optional.
        """
        check_shapes(
            "bert_tagger", {name: batch[name] for name in ("starts", "targets", "weights")}
        )
        logits_BLC = self(
            *(batch[name] for name in ("inputs", "starts", "segments", "mask")),
            positions_BP=batch.get("positions"),
            dropout_key=dropout_key,
        )
        return token_measures(logits_BLC, batch["targets"], batch["weights"]), carry
