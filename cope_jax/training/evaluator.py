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
"""The mean metrics that a task reports for one split: `loss` in nats, `token_error` as a fraction in [0, 1],
`perplexity`."""


class Evaluator:
    """Measures models on fixed splits, all padded to the length of the longest, so that they share a compiled program.

    If the task is packable, each row contains as many sequences as fit. Splits of the training length then keep rows of
    that length, with a second program, because shorter rows cost less. Models with a carry do not pack, because it
    would pass from one sequence to the next. Splits that are streams are read from their beginning, with the carry
    passed from batch to batch.

    Args:
      program: the model, and the runs side by side.
      task: where the splits come from.
      splits: number of examples of each split; all if a split has fewer.
      batch_size: sequences at a time.
      data_seed: seed of the examples.
      data_dir: where to read the fixed splits from; None samples them.
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
        # The compiler chooses the sharding of the carry; the metrics must be complete in every process.
        self._measure = jax.jit(runs.lift(learner.metrics, shared=1), out_shardings=(program.whole, None))

    def __call__(
        self, params: PyTree, splits: Iterable[str] | None = None, examples: int | None = None
    ) -> dict[str, list[Errors]]:
        """The errors on each split, one for each seed; with several seeds, `params` has a leading axis for them.

        `examples` limits the examples of each split, rounded up to full batches. None means all splits or examples.
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
        """Adds the loss if it is a sum of several, and puts first what most models measure, for tables."""
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
    """Packs `times` sequences into each row; `segments` keep them apart.

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
