"""What the training loop needs of a model, and the registry of all models."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from cope_jax.registry import Registry
from cope_jax.typing import Array, PyTree

Measure = tuple[Array, Array]
"""(sum, weight), float32 scalars: over any number of batches the mean is the sum of sums over the sum of weights."""


class Model(nnx.Module):
    """Base class of the models that `experiments.train` trains.

    A subclass takes `(config, *, rngs)` and names two frozen dataclasses: `Options`, what an experiment chooses, whose
    field `name` is the model's in the registry; and `Config`, these options and what the task decides. Options are
    completed by `Options.complete(task, encoding, max_length, layout)`, which gives the Config; every Config has a
    `layout`, and `stochastic`, whether training draws random numbers (dropout, say).

    Attributes:
      losses: names of the measures whose means are added up to what training minimises.
    """

    Options: ClassVar[type]
    Config: ClassVar[type]
    losses: ClassVar[tuple[str, ...]] = ("loss",)

    def initial_carry(self, batch_size: int) -> PyTree:
        """What is carried from one batch to the next in the beginning: a pytree of `[B, ...]`. Default: nothing."""
        del batch_size
        return ()

    def measures(
        self, batch: Mapping[str, Array], carry: PyTree = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, Measure], PyTree]:
        """Losses and errors of a batch, as sums and weights, and what is carried on to the next batch.

        Args:
          batch: the fields of the task's batches, and `positions`, `[B, L]` or `[1, L]`, where they are not among them.
          carry: of the batch before, or the initial one.
          dropout_key: None outside of training.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class StaticGraphDef:
    """A model without its arrays, as a static argument of a jitted function; its config may hold what has no hash."""

    graph: nnx.GraphDef[Any]

    def __hash__(self) -> int:
        return hash(type(self.graph))


def attends(options: Any) -> bool:
    """Whether a model with these options has attention, and so a position encoding: its options have a `block`."""
    return hasattr(options, "block")


# Classes of models that take (config, *, rngs).
MODELS: Registry[Any] = Registry("model")
