"""The training loop: from a checkpoint or from scratch to the last step."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from tqdm import tqdm

from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.config import TrainingConfig
from cope_jax.training.interruption import Interrupted, Interruption
from cope_jax.training.learner import TrainState
from cope_jax.training.metrics import MetricsWriter
from cope_jax.training.program import Program

Evaluate = Callable[[TrainState, int], list[dict[str, Any]]]


@dataclasses.dataclass
class Run:
    """A run, or several side by side.

    Attributes:
      program: the compiled functions.
      seeds: one for each run of the program.
      config: steps and intervals.
      workdir: holds `checkpoints/`, `metrics.jsonl` and TensorBoard files.
      iterators: training data, one iterator for each seed.
      evaluate: rows for the learning curves, from a state and its step.
      label: stands before the progress bar.
    """

    program: Program
    seeds: Sequence[int]
    config: TrainingConfig
    workdir: Path
    iterators: Sequence[grain.DatasetIterator]
    evaluate: Evaluate
    label: str = "train"

    def train(self) -> tuple[TrainState, float]:
        """Trains to the last step, going on from the newest checkpoint if there is one.

        Returns:
          The final state, and the seconds spent on it over all interruptions.

        Raises:
          Interrupted: Ctrl-C or SIGTERM; a checkpoint is saved.
          ConfigError: a damaged checkpoint, or one of another model.
        """
        with Checkpoints(self.workdir / "checkpoints") as checkpoints, Interruption() as interruption:
            state, step, seconds = self._start(checkpoints)
            with MetricsWriter(self.workdir, step) as metrics, self._progress_bar(step) as bar:
                return self._train(state, step, seconds, checkpoints, metrics, bar, interruption)

    def _start(self, checkpoints: Checkpoints) -> tuple[TrainState, int, float]:
        init = self.program.init
        seeds = self.program.replicas.stack([np.int32(seed) for seed in self.seeds])
        step = checkpoints.latest()
        if step is None:
            return init(seeds), 0, 0.0
        state, progress = checkpoints.restore(jax.eval_shape(init, seeds))
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
        interruption: Interruption,
    ) -> tuple[TrainState, float]:
        config, size = self.config, self.config.steps_per_dispatch
        started = time.perf_counter() - seconds
        drawn = self._draw() if step < config.steps else None
        while drawn is not None:
            batches, places = drawn
            began = time.perf_counter()
            state, measured = self.program.train_steps(state, batches)
            step += size
            drawn = self._draw() if step < config.steps else None  # while the device computes
            rows = self._rows(step, jax.device_get(measured))
            metrics.write(rows)
            loss = float(np.mean([row["loss"] for row in rows]))
            speed = batches["inputs"].size / (time.perf_counter() - began)
            metrics.board(step, {"tokens_per_second": speed})
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update(size)
            last = step == config.steps
            if last or (config.evaluate_every and step % config.evaluate_every == 0):
                metrics.write(self.evaluate(state, step))
            if last or interruption.requested or step % config.checkpoint_every == 0:
                checkpoints.save(step, state, {"data": places, "seconds": time.perf_counter() - started})
            if interruption.requested:
                raise Interrupted(f"stopped at step {step} of {config.steps}; the same command goes on from there")
        return state, time.perf_counter() - started

    def _draw(self) -> tuple[Any, list[dict[str, Any]]]:
        """The batches of one dispatch, stacked, and the places of the iterators behind them."""
        stacked = []
        for iterator in self.iterators:
            drawn = [next(iterator) for _ in range(self.config.steps_per_dispatch)]
            stacked.append({name: np.stack([batch[name] for batch in drawn]) for name in drawn[0]})
        return self.program.replicas.stack(stacked), [iterator.get_state() for iterator in self.iterators]

    def _rows(self, step: int, measured: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        return [
            {"step": step, "seed": seed, **{name: float(np.mean(values)) for name, values in one.items()}}
            for seed, one in zip(self.seeds, self.program.replicas.unstack(measured), strict=True)
        ]

    def _progress_bar(self, step: int) -> Any:
        return tqdm(
            total=self.config.steps, initial=step, desc=self.label, unit="step", dynamic_ncols=True, smoothing=0.1
        )
