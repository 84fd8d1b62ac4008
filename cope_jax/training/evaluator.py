"""Measures the losses and errors of models on fixed splits."""

import math
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
from cope_jax.training.sharding import LENGTH, compiler_options

Errors = dict[str, float]
"""The mean metrics that a task reports for a split, by name.
`loss` is in nats, `token_error` in [0, 1], `perplexity` a plain number."""

Sums = Mapping[str, SumAndWeight]
"""The sum and the weight of each metric over a batch."""


class Evaluator:
    """Measures models on fixed splits, with one compiled program, or two if sequences are packed.

    Sequences are packed if the task is packable and the model has no carry, because a carry would
    pass from one sequence to the next. Splits of the training length then keep rows of this length,
    which cost less, and all other rows have the longest length and contain as many sequences as
    fit. Without packing, all splits are padded to the longest length. Splits that are streams are
    read from their beginning, and the carry passes from batch to batch.

    Args:
      program: the compiled model and its seeds.
      task: the source of the splits.
      splits: the number of examples to measure, by split. If a split has fewer examples, all of
        them are measured.
      batch_size: number of sequences measured at a time.
      data_seed: seed of the examples.
      data_dir: the directory to read the fixed splits from. If None, `task` makes the examples.
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
        kept = {split for split in splits if apart and task.as_trained(split)}
        rows = {split: lengths[split] if split in kept else longest for split in splits}
        times_of = {split: rows[split] // lengths[split] if apart else 1 for split in splits}
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
        # The compiler chooses the sharding of the carry; the metrics must be complete in every
        # process.
        measure = runs.lift(learner.metrics, shared=1)
        self._measure = jax.jit(
            measure,
            out_shardings=(program.whole, None),
            compiler_options=compiler_options(program.mesh),
        )

    def __call__(
        self, params: PyTree, splits: Iterable[str] | None = None, examples: int | None = None
    ) -> dict[str, list[Errors]]:
        """Returns the mean metrics on each split, as a list with one entry per seed.

        With several seeds, `params` has a leading axis over the seeds.

        `splits` names the splits to measure. If None, all splits are measured. `examples` limits
        the number of examples of each split, rounded up to full batches. If None, there is no
        limit.
        """
        return {
            split: [self.means(split, batches) for batches in runs]
            for split, runs in self.measure(params, splits, examples).items()
        }

    def measure(
        self, params: PyTree, splits: Iterable[str] | None = None, examples: int | None = None
    ) -> dict[str, list[list[Sums]]]:
        """Returns for each split and seed the sums of each batch; arguments as of a call."""
        splits = self._batches if splits is None else splits
        with jax.set_mesh(self._program.mesh):
            return {split: self._sums(params, split, examples) for split in splits}

    def _sums(self, params: PyTree, split: str, examples: int | None) -> list[list[Sums]]:
        batches = self._batches[split]
        if examples is not None:
            batches = batches[: -(-examples // self._examples[split])]
        carry, measured = self._carry, []
        for batch in batches:
            sums, carry = self._measure(params, carry, self._program.place_whole(batch))
            measured.append(jax.device_get(sums))
        runs = zip(*(self._program.seed_batch.unstack(sums) for sums in measured), strict=True)
        return [list(run) for run in runs]

    def means(self, split: str, batches: Iterable[Sums]) -> Errors:
        """The mean metrics that the task reports, from the sums of all batches of a split."""
        return self._task.reported_metrics(split, self._with_loss(mean_errors(batches)))

    def _with_loss(self, errors: Errors) -> Errors:
        """Adds `loss`, the sum of several losses; puts common metrics first, for tables."""
        if "loss" not in errors:
            errors = {"loss": sum(errors[name] for name in self._program.learner.losses), **errors}
        common = ("loss", "token_error", "sequence_error")
        first = {name: errors[name] for name in common if name in errors}
        return first | errors


def mean_errors(batches: Iterable[Sums]) -> Errors:
    """The mean of each metric over batches: total sum by total weight, in float64.

    >>> mean_errors([{"loss": (6.0, 2.0)}, {"loss": (0.0, 1.0)}])
    {'loss': 2.0}
    """
    totals: dict[str, tuple[float, float]] = {}
    for batch in batches:
        for name, (value, weight) in batch.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = old[0] + float(value), old[1] + float(weight)
    return {
        name: value / weight if weight else math.nan for name, (value, weight) in totals.items()
    }


def _join(batch: Mapping[str, np.ndarray], times: int) -> dict[str, np.ndarray]:
    """Packs `times` sequences into each row, separated by different numbers in `segments`.

    >>> batch = {"inputs": np.array([[5, 6], [7, 8]]), "positions": np.array([[0, 1]])}
    >>> {name: x.tolist() for name, x in _join(batch, 2).items()}
    {'inputs': [[5, 6, 7, 8]], 'positions': [[0, 1, 0, 1]], 'segments': [[0, 0, 3, 3]]}
    """
    rows, length = batch["inputs"].shape[:2]
    # Documents count from 1, up to the length.
    segments_BL = batch.get("segments", np.zeros((rows, length), np.int32))
    segments_BL = segments_BL + (length + 1) * (np.arange(rows, dtype=np.int32) % times)[:, None]
    joined = {**batch, "segments": segments_BL}
    if len(joined["positions"]) == 1:
        joined["positions"] = np.tile(joined["positions"], (times, 1))
    return {name: x.reshape(-1, times * length) for name, x in joined.items()}
