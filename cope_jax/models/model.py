"""The interface of models for training, generation and evaluation, and the registry of all models."""

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
from cope_jax.registry import Registry

SumAndWeight = tuple[Array, Array]
"""(sum, weight), float32 scalars: over any number of batches the mean is the sum of sums over the sum of weights."""


Ability = Literal["generate", "score", "map"]
"""What a model supports in addition to training:

- "generate": `prefill` and `decode` continue prompts, see `Decoder`;
- "score": a call gives the probability of each token of a text given those before it, in packed segments;
- "map": `maps` shows what each layer and head attends to.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that an experiment chooses for a model.

    Attributes:
      name: the model's name in the registry.
    """

    name: str = ""

    def fields(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def complete(self, task: Any, encoding: Any, max_length: int, layout: Layout, **decided: Any) -> Any:
        """The config of the model for a task.

        Fields that only the Config has come from the arguments, or else from the attributes of the task.
        """
        kind, options = MODELS.get(self.name).Config, self.fields()
        decided |= {"encoding": encoding, "max_length": max_length, "layout": layout}
        names = [field.name for field in dataclasses.fields(kind) if field.name not in options]
        return kind(**options, **{name: decided[name] if name in decided else getattr(task, name) for name in names})


class Model(nnx.Module):
    """Base class of the models that `experiments.train` trains.

    A subclass is created from `(config, *, rngs)` and names two frozen dataclasses: `Options`, what an experiment
    chooses, see `ModelOptions`; and `Config`, these options and what the task decides. Every Config has a `layout`, and
    `stochastic`, whether training needs random numbers (for example for dropout).

    Attributes:
      losses: names of the metrics; training minimises the sum of their means.
      abilities: what it supports in addition to training.
      config: what it was made from.
    """

    config: Any

    Options: ClassVar[type]
    Config: ClassVar[type]
    losses: ClassVar[tuple[str, ...]] = ("loss",)
    abilities: ClassVar[frozenset[Ability]] = frozenset()

    def initial_carry(self, batch_size: int) -> PyTree:
        """The first value of what is carried from batch to batch: a pytree of `[B, ...]`. Default: nothing."""
        del batch_size
        return ()

    def metrics(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Losses and errors of a batch, as sums and weights, and what is carried to the next batch.

        Args:
          batch: the fields of the task's batches, and `positions`, `[B, L]` or `[1, L]`, if the task gives none.
          carry: from the previous batch, or the initial one.
          dropout_key: None outside of training.
        """
        raise NotImplementedError

    def embedder(self, folder: Path, *, lowercase: bool = True, name: str | None = None) -> ModelEmbedder:
        """The embedder of this model: contextual vectors of words.

        Args:
          folder: contains the vocabulary that the model was trained with.
          lowercase: whether that vocabulary is in lowercase.
          name: the embedder's name; None: that of this kind of model.

        Raises:
          ConfigError: the model has no vectors of words, or the vocabulary is missing.
        """
        del lowercase, name
        others = [name for name in MODELS if MODELS.get(name).embedder is not Model.embedder]
        raise ConfigError(
            f"{folder} contains a {self.config.name}, which has no vectors of words: choose a run of "
            f"{', '.join(others)}"
        )


def overlay(whole: Any, part: Any) -> Any:
    """The nested dicts `whole`, with the leaves of `part` in place of their own.

    >>> overlay({"encoder": {"a": 1, "b": 2}, "head": 3}, {"encoder": {"b": 4}})
    {'encoder': {'a': 1, 'b': 4}, 'head': 3}
    """
    if not isinstance(whole, Mapping) or not isinstance(part, Mapping):
        return part
    return {**whole, **{name: overlay(whole.get(name), value) for name, value in part.items()}}


def check_shapes(model: str, fields: Mapping[str, Any], rank: int = 2) -> None:
    """Raises ConfigError unless all fields that are not None have the same shape, of this rank; free under jit.

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


@dataclasses.dataclass(frozen=True)
class StaticGraphDef:
    """A model without its arrays: a static argument of a jitted function, even if its config is not hashable."""

    graph: nnx.GraphDef[Any]

    def __hash__(self) -> int:
        return hash(type(self.graph))


def attends(options: Any) -> bool:
    """Whether a model with these options has attention, and so a position encoding: its options have a `block`."""
    return hasattr(options, "block")


# Classes of models that take (config, *, rngs).
MODELS: Registry[Any] = Registry("model")
