"""The shared code of recurrent language models: stacks of layers by direction, and the loss."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.layers.recurrent import Carry, Cell, Recurrent, clear
from cope_jax.layers.word_softmax import WordSoftmax
from cope_jax.models.model import MOST_LAYERS, Model, ModelOptions, SumAndWeight, check_shapes
from cope_jax.ops.dropout import dropout
from cope_jax.registry import check_at_least, check_fields

Carries = tuple[tuple[Carry, ...], ...]
"""The state of every layer of every direction, the forward direction first."""

PREFIXES = ("", "backward_")
"""Prefixes of the fields of a batch that train the forward and the backward model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentLMOptions(ModelOptions):
    """The options that an experiment chooses for any recurrent language model.

    Attributes:
      num_layers: number of layers of each direction.
      dropout: dropout rate on the input of each layer and on the output of the last layer.
        Recurrent connections have no dropout.
      num_sampled: number of words that a sampled softmax samples in training; 0 means the full
        softmax. The sampling assumes a vocabulary sorted by decreasing frequency.
      carries: whether states are carried from batch to batch. If not, every sequence starts with a
        cleared state, so that examples need not continue one another.
    """

    num_layers: int = 2
    dropout: float = 0.0
    num_sampled: int = 0
    carries: bool = True

    def __post_init__(self):
        check_fields(self, self.name)
        check_at_least(1, self.name, MOST_LAYERS, num_layers=self.num_layers)
        check_at_least(0, self.name, num_sampled=self.num_sampled)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"{self.name}.dropout must lie in [0, 1), got {self.dropout}")

    @property
    def stochastic(self) -> bool:
        return self.dropout > 0 or self.num_sampled > 0


class RecurrentLM(Model):
    """Base class of recurrent language models over words, in one direction or in both.

    With the option `carries` states are carried from batch to batch, but gradients are not
    (truncated backpropagation through time).

    Attributes:
      residual: whether each layer after the first adds its input to its output.
      token_fields: the fields of a batch that must have the shape of the targets.
    """

    residual: bool = False
    token_fields: ClassVar[tuple[str, ...]] = ("inputs", "targets", "weights")
    directions: nnx.List[nnx.List[Recurrent]]
    softmax: WordSoftmax | None

    def initial_carry(self, batch_size: int) -> Carries:
        return self._cleared(batch_size) if self.config.carries else ()

    def _cleared(self, batch_size: int) -> Carries:
        """The state before the first token of a text."""
        return tuple(
            tuple(layer.initial_carry(batch_size) for layer in stack) for stack in self.directions
        )

    def metrics(
        self, batch: Mapping[str, Array], carry: Any = (), dropout_key: Array | None = None
    ) -> tuple[dict[str, SumAndWeight], Carries]:
        """Computes `loss` and `token_error`; of two directions, `forward_loss` and `backward_loss`.

        Loss and error are means over the tokens of both directions. A sampled softmax gives no
        `token_error`.

        The batch has the fields `inputs`, `targets` and `weights`. With two directions, it also has
        these fields of the reversed text, with the prefix `backward_`. If the batch has `reset`,
        `[B]`, a row whose `reset` is not 0 starts with a cleared state.

        Raises:
          ConfigError: the model has no output layer, or it has two directions and the batch has no
            reversed text.
        """
        name, prefixes = self.config.name, PREFIXES[: len(self.directions)]
        if self.softmax is None:
            raise ConfigError(
                f"{name} with vocab_size=0 has no output layer and cannot be trained: set vocab_size to train it"
            )
        for field in (
            prefix + field for prefix in prefixes for field in ("inputs", "targets", "weights")
        ):
            if field not in batch:
                raise ConfigError(
                    f"{name} needs {field!r} in its batches: use a task that provides both directions"
                )
        carry = carry if len(carry) else self._cleared(len(batch["inputs"]))
        carry = clear(jax.lax.stop_gradient(carry), batch.get("reset"))
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        inputs = self._inputs([batch[f"{prefix}inputs"] for prefix in prefixes])
        parts, last = [], []
        for number, (prefix, x_BLD, key) in enumerate(zip(prefixes, inputs, keys, strict=False)):
            check_shapes(name, {field: batch[prefix + field] for field in self.token_fields})
            weights_BL = batch[f"{prefix}weights"]
            sample_key, key = (None, None) if key is None else jax.random.split(key)
            states, end = self._read(number, x_BLD, carry[number], key=key)
            losses = self.softmax.losses(
                states[-1],
                batch[f"{prefix}targets"],
                weights_BL,
                tied_VD=self._tied(),
                sample_key=sample_key,
                num_sampled=self.config.num_sampled,
                layout=self.config.layout,
            )
            parts.append((losses, jnp.sum(weights_BL)))
            last.append(end)
        carried = tuple(last) if self.config.carries else ()
        return _join(parts), jax.lax.stop_gradient(carried)

    def _inputs(self, words: Sequence[Array]) -> Iterator[Array]:
        """Yields x_BLD, the vectors of the words, for each direction."""
        raise NotImplementedError

    def _tied(self) -> Array | None:
        """Returns the embedding if the output layer is tied to it, otherwise None."""
        return None

    def _states(
        self, x_BLD: Array, carry: Carries | None, lengths_B: Array | None
    ) -> tuple[list[Array], Carries]:
        """Returns (x and each layer's output, directions concatenated; the last states)."""
        if lengths_B is not None:
            real_BL1 = (np.arange(x_BLD.shape[1], dtype=np.int32)[None] < lengths_B[:, None])[
                ..., None
            ]
            x_BLD = jnp.where(real_BL1, x_BLD, jnp.zeros((), x_BLD.dtype))
        carry = self._cleared(len(x_BLD)) if carry is None else carry
        runs = [
            self._read(number, x_BLD, before, lengths_B=lengths_B, reverse=number == 1)
            for number, before in enumerate(carry)
        ]
        layers = [
            jnp.concatenate(parts, axis=-1)
            for parts in zip(*(states for states, _ in runs), strict=True)
        ]
        return layers, tuple(last for _, last in runs)

    def _read(
        self,
        number: int,
        x_BLD: Array,
        carry: tuple[Carry, ...],
        *,
        lengths_B: Array | None = None,
        reverse: bool = False,
        key: Array | None = None,
    ) -> tuple[list[Array], tuple[Carry, ...]]:
        """Runs one direction. Returns (inputs and outputs of layers after dropout; last states)."""
        rate, stack = self.config.dropout, self.directions[number]
        keys = (
            [None] * (len(stack) + 1)
            if key is None
            else list(jax.random.split(key, len(stack) + 1))
        )
        states = [dropout(x_BLD, rate, keys[0])]
        last: list[Carry] = []
        for layer, before, layer_key in zip(stack, carry, keys[1:], strict=True):
            y_BLD, end = layer(states[-1], before, lengths_B=lengths_B, reverse=reverse)
            # As in the original ELMo, the input is added after its dropout.
            y_BLD = y_BLD + states[-1] if self.residual and last else y_BLD
            states.append(dropout(y_BLD, rate, layer_key))
            last.append(end)
        return states, tuple(last)


def create_directions(
    cell: Cell, widths: Sequence[int], directions: int, rngs: nnx.Rngs
) -> nnx.List[nnx.List[Recurrent]]:
    """Creates a stack of layers for each direction, with inputs of these `widths`."""
    return nnx.List(
        [
            nnx.List([Recurrent(cell, width, rngs=rngs) for width in widths])
            for _ in range(directions)
        ]
    )


def _join(parts: Sequence[tuple[Mapping[str, Array], Array]]) -> dict[str, SumAndWeight]:
    """Metrics over all tokens, from (sums, weight) of each direction; of two, also each loss."""
    sums, weights = zip(*parts, strict=True)
    joined = {name: (sum(measures[name] for measures in sums), sum(weights)) for name in sums[0]}
    if len(parts) == 2:
        for name, measures, weight in zip(
            ("forward_loss", "backward_loss"), sums, weights, strict=True
        ):
            joined[name] = (measures["loss"], weight)
    return joined
