"""The pure functions of training: initial state, step, and measures."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cope_jax import models, positions
from cope_jax.models.base import Measure, Model, overlay
from cope_jax.training.optimizer import applied_rate
from cope_jax.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step needs and changes, a plain pytree.

    Attributes:
      step: number of steps done, int32.
      params: the model's parameters, nested dicts of float32 arrays.
      opt_state: the optimizer's.
      key: the run's random key; step t draws from `fold_in(key, t)`.
      carry: what the model carries from one batch to the next, `[B, ...]`; () for most.
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
      schedule: the learning rate by the number of updates; only reported, the optimizer has it already.
      max_position: positions lie below this.
      sampler: name of the position sampler.
      batch_size: rows of a batch, for models that carry something of each from one to the next.
      accumulate: microbatches of a step.
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
          seed: decides the parameters, and all that training draws.
          start: parameters that are not drawn: part of the nested dicts of all.
        """
        key = jax.random.key(seed)
        model_key, run_key = jax.random.split(key)
        model = self._create(nnx.Rngs(model_key))
        params = overlay(nnx.to_pure_dict(nnx.state(model, nnx.Param)), start or {})
        carry = model.initial_carry(self.batch_size)
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params), run_key, carry)

    def sample_positions(self, key: Array, batch: int, length: int) -> Any:
        """Positions of `batch` sequences, `[B, L]` or `[1, L]`, from the sampler."""
        return positions.SAMPLERS.get(self.sampler)(key, batch, length, self.max_position)

    def initial_carry(self, batch_size: int) -> PyTree:
        """What a model carries before the first batch."""
        return jax.jit(lambda: self._create(nnx.Rngs(0)).initial_carry(batch_size))()  # compiled, it creates no more

    def measures(
        self, params: PyTree, carry: PyTree, batch: Mapping[str, Any], dropout_key: Array | None = None
    ) -> tuple[dict[str, Measure], PyTree]:
        """`Model.measures` with these parameters, of a batch with its `positions`; without a key nothing is drawn."""
        return self.rebuild(params).measures(batch, carry, dropout_key)

    def rebuild(self, params: PyTree) -> Any:
        """The model as a module that holds these parameters."""
        graph, state = nnx.split(self._shapes())
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def variables(self) -> Any:
        """The model's parameters as variables of shapes, with their metadata."""
        return nnx.state(self._shapes(), nnx.Param)

    def loss(
        self, params: PyTree, batch: dict[str, Array], key: Array, carry: PyTree = (), totals: Any = None
    ) -> tuple[Array, tuple[dict[str, Measure], PyTree]]:
        """What training minimises: the sum of the means of the model's losses.

        Σ_t (Σ_b w_tb ℓ_tb) / max(W_t, 1). Dropout is drawn from `key`, and so are positions that the batch has not.

        Args:
          params: the parameters.
          batch: as the task gives it.
          key: random key.
          carry: what the batch before handed on.
          totals: W of each loss, where the batch is only a part of what is averaged over; None: Σ_b w_tb.

        Returns:
          (loss, (all measures, what is carried on)).
        """
        positions_key, dropout_key = jax.random.split(key)
        batch_size, length = batch["inputs"].shape[:2]
        positions_BL = self.sample_positions(positions_key, batch_size, length)
        batch = {"positions": self._pad_positions(positions_BL)} | self._pad(batch)
        measured, carry = self.measures(params, carry, batch, dropout_key if self.model.stochastic else None)
        totals = {name: weight for name, (_, weight) in measured.items()} if totals is None else totals
        means = [measured[name][0] / jnp.maximum(totals[name], 1.0) for name in self.losses]
        return sum(means[1:], means[0]), (measured, carry)

    def gradient(
        self, params: PyTree, batch: dict[str, Array], key: Array, carry: PyTree = ()
    ) -> tuple[dict[str, Array], PyTree, PyTree]:
        """The loss, its gradient, and what is carried on, microbatch by microbatch.

        With A microbatches, microbatch m has the rows m, m + A, … (so that each device has its share of each), and
        draws from `fold_in(key, m)`; a single one draws from `key`. The result is that of the whole batch: sums over
        all tokens, divided by the sum of all weights.

        Returns:
          (`loss` and, where it has several parts, each of them; the gradient; the carry).
        """
        grad = jax.value_and_grad(self.loss, has_aux=True)
        if self.accumulate == 1:
            (loss, (measured, carry)), grads = grad(params, batch, key, carry)
            return self._parts(loss, measured), grads, carry
        layout = self.model.layout
        split = {name: x.reshape(-1, self.accumulate, *x.shape[1:]) for name, x in batch.items()}
        micro = {name: jnp.swapaxes(x, 0, 1) for name, x in split.items()}
        carries = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, self.accumulate, *x.shape[1:]), 0, 1), carry)
        # The weights of the whole batch; of this computation nothing else is used, and so nothing else is done.
        whole = self.loss(params, batch, key, carry)[1][0]
        totals = {name: weight for name, (_, weight) in whole.items()}

        def add(sums: PyTree, number_rows_and_carry: Any) -> tuple[PyTree, PyTree]:
            number, rows, carry = number_rows_and_carry
            rows = {name: layout.constrain(x, "batch", *(None,) * (x.ndim - 1)) for name, x in rows.items()}
            (loss, (measured, carry)), grads = grad(params, rows, jax.random.fold_in(key, number), carry, totals)
            return jax.tree.map(jnp.add, sums, (loss, measured, grads)), carry

        start = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), whole, params))
        numbers = jnp.arange(self.accumulate, dtype=jnp.int32)
        (loss, measured, grads), carries = jax.lax.scan(add, start, (numbers, micro, carries))
        carry = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), carries)
        return self._parts(loss, measured), grads, carry

    def _parts(self, loss: Array, measured: dict[str, Measure]) -> dict[str, Array]:
        """The loss, and the means of its parts where it has several."""
        names = self.losses if len(self.losses) > 1 else ()
        return {name: measured[name][0] / jnp.maximum(measured[name][1], 1.0) for name in names} | {"loss": loss}

    def train_step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step on the mean loss of the tokens of weight 1.

        A step whose loss, gradient or update is not finite updates nothing but the number of steps.

        Returns:
          The new state, and as scalars `loss` (nats; and its parts, where it has several), `grad_norm` (before
          clipping), `update_norm`, `learning_rate` (both of the update that was to be), and `finite`, 1 or 0.
        """
        key = jax.random.fold_in(state.key, state.step)
        losses, grads, carry = self.gradient(state.params, batch, key, state.carry)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            learning_rate = applied_rate(self.schedule, state.opt_state)
        updates = {
            name: jax.tree.map(jnp.zeros_like, update) if name in self.frozen else update
            for name, update in updates.items()
        }
        metrics = {
            **losses,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "learning_rate": learning_rate,
        }
        finite = (
            jnp.isfinite(losses["loss"]) & jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["update_norm"])
        )
        params, opt_state, carry = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (optax.apply_updates(state.params, updates), opt_state, carry),
            (state.params, state.opt_state, state.carry),
        )
        metrics["finite"] = finite.astype(jnp.float32)
        return TrainState(state.step + 1, params, opt_state, state.key, carry), metrics

    def train_steps(self, state: TrainState, batches: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One step for each entry of the batches' leading axis T; the metrics are those of each step, `[T]`."""
        return jax.lax.scan(self.train_step, state, batches)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The modules of the model whose parameters stay as they are."""
        return getattr(self.model, "frozen_modules", ())

    @property
    def losses(self) -> tuple[str, ...]:
        """The measures whose means are added up to what training minimises."""
        return self._kind.losses

    @property
    def _kind(self) -> type[Model]:
        return models.MODELS.get(self.model.name)

    def _pad(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Lengthens sequences by tokens of weight 0, which no earlier one sees, until the devices divide them."""
        length = batch["inputs"].shape[1]
        more = self._padding(length)
        if not more:
            return dict(batch)
        return {
            name: jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)]) if x.shape[1:2] == (length,) else x
            for name, x in batch.items()
        }

    def _pad_positions(self, positions_BL: Any) -> Any:
        more = self._padding(positions_BL.shape[1])
        pad = np.pad if isinstance(positions_BL, np.ndarray) else jnp.pad
        return pad(positions_BL, ((0, 0), (0, more)), "edge") if more else positions_BL

    def _padding(self, length: int) -> int:
        axis = self.model.layout.length
        return 0 if axis is None else -length % jax.sharding.get_abstract_mesh().shape[axis]

    def _create(self, rngs: nnx.Rngs) -> Any:
        return models.create(self.model.name, self.model, rngs=rngs)

    def _shapes(self) -> Any:
        return nnx.eval_shape(lambda: self._create(nnx.Rngs(0)))
