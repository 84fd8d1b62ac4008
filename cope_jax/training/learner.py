"""The pure functions of training: initial state, step, and logits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cope_jax import positions
from cope_jax.models.decoder import Decoder, DecoderConfig
from cope_jax.ops.cross_entropy import cross_entropy
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
      sampler: name of the position sampler; positions lie below the model's `max_length`.
    """

    model: DecoderConfig
    optimizer: optax.GradientTransformation
    sampler: str = "consecutive"

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

    def loss(self, params: PyTree, batch: dict[str, Array], key: Array) -> tuple[Array, Array]:
        """The sum of the losses of all tokens, each times its weight, and the sum of the weights.

        (Σ w_bl ℓ_bl, Σ w_bl), ℓ_bl = −log p(target_bl), in nats. Positions and dropout are drawn from `key`.
        """
        positions_key, dropout_key = jax.random.split(key)
        batch_size, length = batch["inputs"].shape
        logits_BLV = self.logits(
            params,
            batch["inputs"],
            self.sample_positions(positions_key, batch_size, length),
            dropout_key if self.model.block.dropout > 0 else None,
        )
        return jnp.sum(batch["weights"] * cross_entropy(logits_BLV, batch["targets"])), jnp.sum(batch["weights"])

    def train_step(self, state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One optimizer step on the mean loss of the tokens of weight 1.

        Returns:
          The new state, and `loss` (nats) and `grad_norm` (before clipping) as scalars.
        """

        def loss_of(params: PyTree) -> Array:
            total, weight = self.loss(params, batch, jax.random.fold_in(state.key, state.step))
            return total / jnp.maximum(weight, 1.0)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    def train_steps(self, state: TrainState, batches: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        """One step for each entry of the batches' leading axis T; the metrics are those of each step, `[T]`."""
        return jax.lax.scan(self.train_step, state, batches)

    def _create(self, rngs: nnx.Rngs) -> Decoder:
        return Decoder(self.model, rngs=rngs)
