"""What the commands share: errors in one line, workdirs, and a config made into a running experiment."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import rich.console
import rich.table
from absl import app, logging

from cope_jax import tasks
from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.evaluation.errors import Evaluator
from cope_jax.tasks import Task
from cope_jax.training.checkpoints import Checkpoints
from cope_jax.training.config import ExperimentConfig
from cope_jax.training.interruption import Interrupted
from cope_jax.training.learner import Learner, TrainState
from cope_jax.training.loop import Run
from cope_jax.training.optimizer import create_optimizer
from cope_jax.training.program import Program
from cope_jax.training.replicas import Replicas


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns what the user can mend into one line and an exit status: 2 for wrong input, 130 for an interruption."""
    try:
        yield
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`."""

    def guarded(argv: Sequence[str]) -> None:
        with clear_errors():
            if argv[1:]:
                raise ConfigError(f"unexpected argument {argv[1]!r}: all options are flags, see --help")
            main()

    def parse(argv: Sequence[str]) -> list[str]:
        from absl.flags import FLAGS, Error

        with clear_errors():
            try:
                return FLAGS(argv)
            except Error as error:
                raise _wrapped(error) or ConfigError(f"{error}; see --help") from None
            except (AttributeError, KeyError, TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
                # what reading a --config file and setting its fields can raise
                raise ConfigError(_one_line(error)) from error

    logging.set_verbosity(logging.WARNING)
    app.run(guarded, flags_parser=parse)


def _wrapped(error: BaseException | None) -> ConfigError | None:
    """The ConfigError that a --config file raised: the innermost, for the flag libraries wrap it, even in its own type."""
    found = None
    while error is not None:
        found = error if isinstance(error, ConfigError) else found
        error = error.__cause__ or error.__context__
    return found


def _one_line(error: BaseException) -> str:
    return " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())


def read_config(value: Any) -> ExperimentConfig:
    """The config that the --config flag holds; ConfigError if its file is missing, or its config is wrong."""
    try:
        mapping = value.to_dict()
    except (OSError, AttributeError) as error:  # a file that cannot be read shows only now
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(f"--config must name a file whose get_config() returns a ConfigDict ({reason})") from error
    return ExperimentConfig.from_mapping(mapping)


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
        jax.eval_shape(learner.logits, jax.eval_shape(learner.init, 0).params, tokens, jax.random.key(0))
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
        """The final errors on every split, sweep included, as results.json holds them."""
        common = {
            "task": self.config.task.name,
            "encoding": self.config.encoding,
            "step": step,
            "parameters": self.parameters(),
            "wall_seconds": seconds,
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


def open_workdir(workdir: Path, settings: dict[str, Any]) -> None:
    """Makes `workdir` the place of a run with these settings, kept in its config.json.

    Raises:
      ConfigError: it cannot be written to, or belongs to other settings.
    """
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, settings)
        elif not os.access(workdir, os.W_OK):
            raise PermissionError(13, "Permission denied")
        held = read_json(path)
    except OSError as error:
        raise ConfigError(f"cannot write to {workdir} ({error.strerror}): choose another --workdir") from error
    if held != json.loads(json.dumps(settings)):
        raise ConfigError(
            f"{workdir} holds a run with another {_difference(held, settings)}: "
            f"choose another --workdir, or the same config"
        )


def read_json(path: Path, *names: str) -> Any:
    """The content of a JSON file that holds these names; ConfigError if it is damaged."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not content.keys() >= set(names):
            raise ValueError(f"it must hold {' and '.join(names)}")
        return content
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): delete it, and the command makes it anew") from error


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def _difference(held: Any, wanted: Any, where: str = "") -> str:
    if isinstance(held, dict) and isinstance(wanted, dict):
        for name in [*wanted, *held]:
            if name not in held or name not in wanted or json.dumps(held[name]) != json.dumps(wanted[name]):
                return _difference(held.get(name), wanted.get(name), f"{where}.{name}" if where else name)
    return f"{where} ({json.dumps(held)}, not {json.dumps(wanted)})"


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
    settings = read_json(workdir / "config.json", "config", "seeds")
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
