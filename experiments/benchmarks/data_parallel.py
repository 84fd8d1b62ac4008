"""A training step with its batch split over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from cope_jax.training.learner import Learner, TrainState
from cope_jax.typing import Array, PyTree
from experiments.benchmarks.devices import AXIS, Split


def train_step(learner: Learner, split: Split) -> Callable[[TrainState, dict[str, Array]], Any]:
    """As `Learner.train_step`: every device has the whole state and its share of the batch.

    Each device takes the gradient of its share of the loss, Σ w ℓ over its own tokens / Σ w over all tokens; the sum of
    these is the gradient of the loss. Random keys of the devices differ.
    """

    def step(state: TrainState, batch: dict[str, Array]) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), jax.lax.axis_index(AXIS))
        weight = jax.lax.psum(jnp.sum(batch["weights"]), AXIS)

        def loss_of(params: PyTree) -> Array:
            return learner.loss(params, batch, key, totals={"loss": weight})[0]

        loss, grads = jax.lax.psum(jax.value_and_grad(loss_of)(state.params), AXIS)
        with jax.numpy_dtype_promotion("standard"):  # optax relies on implicit promotion
            updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, state.key), {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
        }

    whole = PartitionSpec()
    sharded = jax.shard_map(
        step, mesh=split.mesh, in_specs=(whole, split.spec), out_specs=(whole, whole), check_vma=False
    )
    return jax.jit(sharded, donate_argnums=0)
