"""The compiled functions of training on a mesh, shared by runs that differ only in their seeds."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cope_jax.array_types import PyTree
from cope_jax.training import sharding
from cope_jax.training.learner import Learner, TrainState


@dataclasses.dataclass(frozen=True)
class SeedBatch:
    """Turns functions of one seed into functions of `width` seeds, by vmap over a leading axis S.

    If `width` is 1, there is no leading axis, and functions are not changed.

    >>> SeedBatch(2).lift(lambda x, y: x + y, shared=1)(np.array([1, 2]), 10).tolist()
    [11, 12]
    """

    width: int = 1

    def lift(self, function: Callable[..., Any], shared: int = 0) -> Callable[..., Any]:
        """Returns `function` for all seeds together, with the last `shared` arguments in common."""
        if self.width == 1:
            return function

        def lifted(*args: Any) -> Any:
            axes = (0,) * (len(args) - shared) + (None,) * shared
            return jax.vmap(function, in_axes=axes)(*args)

        return lifted

    def stack(self, trees: Sequence[PyTree]) -> PyTree:
        """Stacks the trees of all seeds, as the lifted functions expect them."""
        if self.width == 1:
            return trees[0]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def unstack(self, tree: PyTree) -> list[PyTree]:
        """The inverse of `stack`."""
        if self.width == 1:
            return [tree]
        return [jax.tree.map(lambda leaf, s=s: leaf[s], tree) for s in range(self.width)]


class Program:
    """A learner compiled for `seed_batch.width` seeds side by side, on the devices of a mesh.

    Each device creates and keeps only its share of the state. Batches are split by rows. On a mesh
    of one device, nothing is split.

    Args:
      learner: the learner to compile; its model must have the layout of the mesh.
      seed_batch: the number of seeds side by side.
      mesh: from `sharding.create_mesh`.
    """

    def __init__(self, learner: Learner, seed_batch: SeedBatch, mesh: Mesh):
        self.learner = learner
        self.seed_batch = seed_batch
        self.mesh = mesh
        self._lead = (None,) * (seed_batch.width > 1)
        self.whole = NamedSharding(mesh, PartitionSpec())
        rows = learner.model.layout.batch or None
        self.batch_sharding = self._sharding(PartitionSpec(None, rows))
        self._by_rows = NamedSharding(mesh, PartitionSpec(learner.model.layout.batch or None))
        self.state_shardings = self._state_shardings()
        init = seed_batch.lift(learner.init, shared=1)
        self._init = jax.jit(init, out_shardings=self.state_shardings)
        self._train_steps = jax.jit(
            seed_batch.lift(learner.train_steps),
            in_shardings=(self.state_shardings, self.batch_sharding),
            out_shardings=(self.state_shardings, self.whole),
            donate_argnums=0,
            compiler_options=sharding.compiler_options(mesh),
        )

    def init(self, seeds: Sequence[int], start: PyTree = None) -> TrainState:
        """Creates the state before the first step; states of seeds are stacked, seeds first.

        `start` has parameters to use instead of initialised ones, as a part of the model's nested
        dicts. All seeds use the same `start`.
        """
        stacked = self.seed_batch.stack([np.int32(seed) for seed in seeds])
        with jax.set_mesh(self.mesh):
            start = _placed(start or {}, self.whole if self._lead else self.state_shardings.params)
            return self._init(jax.device_put(stacked, self.whole), start)

    def train_steps(self, state: TrainState, batches: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Takes steps like `Learner.train_steps`; returns (new state, metrics), donates `state`.

        `batches` are global arrays from `place`.
        """
        with jax.set_mesh(self.mesh):
            return self._train_steps(state, batches)

    def state_shapes(self) -> TrainState:
        """The shapes, types and shardings of the state."""
        with jax.set_mesh(self.mesh):
            seeds = self.seed_batch.stack([np.int32(0)] * self.seed_batch.width)
            shapes = jax.eval_shape(self.seed_batch.lift(self.learner.init), seeds)
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shapes,
            self.state_shardings,
        )

    def lower(self, batch: Mapping[str, Any], steps: int = 1) -> jax.stages.Lowered:
        """Lowers a call of `train_steps` on `steps` batches like `batch`; needs no devices."""
        lead = (*((self.seed_batch.width,) if self._lead else ()), steps)
        batches = {
            name: jax.ShapeDtypeStruct(
                (*lead, *field.shape), field.dtype, sharding=self.batch_sharding
            )
            for name, field in batch.items()
        }
        with jax.set_mesh(self.mesh):
            return self._train_steps.lower(self.state_shapes(), batches)

    def rows(self, batch_size: int) -> np.ndarray:
        """The rows of a batch that this process needs."""
        return sharding.rows_here(self._by_rows, batch_size)

    def place(self, batches: PyTree, batch_size: int) -> PyTree:
        """Builds global arrays `[T, B, ...]` or `[S, T, B, ...]` from the rows of this process."""
        rows, axis = self.rows(batch_size), len(self._lead) + 1

        def to_global(local: np.ndarray) -> jax.Array:
            def rows_at(index: Any) -> np.ndarray:
                wanted = np.arange(batch_size)[index[axis]]
                return local[(*index[:axis], np.searchsorted(rows, wanted), *index[axis + 1 :])]

            shape = (*local.shape[:axis], batch_size, *local.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, self.batch_sharding, rows_at)

        return jax.tree.map(to_global, batches)

    def place_whole(self, batch: PyTree) -> PyTree:
        """Builds global arrays `[B, ...]` or `[1, ...]` from arrays that every process has."""

        def to_global(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(
                x.shape, self._by_rows if len(x) > 1 else self.whole, x.__getitem__
            )

        return jax.tree.map(to_global, batch)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*self._lead, *spec))

    def _state_shardings(self) -> TrainState:
        variables = self.learner.variables()
        specs = sharding.parameter_specs(variables, self.mesh.shape)
        shapes = nnx.to_pure_dict(variables)
        opt_specs = sharding.optimizer_specs(self.learner.optimizer, shapes, specs)
        whole: Any = PartitionSpec()
        carry = jax.tree.map(
            lambda _: PartitionSpec(self.learner.model.layout.batch or None),
            jax.eval_shape(lambda: self.learner.initial_carry(self.learner.batch_size)),
        )
        return jax.tree.map(
            self._sharding,
            TrainState(step=whole, params=specs, opt_state=opt_specs, key=whole, carry=carry),
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )


def _placed(start: Any, shardings: Any) -> Any:
    """Places nested dicts of parameters by their shardings, or by one sharding."""
    if isinstance(start, Mapping):
        inner = shardings if isinstance(shardings, Mapping) else None
        of = {name: shardings if inner is None else inner[name] for name in start}
        return {name: _placed(value, of[name]) for name, value in start.items()}
    return jax.device_put(start, shardings)
