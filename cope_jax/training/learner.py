"""The pure functions of training: initial state, step, and logits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from cope_jax import positions
from cope_jax.models.decoder import Decoder, DecoderConfig
from cope_jax.ops.cross_entropy import cross_entropy
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
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    key: Array


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model, an optimizer and a position sampler as pure functions of their state.

    Attributes:
      model: config of the model.
      optimizer: the gradient transformation.
      schedule: the learning rate by the number of updates; only reported, the optimizer has it already.
      sampler: name of the position sampler; positions lie below the model's `max_length`.
      accumulate: microbatches of a step.
    """

    model: DecoderConfig
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    sampler: str = "consecutive"
    accumulate: int = 1

    def init(self, seed: Any) -> TrainState:
        """The state before the first step."""
        key = jax.random.key(seed)
        model_key, run_key = jax.random.split(key)
        params = nnx.to_pure_dict(nnx.state(self._create(nnx.Rngs(model_key)), nnx.Param))
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params), run_key)

    def sample_positions(self, key: Array, batch: int, length: int) -> Any:
        """Positions of `batch` sequences, `[B, L]` or `[1, L]`, from the sampler."""
        return positions.SAMPLERS.get(self.sampler)(key, batch, length, self.model.max_length)

    def logits(self, params: PyTree, inputs_BL: Array, positions_BL: Any, dropout_key: Array | None = None) -> Array:
        """logits_BLV of the model with these parameters; without a key there is no dropout."""
        return self.rebuild(params)(inputs_BL, positions_BL=positions_BL, dropout_key=dropout_key)

    def rebuild(self, params: PyTree) -> Decoder:
        """The model as a module that holds these parameters."""
        graph, state = nnx.split(nnx.eval_shape(lambda: self._create(nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)

    def variables(self) -> Any:
        """The model's parameters as variables of shapes, with their metadata."""
        return nnx.state(nnx.eval_shape(lambda: self._create(nnx.Rngs(0))), nnx.Param)

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array) -> tuple[Array, Array]:
        """The sum of the losses of all tokens, each times its weight, and the sum of the weights.

        (Σ w_bl ℓ_bl, Σ w_bl), ℓ_bl = −log p(target_bl), in nats. Positions and dropout are drawn from `key`.
        """
        positions_key, dropout_key = jax.random.split(key)
        batch_size, length = batch["inputs"].shape
        positions_BL = self.sample_positions(positions_key, batch_size, length)
        batch, positions_BL = self._pad(batch, positions_BL)
        logits_BLV = self.logits(
            params, batch["inputs"], positions_BL, dropout_key if self.model.block.dropout > 0 else None
        )
        return jnp.sum(batch["weights"] * cross_entropy(logits_BLV, batch["targets"])), jnp.sum(batch["weights"])

    def gradient(self, params: PyTree, batch: dict[str, Array], key: Array) -> tuple[Array, PyTree]:
        """The mean loss of the tokens of weight 1, and its gradient, microbatch by microbatch.

        With A microbatches, microbatch m has the rows m, m + A, … (so that each device has its share of each), and
        draws from `fold_in(key, m)`; a single one draws from `key`. The result is that of the whole batch: sums over
        all tokens, divided by the sum of all weights.
        """
        grad = jax.value_and_grad(self.loss, has_aux=True)
        if self.accumulate == 1:
            (total, weight), grads = grad(params, batch, key)
        else:
            micro = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, self.accumulate, *x.shape[1:]), 0, 1), batch)

            def add(sums: PyTree, item: tuple[Array, dict[str, Array]]) -> tuple[PyTree, None]:
                number, rows = item
                layout = self.model.layout
                rows = {name: layout.constrain(x, "batch", None) for name, x in rows.items()}
                return jax.tree.map(jnp.add, sums, grad(params, rows, jax.random.fold_in(key, number))), None

            zero = jnp.zeros((), jnp.float32)
            start = (zero, zero), jax.tree.map(jnp.zeros_like, params)
            numbers = jnp.arange(self.accumulate, dtype=jnp.int32)
            ((total, weight), grads), _ = jax.lax.scan(add, start, (numbers, micro))
        weight = jnp.maximum(weight, 1.0)
        return total / weight, jax.tree.map(lambda g: g / weight, grads)

    def train_step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step on the mean loss of the tokens of weight 1.

        A step whose loss, gradient or update is not finite updates nothing but the number of steps.

        Returns:
          The new state, and as scalars `loss` (nats), `grad_norm` (before clipping), `update_norm`, `learning_rate`
          (both of the update that was to be), and `finite`, 1 or 0.
        """
        loss, grads = self.gradient(state.params, batch, jax.random.fold_in(state.key, state.step))
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            learning_rate = applied_rate(self.schedule, state.opt_state)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "update_norm": optax.tree.norm(updates),
            "learning_rate": learning_rate,
        }
        finite = jnp.isfinite(loss) & jnp.isfinite(metrics["grad_norm"]) & jnp.isfinite(metrics["update_norm"])
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (optax.apply_updates(state.params, updates), opt_state),
            (state.params, state.opt_state),
        )
        metrics["finite"] = finite.astype(jnp.float32)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    def train_steps(self, state: TrainState, batches: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One step for each entry of the batches' leading axis T; the metrics are those of each step, `[T]`."""
        return jax.lax.scan(self.train_step, state, batches)

    def _pad(self, batch: dict[str, Array], positions_BL: Any) -> tuple[dict[str, Array], Any]:
        """Lengthens sequences by tokens of weight 0, which no earlier one sees, until the devices divide them."""
        axis = self.model.layout.length
        if axis is None:
            return batch, positions_BL
        padding = (0, 0), (0, -batch["inputs"].shape[1] % jax.sharding.get_abstract_mesh().shape[axis])
        pad = np.pad if isinstance(positions_BL, np.ndarray) else jnp.pad
        return {name: jnp.pad(x, padding) for name, x in batch.items()}, pad(positions_BL, padding, "edge")

    def _create(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.model, rngs=rngs)
