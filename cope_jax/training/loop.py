"""The training loop: from a checkpoint or from scratch to the last step."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from tqdm import tqdm

from cope_jax.array_types import PyTree
from cope_jax.errors import NonFiniteError
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.experiment_config import JobConfig, TrainingConfig
from cope_jax.training.learner import TrainState
from cope_jax.training.metrics import MetricsWriter
from cope_jax.training.preemption import GracefulStop, Interrupted
from cope_jax.training.profiling import Profile
from cope_jax.training.program import Program
from cope_jax.training.throughput import Throughput, describe

# After this many skipped steps in a row, a run stops even if it may skip.
MAX_CONSECUTIVE_SKIPS = 100

Evaluate = Callable[[TrainState, int], list[dict[str, Any]]]


@dataclasses.dataclass
class Run:
    """A run of one seed, or of several side by side.

    Attributes:
      program: the compiled functions.
      seeds: as many as the program trains.
      config: steps and intervals.
      workdir: contains `checkpoints/`, `metrics.jsonl` and TensorBoard files.
      iterators: training data, one iterator for each seed, of the rows that this process needs.
      evaluate: rows for the learning curves, from a state and its step; the loss in the first row of each seed decides
        which checkpoints are best.
      throughput: measures speeds.
      job: what may change when the run resumes.
      profile: steps to profile.
      label: shown before the progress bar.
      start: parameters that a run from scratch uses instead of initialised ones, as `Program.init` accepts them.
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
    label: str = "train"
    start: Callable[[], PyTree] = dict
    _lost: dict[int, int] = dataclasses.field(default_factory=dict, init=False)

    def train(self) -> tuple[TrainState, float]:
        """Trains to the last step, resuming from the newest checkpoint if there is one.

        Returns:
          The final state, and the seconds spent on it over all interruptions.

        Raises:
          Interrupted: Ctrl-C or SIGTERM; a checkpoint is saved.
          ConfigError: no checkpoint can be read, or the newest is of another model.
          StorageError: the disk is full or read-only.
          NonFiniteError: a loss, gradient or update is not finite, and the job says to stop, or too many steps in a row
            were skipped.
        """
        with contextlib.ExitStack() as stack:
            checkpoints = Checkpoints(self.workdir / "checkpoints", self.job.keep, self.job.keep_best)
            stack.enter_context(checkpoints)
            stop = stack.enter_context(GracefulStop())
            state, step, seconds = self._start(checkpoints)
            metrics = stack.enter_context(MetricsWriter(self.workdir, step, active=jax.process_index() == 0))
            bar = tqdm(
                total=self.config.steps,
                initial=step,
                desc=self.label,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.1,
                disable=jax.process_index() != 0,
            )
            stack.enter_context(bar)
            if self.profile is not None:
                stack.enter_context(self.profile)
            return self._train(state, step, seconds, checkpoints, metrics, bar, stop)

    def _start(self, checkpoints: Checkpoints) -> tuple[TrainState, int, float]:
        restored = checkpoints.restore(self.program.state_shapes(), self.program.learner.model)
        if restored is None:
            return self.program.init(self.seeds, self.start()), 0, 0.0
        step, state, progress = restored
        for iterator, place in zip(self.iterators, progress["data"], strict=True):
            iterator.set_state(place)
        return state, step, progress["seconds"]

    def _train(
        self,
        state: TrainState,
        step: int,
        seconds: float,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
        bar: Any,
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
            drawn = self._draw() if step + size < config.steps else None  # while the device computes
            rows, losses = self._rows(step, jax.device_get(measured))
            speeds = self.throughput.dispatched(size)
            step += size
            metrics.write(rows)
            metrics.board(step, speeds)
            shown = filter(None, (f"loss {np.mean(losses):.3f}", describe(speeds)))
            bar.set_postfix_str(", ".join(shown), refresh=False)
            if step == first + size:
                _start_clock(bar, step)
            else:
                bar.update(size)
            last, score = step == config.steps, None
            if last or (config.evaluate_every and step % config.evaluate_every == 0):
                curve = self.evaluate(state, step)
                metrics.write(curve)
                score = float(np.mean([next(row["loss"] for row in curve if row["seed"] == s) for s in self.seeds]))
            requested = stop.requested()
            if last or requested or step % config.checkpoint_every == 0:
                progress = {"data": indices, "seconds": time.perf_counter() - started}
                metrics.sync()
                checkpoints.save(step, state, progress, score)
            if requested:
                checkpoints.wait()
                message = f"stopped at step {step} of {config.steps}; rerun the same command to resume"
                raise Interrupted(message, stop.number or 0)
        return state, time.perf_counter() - started

    def _draw(self) -> tuple[Any, list[dict[str, Any]]]:
        """The batches of one dispatch, stacked and on the devices, and the states of the iterators after them."""
        stacked = []
        for iterator in self.iterators:
            drawn = [next(iterator) for _ in range(self.config.steps_per_dispatch)]
            stacked.append({name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]})
        batches = self.program.place(self.program.seed_batch.stack(stacked), self.config.batch_size)
        return batches, [iterator.get_state() for iterator in self.iterators]

    def _rows(self, step: int, measured: dict[str, np.ndarray]) -> tuple[list[dict[str, Any]], list[float]]:
        """The rows of a dispatch that began at `step`, one for each seed, and their losses."""
        rows, losses = [], []
        for seed, one in zip(self.seeds, self.program.seed_batch.unstack(measured), strict=True):
            finite = one.pop("finite") == 1
            skipped = step + 1 + np.flatnonzero(~finite)
            self._lost[seed] = 0 if finite.any() else self._lost.get(seed, 0) + len(skipped)
            stuck = self._lost[seed] >= MAX_CONSECUTIVE_SKIPS
            if skipped.size and (self.job.on_non_finite == "stop" or stuck):
                at = skipped[0] - step - 1
                others = "" if stuck else "skip such updates with --config.job.on_non_finite=skip, or "
                raise NonFiniteError(
                    f"step {skipped[0]} (seed {seed}, batch {skipped[0]} of its data) has loss {one['loss'][at]:g}, "
                    f"gradient norm {one['grad_norm'][at]:g} and update norm {one['update_norm'][at]:g}"
                    f"{f', one of {self._lost[seed]} steps in a row' if stuck else ''}: saved checkpoints are intact; "
                    f"{others}lower optimizer.learning_rate in a new workdir"
                )
            if skipped.size and jax.process_index() == 0:
                warning = f"warning: loss, gradient or update of seed {seed} is not finite: skipped steps {skipped}"
                tqdm.write(warning, sys.stderr)
            means = {name: float(np.mean(values[finite])) if finite.any() else None for name, values in one.items()}
            row: dict[str, Any] = {"step": step + self.config.steps_per_dispatch, "seed": seed, **means}
            rows.append(row | ({"skipped": skipped.tolist()} if skipped.size else {}))
            losses.append(np.nan if means["loss"] is None else means["loss"])
        return rows, losses


def _start_clock(bar: Any, step: int) -> None:
    """Starts the bar's rate and remaining time here, because what came before was compilation."""
    bar.n = bar.initial = bar.last_print_n = step
    bar.start_t = bar.last_print_t = time.time()
    bar.refresh()
