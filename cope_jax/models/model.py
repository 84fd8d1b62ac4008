"""The interface of models for training, generation and evaluation; the registry of all models."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import chex
import numpy as np
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.errors import ConfigError
from cope_jax.layout import Layout
from cope_jax.models.embedder import ModelEmbedder
from cope_jax.registry import Registry, check_fields

SumAndWeight = tuple[Array, Array]
"""(sum, weight), float32 scalars. The mean over batches is total sum divided by total weight."""
MOST_LAYERS = 4096
"""The highest number of layers: creating a model of a damaged config could take forever."""

OF_TRAINING = set(
    "dropout initial_stddev compute_dtype attention attention_blocks remat num_sampled predictions".split()
)
"""Model options that decide how a model is trained and executed, but not what it computes."""

Ability = Literal["generate", "score", "map"]
"""Abilities of a model in addition to training:

- "generate": the methods `prefill` and `decode` continue prompts, as in `Decoder`;
- "score": a call of the model returns the logits of each token, given the tokens before it, also in
  packed segments;
- "map": the method `maps` shows what each layer and head attends to.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that an experiment chooses for a model.

    Attributes:
      name: the model's name in the registry.
    """

    name: str = ""

    def __post_init__(self):
        check_fields(self, self.name or "model")

    def fields(self) -> dict[str, Any]:
        """Returns the options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def variant(self) -> dict[str, Any]:
        """The options, if set, that make another model of the same sizes and encoding."""
        block = getattr(self, "block", None)
        return {} if block is None else dict(block.variant())

    def changed(self, *names: str) -> dict[str, Any]:
        """Returns those of the options that are not the default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def complete(
        self, task: Any, encoding: Any, max_length: int, layout: Layout, **decided: Any
    ) -> Any:
        """Creates the Config of the model for a task.

        Each option of `self` sets the Config's field of the same name. Any other field has the
        value of the argument of the same name, else that of the attribute of the task with the same
        name, else its default.
        """
        kind, values = MODELS.get(self.name).Config, self.fields()
        decided |= {"encoding": encoding, "max_length": max_length, "layout": layout}
        for field in dataclasses.fields(kind):
            if field.name in decided:
                values.setdefault(field.name, decided[field.name])
            elif field.name not in values and (
                hasattr(task, field.name) or field.default is dataclasses.MISSING
            ):
                values[field.name] = getattr(task, field.name)
        return kind(**values)


class Model(nnx.Module):
    """Base class of the models that `cope-jax train` trains.

    The constructor of a subclass accepts `(config, *, rngs)`. A subclass sets two frozen
    dataclasses. `Options` has what an experiment chooses, and extends `ModelOptions`. `Config` adds
    what the task decides. Every Config has the attributes `layout` and `stochastic`. `stochastic`
    says whether training needs random numbers, such as for dropout.

    Attributes:
      losses: names of the metrics that are losses; training minimises the sum of their means.
      abilities: what the model supports in addition to training.
      config: the Config that the model was created from.
    """

    config: Any

    Options: ClassVar[type]
    Config: ClassVar[type]
    losses: ClassVar[tuple[str, ...]] = ("loss",)
    abilities: ClassVar[frozenset[Ability]] = frozenset()

    def initial_carry(self, batch_size: int) -> PyTree:
        """The carry before the first batch, a pytree of `[B, ...]`; empty by default."""
        del batch_size
        return ()

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Computes losses and errors of a batch, as sums and weights, and the next carry.

        Args:
          batch: the fields of a batch of the task. If these have no `positions`, the caller adds
            `positions`, `[B, L]` or `[1, L]`.
          carry: the carry that the previous batch returned, or `initial_carry`.
          dropout_key: random key; None outside of training.
        """
        raise NotImplementedError

    def embedder(
        self, folder: Path, *, lowercase: bool = True, name: str | None = None
    ) -> ModelEmbedder:
        """Returns the embedder of this model, which gives contextual vectors of words.

        Args:
          folder: contains the vocabulary that the model was trained with.
          lowercase: whether this vocabulary is in lowercase.
          name: the name of the embedder. If None, the embedder has the default name of this kind of
            model.

        Raises:
          ConfigError: the model has no vectors of words, or the vocabulary is missing.
        """
        del lowercase, name
        others = [name for name in MODELS if MODELS.get(name).embedder is not Model.embedder]
        raise ConfigError(
            f"{folder} contains a {self.config.name}, which has no vectors of words: choose a run of "
            f"{', '.join(others)}"
        )


def overlay(whole: Any, changes: Any) -> Any:
    """Returns the nested dicts `whole` with the leaves of `changes` at the same paths.

    >>> overlay({"encoder": {"a": 1, "b": 2}, "head": 3}, {"encoder": {"b": 4}})
    {'encoder': {'a': 1, 'b': 4}, 'head': 3}
    """
    if not isinstance(whole, Mapping) or not isinstance(changes, Mapping):
        return changes
    return {**whole, **{name: overlay(whole.get(name), value) for name, value in changes.items()}}


def check_shapes(model: str, fields: Mapping[str, Any], rank: int = 2) -> None:
    """ConfigError unless all fields but None have this rank and one shape, without an axis of 0.

    The check needs only shapes, so it also works while JAX traces a jitted function.

    >>> check_shapes("decoder", {"inputs": np.zeros((1, 3)), "weights": np.zeros((1, 2)), "segments": None})
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: decoder: inputs (1, 3), weights (1, 2) must have the same 2 axes
    """
    given = {name: x for name, x in fields.items() if x is not None}
    try:
        chex.assert_rank(list(given.values()), rank)
        chex.assert_equal_shape(list(given.values()))
    except AssertionError as error:
        shapes = ", ".join(f"{name} {np.shape(x)}" for name, x in given.items())
        axes = f"the same {rank} axes" if len(given) > 1 else f"{rank} axes"
        raise ConfigError(f"{model}: {shapes} must have {axes}") from error
    for name, x in given.items():
        if 0 in np.shape(x):
            raise ConfigError(
                f"{model}: {name} {np.shape(x)} is empty: give a sequence with a token"
            )


@dataclasses.dataclass(frozen=True)
class StaticGraphDef:
    """A model without arrays: static for jitted functions, even if its config has no hash."""

    graph: nnx.GraphDef[Any]

    def __hash__(self) -> int:
        return hash(type(self.graph))


def deciding_options(config: Any) -> dict[str, Any]:
    """The options that decide what a model computes, by flag name without `config.model.`.

    >>> from cope_jax.models.decoder import DecoderOptions
    >>> decisive = deciding_options(DecoderOptions())
    >>> decisive["num_layers"], decisive["block.num_kv_heads"], "block.dropout" in decisive
    (2, 2, False)
    >>> block = DecoderOptions().block
    >>> named = dataclasses.replace(block, qkv_bias=block.use_bias)
    >>> deciding_options(DecoderOptions(block=named)) == decisive
    True
    """
    others = {"name", "layout", "encoding", "vocab_size", "max_length", "block"}
    options = {field.name for field in dataclasses.fields(config)} - OF_TRAINING - others
    decisive = {name: getattr(config, name) for name in sorted(options)}
    if hasattr(config, "block"):
        block, shape = config.block, config.block.attention_shape(None)
        whole: dict[str, Any] = {"num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        whole["mlp_dim"] = block.mlp_dim or 4 * block.model_dim
        whole["qkv_bias"] = None if block.qkv_bias == block.use_bias else block.qkv_bias
        for name, value in (dataclasses.asdict(block) | whole).items():
            if name not in OF_TRAINING:
                decisive[f"block.{name}"] = value
    return decisive


def attends(options: Any) -> bool:
    """True if a model with these options has attention, and therefore a position encoding."""
    return hasattr(options, "block")


# Classes of models that take (config, *, rngs).
MODELS: Registry[Any] = Registry("model")
