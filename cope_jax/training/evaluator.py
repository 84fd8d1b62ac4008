"""The losses and errors of a model on fixed splits."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from cope_jax.array_types import PyTree
from cope_jax.data import pipeline
from cope_jax.models.model import SumAndWeight
from cope_jax.tasks import Task
from cope_jax.training.learner import pad_sequences
from cope_jax.training.program import Program
from cope_jax.training.sharding import LENGTH

Errors = dict[str, float]
"""What a task shows of the means of a model's metrics on one split: `loss`, in nats, `token_error`, a share in [0, 1],
`perplexity`."""


class Evaluator:
    """Measures models on fixed splits, all padded to one length, so that one program is compiled for all of them.

    Where the task says that it can, as many sequences as a row has room for stand in it side by side, and those of the
    length of training in rows of their own, which cost less; not for models that carry a state, which would go from one
    to the next. Splits that are streams are read from their beginning, and what the model carries goes from batch to
    batch.

    Args:
      program: the model, and the runs side by side.
      task: where the splits come from.
      splits: examples of each split; of a split that has fewer, all.
      batch_size: sequences at a time.
      data_seed: seed of the examples.
      data_dir: where to read the fixed splits from; None draws them.
    """

    def __init__(
        self,
        program: Program,
        task: Task,
        splits: Mapping[str, int],
        *,
        batch_size: int,
        data_seed: int,
        data_dir: str | None = None,
    ):
        learner, runs, multiple = program.learner, program.seed_batch, program.mesh.shape[LENGTH]
        self._program, self._task = program, task
        key = jax.random.key(data_seed)
        carry = jax.tree.map(np.asarray, learner.initial_carry(batch_size))
        apart = task.packable and not jax.tree.leaves(carry)
        lengths = {split: task.length(split) for split in splits}
        longest = max(lengths.values(), default=0)
        rows = {split: own if apart and task.as_trained(split) else longest for split, own in lengths.items()}
        times_of = {split: rows[split] // own if apart else 1 for split, own in lengths.items()}
        self._batches: dict[str, list[dict[str, Any]]] = {}
        for split, examples in splits.items():
            times = times_of[split]
            length = rows[split] + -rows[split] % multiple
            batches = pipeline.evaluation_batches(
                task,
                split,
                examples=examples,
                batch_size=batch_size * times,
                seed=data_seed,
                data_dir=data_dir if split in task.splits else None,
            )
            self._batches[split] = []
            for number, batch in enumerate(batches):
                batch = learner.with_positions(jax.random.fold_in(key, number), batch)
                batch["positions"] = np.asarray(batch["positions"])
                batch = _join(batch, times) if apart and not task.as_trained(split) else batch
                self._batches[split].append(pad_sequences(batch, length))
        self._examples = {split: batch_size * times for split, times in times_of.items()}
        self._carry = runs.stack([carry] * runs.width)
        # What is carried lies as the compiler likes; what is measured must be whole in every process.
        self._measure = jax.jit(runs.lift(learner.metrics, shared=1), out_shardings=(program.whole, None))

    def __call__(
        self, params: PyTree, splits: Iterable[str] | None = None, examples: int | None = None
    ) -> dict[str, list[Errors]]:
        """The errors on each split, one for each run side by side, whose parameters have a leading axis for them.

        `examples` bounds those of each split, rounded up to whole batches; None takes all, of splits as of examples.
        """
        splits = self._batches if splits is None else splits
        with jax.set_mesh(self._program.mesh):
            return {split: self._errors(params, split, examples) for split in splits}

    def _errors(self, params: PyTree, split: str, examples: int | None) -> list[Errors]:
        batches = self._batches[split]
        if examples is not None:
            batches = batches[: -(-examples // self._examples[split])]
        carry, measured = self._carry, []
        for batch in batches:
            sums, carry = self._measure(params, carry, self._program.place_whole(batch))
            measured.append(jax.device_get(sums))
        runs = zip(*(self._program.seed_batch.unstack(sums) for sums in measured), strict=True)
        return [self._task.reported_metrics(split, self._with_loss(mean_errors(run))) for run in runs]

    def _with_loss(self, errors: Errors) -> Errors:
        """With the loss, where it is a sum of several; what most models measure comes first, for tables."""
        if "loss" not in errors:
            errors = {"loss": sum(errors[name] for name in self._program.learner.losses), **errors}
        first = {name: errors[name] for name in ("loss", "token_error", "sequence_error") if name in errors}
        return first | errors


def mean_errors(batches: Iterable[Mapping[str, SumAndWeight]]) -> Errors:
    """The means over batches of sums and weights, in float64.

    >>> mean_errors([{"loss": (6.0, 2.0)}, {"loss": (0.0, 1.0)}])
    {'loss': 2.0}
    """
    totals: dict[str, tuple[float, float]] = {}
    for batch in batches:
        for name, (value, weight) in batch.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = old[0] + float(value), old[1] + float(weight)
    return {name: value / weight if weight else float("nan") for name, (value, weight) in totals.items()}


def _join(batch: Mapping[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
    """Rows of `times` sequences each, which `segments` keep apart.

    >>> batch = {"inputs": np.array([[5, 6], [7, 8]]), "positions": np.array([[0, 1]])}
    >>> {name: x.tolist() for name, x in _join(batch, 2).items()}
    {'inputs': [[5, 6, 7, 8]], 'positions': [[0, 1, 0, 1]], 'segments': [[0, 0, 3, 3]]}
    """
    rows, own = batch["inputs"].shape[:2]
    segments_BL = batch.get("segments", np.zeros((rows, own), np.int32))  # documents count from 1, up to the length
    segments_BL = segments_BL + (own + 1) * (np.arange(rows, dtype=np.int32) % times)[:, None]
    joined = {**batch, "segments": segments_BL}
    if len(joined["positions"]) == 1:
        joined["positions"] = np.tile(joined["positions"], (times, 1))
    return {name: x.reshape(-1, times * own) for name, x in joined.items()}
