"""Creates an experiment from a config, which trains in a workdir and measures its models."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cope_jax.array_types import PyTree
from cope_jax.errors import ConfigError
from cope_jax.models.model import attends
from cope_jax.registry import check_seeds, checked
from cope_jax.runs import records as recording
from cope_jax.runs import warm_start
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import LoadedRun, load_run
from cope_jax.runs.records import Record
from cope_jax.runs.workdir import Workdir
from cope_jax.storage.checkpoint_io import step_of
from cope_jax.storage.files import write_atomically
from cope_jax.storage.mirror import shown
from cope_jax.tasks import Task
from cope_jax.training import processes, summary
from cope_jax.training.evaluator import Evaluator, Sums
from cope_jax.training.experiment_config import EvaluationConfig, ExperimentConfig
from cope_jax.training.from_config import (
    batch_shapes,
    create_iterator,
    create_learner,
    create_program,
)
from cope_jax.training.learner import TrainState
from cope_jax.training.loop import Run
from cope_jax.training.profiling import Profile
from cope_jax.training.program import Program
from cope_jax.training.throughput import Throughput, peak_memory


class Experiment:
    """A task, a model and its training program, made from a config and compiled once for all seeds.

    >>> import cope_jax as cj
    >>> experiment = cj.Experiment(cj.config("quick", encoding="rope", task={"options": {"num_tokens": 4}}))
    >>> experiment.task.name, experiment.label
    ('selective_copy', 'decoder, rope')

    `experiment.train("runs/rope")` then trains the model, and `experiment.evaluate("runs/rope")`
    measures it again. Several seeds train side by side in one program. `task` is the task of the
    config, if the caller has already created it. If `task` is None, the task is created here.

    Raises:
      ConfigError: the settings of the config do not fit each other, or do not fit these devices.
    """

    def __init__(self, config: ExperimentConfig, task: Task | None = None):
        if not isinstance(config, ExperimentConfig):
            raise ConfigError(
                f"Experiment needs a config, got a {type(config).__name__}: pass cj.config(name)"
            )
        checked(task, Task | None, "task")
        self.config = config
        self.task = config.task.create() if task is None else task
        self.program = create_program(config, self.task)
        self.learner = self.program.learner
        _check(config, self.task)
        self._examples = _examples(config.evaluation, self.task)
        self._compiled: dict[int, tuple[Program, Evaluator]] = {}

    @staticmethod
    def check(config: ExperimentConfig, task: Task | None = None) -> None:
        """Raises ConfigError if a config is wrong; compiles nothing and samples no training data."""
        task = config.task.create() if task is None else task
        create_program(config, task)
        _check(config, task)

    def _side_by_side(self, width: int) -> tuple[Program, Evaluator]:
        """The program and the evaluator of `width` seeds, created once."""
        if width not in self._compiled:
            program = self.program if width == 1 else create_program(self.config, self.task, width)
            evaluator = Evaluator(
                program,
                self.task,
                self._examples,
                batch_size=self.config.evaluation.batch_size,
                data_seed=self.config.training.data_seed,
                data_dir=self.config.training.data_dir,
            )
            self._compiled[width] = program, evaluator
        return self._compiled[width]

    def parameters(self) -> int:
        """The number of parameters of one model."""
        params = jax.eval_shape(self.learner.init, np.int32(0)).params
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    @property
    def label(self) -> str:
        """The names of the model and of its encoding, and what else is special about the model."""
        model = self.config.model
        encoding = self.config.encoding if attends(model) else ""
        return ", ".join(filter(None, (model.name, encoding, self.config.variant)))

    def train(
        self,
        workdir: str | Path,
        seeds: Sequence[int] = (0,),
        *,
        label: str | None = None,
        fields: Mapping[str, Any] | None = None,
        environment: Record | None = None,
        profile: Profile | None = None,
        verbose: bool = False,
    ) -> list[Record]:
        """Trains one model per seed, side by side in `workdir`, and measures the models.

        If `workdir` has checkpoints, training resumes from the newest one. The workdir contains
        config.json, environment.json, checkpoints, metrics.jsonl, the files that the task made from
        its data, and at the end result.json with the returned records. With several processes, all
        processes write checkpoints; only the first process writes the other files.

        Args:
          workdir: created if missing. Only one run at a time may use it.
          seeds: distinct whole numbers below 2³¹; each seed decides initial parameters, order of
            data and dropout of one model.
          label: the name of the run in its first printed line; None means the names of the model
            and the encoding.
          fields: additional fields of every record.
          environment: versions and commit to save with the run; None means the current ones.
          profile: steps to profile; None profiles nothing.
          verbose: True prints a few facts about a new run, and writes all facts to summary.txt.

        Returns:
          A record for each seed, split and metric: see `cope_jax.runs.records`.

        Raises:
          ConfigError: the folder belongs to other settings or data, or the model to start from does
            not fit.
          Interrupted: Ctrl-C or SIGTERM stopped the run. A checkpoint is saved, and the same call
            resumes from it.
        """
        checked(seeds, Sequence | np.ndarray, "seeds")
        seeds = [checked(seed, int, "seeds") for seed in seeds]
        check_seeds(tuple(seeds), "Experiment.train")
        folder = Workdir(workdir)
        program, evaluator = self._side_by_side(len(seeds))
        workdirs.check_alike(self.task)
        start = functools.cache(self._start)
        # Before anything is written, because that model may not fit.
        if not folder.has_checkpoints():
            start()
        with contextlib.ExitStack() as stack:
            with processes.first_goes_ahead() as first:
                if first:
                    environment = recording.environment() if environment is None else environment
                    stack.enter_context(folder.locked())
                    job = {"job": dataclasses.asdict(self.config.job)}
                    folder.open(self.config, seeds, environment | job)
                    folder.keep_files(self.task)
                    if verbose:
                        self._announce(folder.path, len(seeds))
            folder.follow_first()
            rows = program.rows(self.config.training.batch_size)
            run = Run(
                program,
                seeds,
                self.config.training,
                folder.path,
                iterators=[create_iterator(self.config, self.task, seed, rows) for seed in seeds],
                evaluate=functools.partial(self._curve, evaluator, seeds),
                throughput=self.throughput(len(seeds)),
                job=self.config.job,
                # Only in the first process: all do the same work, and several on a host would write
                # the same file.
                profile=profile if first else None,
                label=label or self.label,
                metric=self.task.metric,
                recipe=self.config.recipe(),
                start=start,
            )
            state, seconds = run.train()
            records = self.records(seeds, state.params, self.config.training.steps, seconds)
            memory = round(peak_memory(program.mesh.devices.flat), 3)
            extra = {"memory_gib": memory, **(fields or {})}
            records = [{**extra, **record} for record in records]
            if first:
                result = {"records": records, "environment": environment}
                workdirs.write_json(folder.path / "result.json", result)
        return records

    def evaluate(self, run: str | Path | LoadedRun) -> list[Record]:
        """Measures a trained run and returns records, as `train` does; `run` is a `LoadedRun` or
        the folder of a run.

        The config of this `Experiment`, not the config of the run, decides the number of examples.

        Raises:
          ConfigError: the run is of another experiment, or its data or vocabulary differ from the
            current ones.
        """
        run = run if isinstance(run, LoadedRun) else load_run(run)
        recipes = (config.recipe() for config in (run.experiment, self.config))
        theirs, ours = ({**recipe, "evaluation": None} for recipe in recipes)
        if other := workdirs.difference(theirs, ours):
            raise ConfigError(
                f"{run.folder} is a run with other settings, {other}: use the config of the run"
            )
        Workdir(run.folder).check_sources(self.task, self.task.evaluation_splits)
        if self.task.same_saved_files(run.folder) is False:
            raise ConfigError(
                f"the vocabulary differs from the run in {run.folder}: restore the original files"
            )
        step, params, seconds = run.restored
        program, _ = self._side_by_side(len(run.seeds))
        placed = jax.device_put(params, program.state_shardings.params)
        return self.records(run.seeds, placed, step, seconds)

    def records(
        self, seeds: Sequence[int], params: PyTree, step: int, seconds: float
    ) -> list[Record]:
        """Measures the models with `params` on every split, including the sweep; returns records as
        in results.json.

        `step` is the step of the parameters. `seconds` is the time of training all seeds;
        `wall_seconds` of a record is `seconds` divided by the number of seeds.
        """
        common = {
            "task": self.config.task.name,
            "encoding": self.config.encoding,
            **({"variant": self.config.variant} if self.config.variant else {}),
            "step": step,
            "parameters": self.parameters(),
            "wall_seconds": seconds / len(seeds),
            "learning_rate": self.config.optimizer.learning_rate,
        }
        _, evaluator = self._side_by_side(len(seeds))
        main, levels = self.task.evaluation_splits, self.task.sweep_levels
        return [
            {
                **common,
                "seed": seed,
                "split": split,
                **(
                    {"kind": "split"}
                    if split in main
                    else {"kind": "sweep", "level": levels[split]}
                ),
                "examples": self._examples[split],
                "metric": metric,
                "value": value,
                **(_blocks(batches, metric) if self.config.job.blocks else {}),
            }
            for split, runs in evaluator.measure(params).items()
            for seed, batches in zip(seeds, runs, strict=True)
            for metric, value in evaluator.means(split, batches).items()
        ]

    def summary(self, seeds: int = 1) -> str:
        """A summary of a run: every parameter and its sharding, devices, cost of a step."""
        shapes = self._side_by_side(seeds)[0].state_shapes()
        return summary.summarise(shapes.params, self._facts(shapes, seeds))

    def _facts(self, shapes: TrainState, seeds: int) -> dict[str, str]:
        """The devices, the data and the cost of a step, by name."""
        length = self.task.length("train")
        facts = summary.job_facts(
            shapes,
            self.program.mesh,
            batch_size=self.config.training.batch_size * seeds,
            length=length,
            flops_per_token=self.learner.model.flops_per_token(length),
        )
        model, training = self.config.model, self.config.training
        step = [model.block.compute_dtype, f"remat {model.remat}"] if attends(model) else []
        facts["step"] = ", ".join([*step, f"accumulate {training.accumulate}"])
        return facts | ({"data": self.task.origin()} if self.task.origin() else {})

    def throughput(self, seeds: int = 1) -> Throughput:
        """Creates the stopwatch of a run with this number of seeds."""
        training, mesh = self.config.training, self.program.mesh
        length = self.task.length("train")
        return Throughput(
            tokens_per_step=training.batch_size * length * seeds,
            flops_per_token=self.learner.model.flops_per_token(length),
            devices=mesh.devices.flat,
            peak=self.config.job.peak_flops,
        )

    def _announce(self, workdir: Path, seeds: int) -> None:
        """Writes the summary of the run, and prints its main facts if the run is new."""
        path = write_atomically(workdir / "summary.txt", self.summary(seeds) + "\n")
        if all(
            step_of(checkpoint.name) is None for checkpoint in (workdir / "checkpoints").glob("*")
        ):
            shapes = self._side_by_side(seeds)[0].state_shapes()
            facts = {"parameters": f"{self.parameters():,}", **self._facts(shapes, seeds)}
            for name in ("parameters", "devices", "batch", "model FLOPs", "data"):
                if name in facts:
                    print(f"{name:<11}  {facts[name]}", file=sys.stderr)
            print(f"all parameters: {shown(path)}", file=sys.stderr)
        unused = jax.device_count() - self.program.mesh.size
        if unused:
            line = f"job.mesh leaves {unused} of {jax.device_count()} devices unused"
            print(f"warning: {line}", file=sys.stderr)

    def _start(self) -> PyTree:
        """The parameters to start from."""
        start, encoding = self.config.training.start, self.config.encoding
        return warm_start.start(start, self.learner, self.task, encoding)

    def _curve(
        self, evaluator: Evaluator, seeds: Sequence[int], state: TrainState, step: int
    ) -> list[dict[str, Any]]:
        splits, examples = self.task.evaluation_splits, self.config.evaluation.curve_examples
        measured = evaluator(state.params, splits, examples)
        return [
            {"step": step, "seed": seed, "split": split, **errors}
            for split, runs in measured.items()
            for seed, errors in zip(seeds, runs, strict=True)
        ]


def _examples(evaluation: EvaluationConfig, task: Task) -> dict[str, int]:
    """The number of examples to measure, by split: of a fixed split, no more than it has."""
    examples = dict.fromkeys(task.evaluation_splits, evaluation.examples)
    if evaluation.sweep_examples:
        examples |= task.sweep_examples(evaluation.sweep_examples)
    sizes = {split: task.size(split) for split in examples}
    return {
        split: n if (size := sizes[split]) is None else min(n, size)
        for split, n in examples.items()
    }


def _blocks(batches: Sequence[Sums], metric: str) -> Record:
    """The mean and the weight of a loss in each batch that has any weight; {} for other metrics."""
    if not metric.endswith("loss") or metric not in batches[0]:
        return {}
    sums = ((float(value), float(weight)) for value, weight in (sums[metric] for sums in batches))
    return {"blocks": [[round(value / weight, 4), weight] for value, weight in sums if weight]}


def _check(config: ExperimentConfig, task: Task) -> None:
    # Without the mesh: a single sequence cannot be split over its devices.
    learner = create_learner(config, task)
    params = jax.eval_shape(learner.init, np.int32(0)).params
    largest = max((leaf.size for leaf in jax.tree.leaves(params)), default=0)
    if largest >= 2**40:  # far above this, XLA aborts the process
        raise ConfigError(
            f"{config.model.name} has an array of {largest:,} parameters, over 2⁴⁰: lower its sizes"
        )
    # Among equally long splits this is the last: the first is the training split, which may take
    # long to read.
    longest = max((*reversed(task.splits), *(split for _, split in task.sweep)), key=task.length)
    batch = batch_shapes(task, 1, longest)
    carry = learner.initial_carry(1)
    if jax.tree.leaves(carry) and task.stream("train", config.training.batch_size) is None:
        raise ConfigError(
            f"{config.model.name} carries its state from batch to batch, but the examples of {task.name} do not "
            f"continue one another: set model.carries=False, or choose a task of continuous text, such as words"
        )
    if "positions" in batch and config.training.positions != "consecutive":
        raise ConfigError(
            f"the batches of {task.name} have their own positions with these options: do not set training.positions "
            f"and training.max_position"
        )
    # Sampled even if the batch has its own, because the sampler checks that the length fits below
    # max_position.
    positions_BL = learner.sample_positions(jax.random.key(0), *batch["inputs"].shape[:2])
    try:
        jax.eval_shape(
            lambda params, batch: learner.metrics(
                params, carry, {"positions": positions_BL, **batch}
            ),
            params,
            batch,
        )
    except KeyError as error:
        if error.args[0] in batch:
            raise
        raise ConfigError(
            f"the model {config.model.name} needs {error.args[0]!r} in its batches, which the task {task.name} "
            f"does not give with these options: choose another task or model"
        ) from error
    config.training.check_bound()  # the encoding may have refused such positions below any bound
    if config.training.data_dir is not None:
        create_iterator(config, task, 0)
