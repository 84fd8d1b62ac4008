"""Runs the training loop, from a checkpoint or from scratch, to the last step."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from cope_jax.array_types import PyTree
from cope_jax.errors import Interrupted, NonFiniteError
from cope_jax.progress import Progress
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.training.experiment_config import JobConfig, TrainingConfig
from cope_jax.training.learner import TrainState
from cope_jax.training.metrics import MetricsWriter, headline
from cope_jax.training.preemption import GracefulStop
from cope_jax.training.profiling import Profile
from cope_jax.training.program import Program
from cope_jax.training.throughput import Throughput, describe

# After this many skipped steps in a row, a run stops even if it may skip.
MAX_CONSECUTIVE_SKIPS = 100

Evaluate = Callable[[TrainState, int], list[dict[str, Any]]]


@dataclasses.dataclass
class Run:
    """Trains one seed, or several side by side, and saves checkpoints.

    Attributes:
      program: the compiled functions.
      seeds: the seeds to train, as many as the program trains side by side.
      config: steps and intervals.
      workdir: contains `checkpoints/`, `metrics.jsonl` and TensorBoard files.
      iterators: iterators over training batches, one for each seed; a batch has the rows that this
        process needs.
      evaluate: computes rows for the learning curves from a state and its step. The loss in the
        first row of each seed decides which checkpoints are best.
      throughput: measures speeds.
      job: settings that may change when the run resumes.
      profile: steps to profile; None profiles nothing.
      label: the name of the run in its first printed line; "" prints no name.
      metric: the metric that is printed after each evaluation.
      recipe: the settings of the run, for TensorBoard or another tracker.
      start: returns parameters that a new run uses instead of initialised parameters: see
        `Program.init`.
    """

    program: Program
    seeds: Sequence[int]
    config: TrainingConfig
    workdir: Path
    iterators: Sequence[grain.DatasetIterator]
    evaluate: Evaluate
    throughput: Throughput
    job: JobConfig = JobConfig()
    profile: Profile | None = None
    label: str = ""
    metric: str = "loss"
    recipe: Any = None
    start: Callable[[], PyTree] = dict
    _lost: dict[int, int] = dataclasses.field(default_factory=dict, init=False)

    def train(self) -> tuple[TrainState, float]:
        """Trains to the last step, resuming from the newest checkpoint if there is one.

        Returns:
          The final state, and the seconds of training, including those before interruptions.

        Raises:
          Interrupted: Ctrl-C or SIGTERM stopped the run; a checkpoint is saved.
          ConfigError: there are checkpoints, but none can be read, or the newest belongs to another
            model.
          StorageError: the disk is full or read-only.
          NonFiniteError: a loss, gradient or update is not finite. If `job.on_non_finite` is
            "skip", this error is raised only after too many skipped steps in a row.
        """
        # Outside of all else, because closing the checkpoints waits for the disk, and a signal may
        # come then too.
        with GracefulStop(later=True) as stop:
            trained = self._until_saved(stop)
            if stop.requested():
                raise Interrupted(
                    "stopped after the last step; rerun the same command to measure the model",
                    stop.number or 0,
                )
            return trained

    def _until_saved(self, stop: GracefulStop) -> tuple[TrainState, float]:
        """Trains to the last step, and waits until the last checkpoint is on disk."""
        with contextlib.ExitStack() as stack:
            folder, job = self.workdir / "checkpoints", self.job
            checkpoints = Checkpoints(folder, job.keep, job.keep_best)
            stack.enter_context(checkpoints)
            restored = checkpoints.restore(self.program.state_shapes())
            step = restored[0] if restored else 0
            first = jax.process_index() == 0
            metrics = stack.enter_context(
                MetricsWriter(self.workdir, step, self.seeds, self.recipe, first, self.job.tracker)
            )
            bar = stack.enter_context(Progress(self.config.steps, "step", done=step, active=first))
            ended = step >= self.config.steps
            done = f"has all {step:,} steps" if ended else f"resumes from step {step:,}"
            if heading := ": ".join(filter(None, (self.label, done if step else ""))):
                bar.write(heading)
            if not ended:
                bar.compiling()
            state, seconds = self._start(restored)
            if self.profile is not None:
                stack.enter_context(self.profile)
            return self._train(state, step, seconds, checkpoints, metrics, bar, stop)

    def _start(
        self, restored: tuple[int, TrainState, dict[str, Any]] | None
    ) -> tuple[TrainState, float]:
        """Returns the state of a checkpoint, or a new one, and the seconds of training so far.

        Also restores how many steps in a row the end of the checkpoint's run has skipped.
        """
        if restored is None:
            self._lost = dict.fromkeys(self.seeds, 0)
            return self.program.init(self.seeds, self.start()), 0.0
        _, state, progress = restored
        # Checkpoints of earlier versions do not have the number of steps skipped in a row.
        lost = progress.get("skipped_in_a_row", [0] * len(self.seeds))
        self._lost = dict(zip(self.seeds, lost, strict=True))
        for iterator, data_state in zip(self.iterators, progress["data"], strict=True):
            iterator.set_state(data_state)
        return state, progress["seconds"]

    def _train(
        self,
        state: TrainState,
        step: int,
        seconds: float,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        bar: Progress,
        stop: GracefulStop,
    ) -> tuple[TrainState, float]:
        config, size, first = self.config, self.config.steps_per_dispatch, step
        started = time.perf_counter() - seconds
        drawn = self._draw() if step < config.steps else None
        while drawn is not None:
            batches, indices = drawn
            if self.profile is not None:
                self.profile.at(step, size)
            self.throughput.start()
            with jax.transfer_guard("disallow"):
                state, measured = self.program.train_steps(state, batches)
            stop.begin()
            # Drawn while the device computes.
            drawn = self._draw() if step + size < config.steps else None
            rows, losses = self._rows(step, jax.device_get(measured), bar)
            speeds = self.throughput.dispatched(size)
            step += size
            metrics.write(rows)
            metrics.board(step, speeds)
            shown = filter(None, (f"loss {np.mean(losses):.3f}", describe(speeds)))
            (bar.start_clock if step == first + size else bar.advance)(size, ", ".join(shown))
            last, score = step == config.steps, None
            if last or (config.evaluate_every and step % config.evaluate_every == 0):
                curve = self.evaluate(state, step)
                metrics.write(curve)
                bar.write(f"step {step:,}: {headline(curve, self.metric)}")
                firsts = [
                    next(row["loss"] for row in curve if row["seed"] == s) for s in self.seeds
                ]
                score = float(np.mean(firsts))
            requested = stop.requested()
            if last or requested or step % config.checkpoint_every == 0:
                progress = {
                    "data": indices,
                    "seconds": time.perf_counter() - started,
                    "skipped_in_a_row": [self._lost[seed] for seed in self.seeds],
                }
                metrics.sync()
                checkpoints.save(step, state, progress, score)
            if requested:
                checkpoints.wait()
                at = f"step {step} of {config.steps}"
                message = f"stopped at {at}; rerun the same command to resume"
                raise Interrupted(message, stop.number or 0)
        return state, time.perf_counter() - started

    def _draw(self) -> tuple[Any, list[dict[str, Any]]]:
        """Returns the batches of a dispatch, on devices, and the iterators' states after it."""
        stacked = []
        for iterator in self.iterators:
            drawn = [next(iterator) for _ in range(self.config.steps_per_dispatch)]
            stacked.append({name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]})
        batches = self.program.place(self.program.seed_batch.stack(stacked), self.config.batch_size)
        return batches, [iterator.get_state() for iterator in self.iterators]

    def _rows(
        self, step: int, measured: dict[str, np.ndarray], bar: Progress
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Returns the metrics of the dispatch from `step` on: a row and a loss for each seed."""
        rows, losses = [], []
        for seed, series in zip(self.seeds, self.program.seed_batch.unstack(measured), strict=True):
            finite = series.pop("finite") == 1
            skipped = step + 1 + np.flatnonzero(~finite)
            if (at := self._last(seed, finite)) is not None:
                skips, number = self.job.on_non_finite == "skip", step + 1 + at
                others = "skip such updates with --config.job.on_non_finite=skip, or "
                raise NonFiniteError(
                    f"step {number} (seed {seed}, batch {number} of its data) has loss {series['loss'][at]:g}, "
                    f"gradient norm {series['grad_norm'][at]:g} and update norm {series['update_norm'][at]:g}"
                    f"{f', the last of {self._lost[seed]} steps in a row' if skips else ''}; saved checkpoints are "
                    f"intact: {'' if skips else others}lower optimizer.learning_rate in a new workdir"
                )
            if skipped.size:
                bar.write(
                    f"warning: loss, gradient or update of seed {seed} is not finite: skipped steps {skipped}"
                )
            some = finite.any()
            means = {
                name: float(np.mean(x[finite])) if some else None for name, x in series.items()
            }
            row: dict[str, Any] = {"step": step + self.config.steps_per_dispatch, "seed": seed}
            row |= means
            rows.append(row | ({"skipped": skipped.tolist()} if skipped.size else {}))
            losses.append(np.nan if means["loss"] is None else means["loss"])
        return rows, losses

    def _last(self, seed: int, finite: np.ndarray) -> int | None:
        """The index of the step that ends the run, None if none does; counts skips in a row."""
        most = MAX_CONSECUTIVE_SKIPS if self.job.on_non_finite == "skip" else 1
        for index, done in enumerate(finite):
            self._lost[seed] = 0 if done else self._lost[seed] + 1
            if self._lost[seed] >= most:
                return index
        return None
