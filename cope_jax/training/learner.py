"""The pure functions of training: initial state, step, and metrics."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cope_jax import models, positions
from cope_jax.array_types import Array, PyTree
from cope_jax.models.model import Model, SumAndWeight, overlay
from cope_jax.training.optimizer import applied_rate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step needs and changes, as a plain pytree.

    Attributes:
      step: number of steps done, int32.
      params: the model's parameters, nested dicts of float32 arrays.
      opt_state: the optimizer's state.
      key: the run's random key; step t samples with `fold_in(key, t)`.
      carry: what the model carries from one batch to the next, `[B, ...]`; () for most models.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    key: Array
    carry: PyTree = ()


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model, an optimizer and a position sampler as pure functions of their state.

    Attributes:
      model: config of the model.
      optimizer: the gradient transformation.
      schedule: the learning rate as a function of the number of updates. It is only for reports,
        because the optimizer also contains the schedule.
      max_position: the exclusive upper bound of positions.
      sampler: name of the position sampler.
      batch_size: number of rows of a batch. A model's carry has an entry for each row.
      accumulate: number of microbatches per step.
    """

    model: Any
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    max_position: int
    sampler: str = "consecutive"
    batch_size: int = 1
    accumulate: int = 1

    def init(self, seed: Any, start: PyTree = None) -> TrainState:
        """The state before the first step.

        Args:
          seed: decides the parameters and everything that training samples.
          start: parameters to use instead of initialised ones, as a part of the nested dicts; None
            initialises all.
        """
        model_key, run_key = jax.random.split(jax.random.key(seed))
        model = self._create(nnx.Rngs(model_key))
        params = overlay(nnx.to_pure_dict(nnx.state(model, nnx.Param)), start or {})
        # A weak type, as of jnp.full(n, 0.5), ends with the first step: the second would be another
        # program.
        params = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), params)
        carry = model.initial_carry(self.batch_size)
        step, memory = jnp.zeros((), jnp.int32), self.optimizer.init(params)
        return TrainState(step, params, memory, run_key, carry)

    def sample_positions(self, key: Array, batch: int, length: int) -> Any:
        """Positions of `batch` sequences, `[B, L]` or `[1, L]`, from the sampler."""
        return positions.SAMPLERS.get(self.sampler)(key, batch, length, self.max_position)

    def with_positions(self, key: Array, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with positions from the sampler; a batch that has `positions` keeps them."""
        if "positions" in batch:
            return dict(batch)
        return {"positions": self.sample_positions(key, *batch["inputs"].shape[:2]), **batch}

    def initial_carry(self, batch_size: int) -> PyTree:
        """The carry before the first batch."""
        # Compiled, it makes only that.
        return jax.jit(lambda: self._create(nnx.Rngs(0)).initial_carry(batch_size))()

    def metrics(
        self,
        params: PyTree,
        carry: PyTree,
        batch: Mapping[str, Any],
        dropout_key: Array | None = None,
    ) -> tuple[dict[str, SumAndWeight], PyTree]:
        """Calls `Model.metrics` with these parameters; the batch must have `positions`.

        If `dropout_key` is None, there is no dropout.
        """
        return self.rebuild(params).metrics(batch, carry, dropout_key)

    def rebuild(self, params: PyTree) -> Any:
        """The model as a module with these parameters."""
        graph, state = nnx.split(self._shapes())
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def variables(self) -> Any:
        """The model's parameters as nnx variables with metadata, and shapes for arrays."""
        return nnx.state(self._shapes(), nnx.Param)

    def loss(
        self,
        params: PyTree,
        batch: dict[str, Array],
        key: Array,
        carry: PyTree = (),
        totals: Any = None,
    ) -> tuple[Array, tuple[dict[str, SumAndWeight], PyTree]]:
        """Computes the loss that training minimises: the sum of the means of the model's losses.

        This is Σ_t (Σ_b w_tb ℓ_tb) / max(W_t, 1) over losses t and targets b with weights w. `key`
        samples dropout, and also positions if the batch has no positions. If the batch is a
        microbatch, `totals` maps each loss to W_t of the entire batch. If `totals` is None, W_t is
        Σ_b w_tb.

        Returns:
          (loss, (all metrics, the new carry)).
        """
        positions_key, dropout_key = jax.random.split(key)
        batch = self._pad(self.with_positions(positions_key, batch))
        dropout_key = dropout_key if self.model.stochastic else None
        measured, carry = self.metrics(params, carry, batch, dropout_key)
        if totals is None:
            totals = {name: weight for name, (_, weight) in measured.items()}
        means = [measured[name][0] / jnp.maximum(totals[name], 1.0) for name in self.losses]
        return sum(means[1:], means[0]), (measured, carry)

    def gradient(
        self, params: PyTree, batch: dict[str, Array], key: Array, carry: PyTree = ()
    ) -> tuple[dict[str, Array], PyTree, PyTree]:
        """Computes the loss, its gradient and the new carry, one microbatch after another.

        With A microbatches, microbatch m has the rows m, m + A, …, so each device has a share of
        every microbatch. Microbatch m samples with `fold_in(key, m)`; a single microbatch samples
        with `key`. The loss and the gradient are sums over all tokens of the entire batch, divided
        by the sum of all weights.

        Returns:
          (losses, gradient, carry). The losses are `loss` and, if the loss has several parts, each
          part by name.
        """
        grad = jax.value_and_grad(self.loss, has_aux=True)
        if self.accumulate == 1:
            (loss, (measured, carry)), grads = grad(params, batch, key, carry)
            return self._parts(loss, measured), grads, carry
        layout = self.model.layout
        split = {name: x.reshape(-1, self.accumulate, *x.shape[1:]) for name, x in batch.items()}
        micro = {name: jnp.swapaxes(x, 0, 1) for name, x in split.items()}
        carries = jax.tree.map(
            lambda x: jnp.swapaxes(x.reshape(-1, self.accumulate, *x.shape[1:]), 0, 1), carry
        )
        # Only the weights of the entire batch are used: the compiler drops the rest of this
        # computation.
        whole = self.loss(params, batch, key, carry)[1][0]
        totals = {name: weight for name, (_, weight) in whole.items()}

        def add(sums: PyTree, number_rows_and_carry: Any) -> tuple[PyTree, PyTree]:
            number, rows, carry = number_rows_and_carry
            rows = {
                name: layout.constrain(x, "batch", *(None,) * (x.ndim - 1))
                for name, x in rows.items()
            }
            of_rows = grad(params, rows, jax.random.fold_in(key, number), carry, totals)
            (loss, (measured, carry)), grads = of_rows
            return jax.tree.map(jnp.add, sums, (loss, measured, grads)), carry

        start = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), whole, params))
        numbers = jnp.arange(self.accumulate, dtype=jnp.int32)
        (loss, measured, grads), carries = jax.lax.scan(add, start, (numbers, micro, carries))
        carry = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), carries)
        return self._parts(loss, measured), grads, carry

    def _parts(self, loss: Array, measured: dict[str, SumAndWeight]) -> dict[str, Array]:
        """Returns `loss` and, if the loss has several parts, each part's mean, by name."""
        names = self.losses if len(self.losses) > 1 else ()
        parts = ((name, measured[name]) for name in names)
        means = {name: total / jnp.maximum(weight, 1.0) for name, (total, weight) in parts}
        return means | {"loss": loss}

    def train_step(
        self, state: TrainState, batch: dict[str, Array]
    ) -> tuple[TrainState, dict[str, Array]]:
        """Takes one optimizer step on the weighted mean loss of the batch.

        If the loss, the gradient or the update is not finite, the step is skipped: only the number
        of steps changes.

        Returns:
          (new state, metrics). The metrics are scalars by name: `loss` in nats, the parts of the
          loss if there are several, `grad_norm`, `update_norm`, `learning_rate` and `finite`.
          `grad_norm` is the norm before clipping. A skipped step also has an `update_norm` and a
          `learning_rate`. `finite` is 0 for a skipped step, otherwise 1.
        """
        key = jax.random.fold_in(state.key, state.step)
        losses, grads, carry = self.gradient(state.params, batch, key, state.carry)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            learning_rate = applied_rate(self.schedule, state.opt_state)
        frozen = getattr(self.model, "frozen_modules", ())
        zeros = {name: jax.tree.map(jnp.zeros_like, updates[name]) for name in frozen}
        updates = {**updates, **zeros}
        norms = {"grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
        metrics = {**losses, **norms, "learning_rate": learning_rate}
        finite = (
            jnp.isfinite(losses["loss"])
            & jnp.isfinite(metrics["grad_norm"])
            & jnp.isfinite(metrics["update_norm"])
        )
        params, opt_state, carry = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (optax.apply_updates(state.params, updates), opt_state, carry),
            (state.params, state.opt_state, state.carry),
        )
        metrics["finite"] = finite.astype(jnp.float32)
        return TrainState(state.step + 1, params, opt_state, state.key, carry), metrics

    def train_steps(
        self, state: TrainState, batches: dict[str, Array]
    ) -> tuple[TrainState, dict[str, Array]]:
        """Takes one step for each of the T `batches`; metrics have a value per step, `[T]`."""
        return jax.lax.scan(self.train_step, state, batches)

    @property
    def losses(self) -> tuple[str, ...]:
        """The names of the losses; training minimises the sum of their means."""
        kind: type[Model] = models.MODELS.get(self.model.name)
        return kind.losses

    def _pad(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Pads the sequences to a multiple of the number of devices that split them."""
        axis, length = self.model.layout.length, batch["inputs"].shape[1]
        if axis is None:
            return batch
        return pad_sequences(batch, length + -length % jax.sharding.get_abstract_mesh().shape[axis])

    def _create(self, rngs: nnx.Rngs) -> Any:
        return models.create(self.model.name, self.model, rngs=rngs)

    def _shapes(self) -> Any:
        return nnx.eval_shape(lambda: self._create(nnx.Rngs(0)))


def pad_sequences(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Pads rows of a batch to `length` with tokens 0 of weight 0, unseen in a causal model.

    The positions of the padding repeat the last position, because padding may have any position in
    range.

    >>> batch = {"inputs": np.array([[5, 6]]), "positions": np.array([[0, 1]])}
    >>> {name: x.tolist() for name, x in pad_sequences(batch, 4).items()}
    {'inputs': [[5, 6, 0, 0]], 'positions': [[0, 1, 1, 1]]}
    """
    old = batch["inputs"].shape[1]

    def pad(name: str, x: Any) -> Any:
        if x.shape[1:2] != (old,) or length == old:
            return x
        mode: Any = "edge" if name == "positions" else "constant"
        by: Any = np.pad if isinstance(x, np.ndarray) else jnp.pad
        return by(x, [(0, 0), (0, length - old), *[(0, 0)] * (x.ndim - 2)], mode=mode)

    return {name: pad(name, x) for name, x in batch.items()}
