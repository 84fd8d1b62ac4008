"""A config made into a running experiment: task, model, program, data and evaluator."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from cope_jax import tasks
from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from cope_jax.models.base import attends
from cope_jax.tasks import Task
from cope_jax.training import summary
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.evaluator import Errors, Evaluator
from cope_jax.training.learner import Learner, TrainState
from cope_jax.training.loop import Run
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.profiling import Profile
from cope_jax.training.program import Program
from cope_jax.training.seed_batch import Replicas
from cope_jax.training.sharding import LENGTH, check_sizes, create_mesh, layout_of
from cope_jax.training.throughput import Meter
from cope_jax.typing import PyTree


class Experiment:
    """A config made into objects, compiled once for all seeds.

    Args:
      config: the experiment.
      width: seeds trained side by side.
      task: of the config, where it is there already; None: made from the config.
    """

    def __init__(self, config: ExperimentConfig, width: int = 1, task: Task | None = None):
        self.config = config
        self.task = tasks.create(config.task.name, **config.task.options) if task is None else task
        self.program = create_program(config, self.task, width)
        self.learner = self.program.learner
        self.replicas = self.program.replicas
        evaluation = config.evaluation
        splits = dict.fromkeys(self.task.evaluation_splits, evaluation.examples)
        if evaluation.sweep_examples:
            splits |= self.task.sweep_examples(evaluation.sweep_examples)
        self.evaluator = Evaluator(
            self.program,
            self.task,
            splits,
            batch_size=evaluation.batch_size,
            data_seed=config.training.data_seed,
            data_dir=config.training.data_dir,
        )

    @staticmethod
    def check(config: ExperimentConfig, task: Task | None = None) -> None:
        """Raises ConfigError for what is wrong with a config, without compiling anything."""
        task = tasks.create(config.task.name, **config.task.options) if task is None else task
        params = create_program(config, task).state_shapes().params
        learner = create_learner(config, task)  # without the mesh, whose devices a single sequence is not enough for
        # Of those that are equally long the last, since the first, of training, may take long to read.
        longest = max((*reversed(task.splits), *(split for _, split in task.sweep)), key=task.length)
        batch = batch_shapes(task, 1, longest)
        carry = learner.initial_carry(1)
        if jax.tree.leaves(carry) and task.stream("train", config.training.batch_size) is None:
            raise ConfigError(
                f"{config.model.name} carries its state from batch to batch, and the examples of {task.name} do not "
                f"follow one another: choose a task of running text, such as words"
            )
        if "positions" in batch and config.training.positions != "consecutive":
            raise ConfigError(
                f"the batches of {task.name} have positions of their own with these options: leave training.positions "
                f"and training.max_position out"
            )
        positions_BL = learner.with_positions(jax.random.key(0), batch)["positions"]
        try:
            jax.eval_shape(
                lambda params, batch: learner.measures(params, carry, {"positions": positions_BL, **batch}),
                params,
                batch,
            )
        except KeyError as error:
            if error.args[0] in batch:
                raise
            raise ConfigError(
                f"the model {config.model.name} needs {error.args[0]!r} in its batches, which the task {task.name} "
                f"does not give with these options"
            ) from error
        if config.training.data_dir is not None:
            create_iterator(config, task, 0)

    def parameters(self) -> int:
        """The number of parameters of one model."""
        params = jax.eval_shape(self.learner.init, np.int32(0)).params
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def train(
        self,
        seeds: Sequence[int],
        workdir: Path,
        label: str,
        profile: Profile | None = None,
        start: Callable[[], PyTree] = dict,
    ) -> list[dict[str, Any]]:
        """Trains the seeds side by side in `workdir`, going on from what is there, and measures them.

        Args:
          seeds: one for each run.
          workdir: of the runs.
          label: stands before the progress bar.
          profile: steps to profile.
          start: see `Run`.

        Returns:
          A record for each seed, split and metric.
        """
        training = self.config.training
        rows = self.program.rows(training.batch_size)
        state, seconds = Run(
            self.program,
            seeds,
            training,
            workdir,
            [create_iterator(self.config, self.task, seed, rows) for seed in seeds],
            lambda state, step: self._curve(seeds, state, step),
            self.meter(),
            self.config.job,
            profile,
            label,
            start,
        ).train()
        return self.records(seeds, state, training.steps, seconds)

    def records(self, seeds: Sequence[int], state: TrainState, step: int, seconds: float) -> list[dict[str, Any]]:
        """The final errors on every split, sweep included, as results.json holds them.

        Seeds side by side share the seconds equally.
        """
        common = {
            "task": self.config.task.name,
            "encoding": self.config.encoding,
            "step": step,
            "parameters": self.parameters(),
            "wall_seconds": seconds / len(seeds),
        }
        return [
            {**common, "seed": seed, "split": split, "metric": metric, "value": value}
            for split, runs in self._measure(state).items()
            for seed, errors in zip(seeds, runs, strict=True)
            for metric, value in errors.items()
        ]

    def summary(self) -> str:
        """What is about to run: every parameter and where it lies, the devices, and what a step costs."""
        state, length = self.program.state_shapes(), self.task.length("train")
        job = summary.job_table(
            state,
            self.program.mesh,
            batch_size=self.config.training.batch_size * self.replicas.width,
            length=length,
            flops_per_token=self.learner.model.flops_per_token(length),
        )
        model, training = self.config.model, self.config.training
        facts = [f"accumulate {training.accumulate}"]
        if attends(model):
            facts = [model.block.compute_dtype, f"remat {model.remat}", *facts]
        job.add_row("step", ", ".join(facts))
        if self.task.origin():
            job.add_row("data", self.task.origin())
        return summary.summarise(state.params, job)

    def meter(self) -> Meter:
        """What measures the speed of a run."""
        training, mesh = self.config.training, self.program.mesh
        length = self.task.length("train")
        return Meter(
            tokens_per_step=training.batch_size * length * self.replicas.width,
            flops_per_token=self.learner.model.flops_per_token(length),
            devices=mesh.devices.flat,
            peak=self.config.job.peak_flops,
        )

    def _measure(self, state: TrainState, *args: Any) -> dict[str, list[Errors]]:
        return self.evaluator(state.params, *args)

    def _curve(self, seeds: Sequence[int], state: TrainState, step: int) -> list[dict[str, Any]]:
        measured = self._measure(state, self.task.evaluation_splits, self.config.evaluation.curve_examples)
        return [
            {"step": step, "seed": seed, "split": split, **errors}
            for split, runs in measured.items()
            for seed, errors in zip(seeds, runs, strict=True)
        ]


def batch_shapes(task: Task, rows: int, split: str = "train") -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of `split` with so many rows looks like."""
    example = task.sample(np.random.default_rng(0), 1, split)
    return {name: jax.ShapeDtypeStruct((rows, *field.shape[1:]), field.dtype) for name, field in example.items()}


def create_learner(config: ExperimentConfig, task: Task, layout: Layout = WHOLE) -> Learner:
    """The pure functions of the experiment."""
    training = config.training
    return Learner(
        model=config.model_config(task, layout),
        optimizer=create_optimizer(config.optimizer, training.steps),
        schedule=create_schedule(config.optimizer, training.steps),
        max_position=config.max_position(task),
        sampler=training.positions,
        batch_size=training.batch_size,
        accumulate=training.accumulate,
    )


def create_program(
    config: ExperimentConfig, task: Task, width: int = 1, devices: Sequence[Any] | None = None
) -> Program:
    """The training program of the experiment, on the mesh that its job asks for.

    Args:
      config: the experiment.
      task: its task.
      width: seeds side by side.
      devices: None: all that there are.

    Raises:
      ConfigError: the mesh does not fit the devices, or the sizes of the experiment.
    """
    mesh = create_mesh(config.job.mesh, devices)
    training = config.training
    check_sizes(
        mesh,
        getattr(config.model, "block", None),
        {
            "training.batch_size / accumulate": training.batch_size // training.accumulate,
            "evaluation.batch_size": config.evaluation.batch_size,
        },
    )
    learner = create_learner(config, task, layout_of(mesh))
    carry = jax.eval_shape(lambda: learner.initial_carry(training.batch_size))
    if mesh.shape[LENGTH] > 1 and jax.tree.leaves(carry):
        raise ConfigError(f"{config.model.name} reads word after word: leave job.mesh.sequence at 1")
    return Program(learner, Replicas(width), mesh)


def create_iterator(
    config: ExperimentConfig, task: Task, seed: int, rows: Sequence[int] | np.ndarray | None = None
) -> grain.DatasetIterator:
    """The training data of the run with this seed, or some rows of each batch."""
    training = config.training
    return pipeline.train_iterator(
        task,
        batch_size=training.batch_size,
        examples=training.examples,
        data_seed=training.data_seed,
        shuffle_seed=seed,
        data_dir=training.data_dir,
        rows=rows,
        readers=training.readers,
    )
