"""What the commands share: a config made into a running experiment, and a run read back."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import rich.console
import rich.table

from cope_jax import tasks
from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.evaluation.errors import Evaluator
from cope_jax.tasks import Task
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.learner import Learner, TrainState
from cope_jax.training.loop import Run
from cope_jax.training.optimizer import create_optimizer
from cope_jax.training.program import Program
from cope_jax.training.replicas import Replicas
from experiments.workdir import read_settings


class Experiment:
    """A config made into objects, compiled once for all seeds.

    Args:
      config: the experiment.
      width: seeds trained side by side.
    """

    def __init__(self, config: ExperimentConfig, width: int = 1):
        self.config = config
        self.task = tasks.create(config.task.name, **config.task.options)
        self.learner = create_learner(config, self.task)
        self.replicas = Replicas(width)
        self.program = Program(self.learner, self.replicas)
        evaluation = config.evaluation
        splits = dict.fromkeys(self.task.evaluation_splits, evaluation.examples)
        if evaluation.sweep_examples:
            splits |= {split: evaluation.sweep_examples for _, split in self.task.sweep}
        self.evaluator = Evaluator(
            self.task,
            self.learner.logits,
            self.learner.sample_positions,
            self.replicas.lift,
            splits,
            batch_size=evaluation.batch_size,
            data_seed=config.training.data_seed,
            data_dir=config.training.data_dir,
        )

    @staticmethod
    def check(config: ExperimentConfig) -> None:
        """Raises ConfigError for what is wrong with a config, without compiling anything."""
        task = tasks.create(config.task.name, **config.task.options)
        learner = create_learner(config, task)
        tokens = jax.ShapeDtypeStruct((1, task.max_length), jax.numpy.int32)
        positions_BL = learner.sample_positions(jax.random.key(0), 1, task.max_length)
        params = jax.eval_shape(learner.init, 0).params
        jax.eval_shape(lambda params, tokens: learner.logits(params, tokens, positions_BL), params, tokens)
        if config.training.data_dir is not None:
            create_iterator(config, task, 0)

    def parameters(self) -> int:
        """The number of parameters of one model."""
        params = jax.eval_shape(self.learner.init, 0).params
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    def train(self, seeds: Sequence[int], workdir: Path, label: str) -> list[dict[str, Any]]:
        """Trains the seeds side by side in `workdir`, going on from what is there, and measures them.

        Returns:
          A record for each seed, split and metric.
        """
        training = self.config.training
        iterators = [create_iterator(self.config, self.task, seed) for seed in seeds]
        state, seconds = Run(
            self.program,
            seeds,
            training,
            workdir,
            iterators,
            lambda state, step: self._curve(seeds, state, step),
            label,
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
            for split, runs in self.evaluator(state.params).items()
            for seed, errors in zip(seeds, runs, strict=True)
            for metric, value in dataclasses.asdict(errors).items()
        ]

    def _curve(self, seeds: Sequence[int], state: TrainState, step: int) -> list[dict[str, Any]]:
        measured = self.evaluator(state.params, self.task.evaluation_splits, self.config.evaluation.curve_examples)
        return [
            {"step": step, "seed": seed, "split": split, **dataclasses.asdict(errors)}
            for split, runs in measured.items()
            for seed, errors in zip(seeds, runs, strict=True)
        ]


def print_errors(task: Task, records: Sequence[dict[str, Any]]) -> None:
    """Prints the errors of each seed on the fixed splits, in percent."""
    table = rich.table.Table("seed", "split", "token error %", "sequence error %", "loss")
    for seed in dict.fromkeys(record["seed"] for record in records):
        for split in task.evaluation_splits:
            values = {r["metric"]: r["value"] for r in records if r["split"] == split and r["seed"] == seed}
            errors = (f"{100 * values[metric]:.2f}" for metric in ("token_error", "sequence_error"))
            table.add_row(str(seed), split, *errors, f"{values['loss']:.4f}")
    rich.console.Console().print(table)


def create_learner(config: ExperimentConfig, task: Task) -> Learner:
    """The pure functions of the experiment."""
    optimizer = create_optimizer(config.optimizer, config.training.steps)
    return Learner(config.decoder(task), optimizer, config.training.positions)


def create_iterator(config: ExperimentConfig, task: Task, seed: int) -> grain.DatasetIterator:
    """The training data of the run with this seed."""
    training = config.training
    return pipeline.train_iterator(
        task,
        batch_size=training.batch_size,
        examples=training.examples,
        data_seed=training.data_seed,
        shuffle_seed=seed,
        data_dir=training.data_dir,
    )


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run read back from its workdir.

    Attributes:
      config: what it was trained with.
      seeds: of the runs side by side.
      step: of the newest checkpoint.
      state: the training state.
      params: of each seed.
    """

    config: ExperimentConfig
    task: Task
    learner: Learner
    seeds: Sequence[int]
    step: int
    state: TrainState
    params: list[Any]
    seconds: float


def load_run(workdir: Path) -> LoadedRun:
    """Reads back the newest checkpoint of a training run.

    Raises:
      ConfigError: there is none.
    """
    if not (workdir / "config.json").exists() or not (workdir / "checkpoints").exists():
        raise ConfigError(
            f"{workdir} holds no training run: give the --workdir of experiments.train, or a cell of compare"
        )
    settings = read_settings(workdir)
    if "seeds" not in settings:
        raise ConfigError(f"{workdir} holds a comparison: give one of the folders in its cells/ENCODING")
    config = ExperimentConfig.from_mapping(settings["config"])
    task = tasks.create(config.task.name, **config.task.options)
    learner = create_learner(config, task)
    program = Program(learner, Replicas(len(settings["seeds"])))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ConfigError(f"{workdir} has no checkpoint yet: train it first")
        seeds = program.replicas.stack([jax.numpy.int32(seed) for seed in settings["seeds"]])
        state, progress = checkpoints.restore(jax.eval_shape(program.init, seeds))
    params = program.replicas.unstack(state.params)
    return LoadedRun(config, task, learner, settings["seeds"], step, state, params, progress["seconds"])
