"""Whole training steps of the recipes in experiments/configs: ours, and x-transformers' of the same sizes."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from cope_jax import encodings, tasks
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown
from cope_jax.training import config_files, from_config
from cope_jax.training.config import ExperimentConfig, JobConfig, MeshConfig
from experiments.benchmarks import data_parallel
from experiments.benchmarks.case import Case, LeftOut, Noted
from experiments.benchmarks.devices import Split
from experiments.benchmarks.timing import Task

STEP = "step"
Batch = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A file of experiments/configs, and a batch of its task.

    Attributes:
      name: of the file.
      config: its content, with the batch size of the benchmark.
    """

    name: str
    config: ExperimentConfig

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Reads NAME, or NAME:BATCH with a batch size of its own.

        >>> Recipe.parse("counting:8").config.training.batch_size
        8
        >>> Recipe.parse("count")
        Traceback (most recent call last):
        ...
        cope_jax.errors.ConfigError: unknown recipe 'count': did you mean 'counting'? Choices: ...counting, ...
        """
        name, colon, batch = text.partition(":")
        if name not in config_files.names():
            raise unknown("recipe", name, config_files.names())
        config = config_files.config(name)
        if colon:
            if not batch.isdecimal() or int(batch) < 1:
                raise ConfigError(f"--recipes={text}: write NAME:BATCH with a batch size of at least 1")
            config = dataclasses.replace(
                config, training=dataclasses.replace(config.training, batch_size=int(batch), examples=None)
            )
        return cls(name, config)

    @property
    def label(self) -> str:
        return f"{self.name}, batch {self.config.training.batch_size}"

    def batch(self) -> Batch:
        """One batch of training data."""
        task = tasks.create(self.config.task.name, **self.config.task.options)
        return task.sample(np.random.default_rng(0), self.config.training.batch_size, "train")


def cases(recipes: Sequence[Recipe], names: Sequence[str], devices: int) -> list[Case]:
    """One case for each recipe: each encoding in our decoder, and CoPE and RoPE in x-transformers'."""
    built = []
    for recipe in recipes:
        builds: dict[str, Callable[[], Mapping[str, Task]]] = {
            name: functools.partial(ours, recipe, name, devices) for name in names
        }
        for name in X_TRANSFORMERS:
            builds[f"{name}, x-transformers"] = functools.partial(_x_transformers, recipe, name)
        fields = {"section": "train", "recipe": recipe.label, "devices": devices}
        built.append(Case(fields, builds, names[0], cost=recipe.batch()["inputs"].size * 500))
    return built


def ours(recipe: Recipe, encoding: str, devices: int = 1) -> Mapping[str, Task]:
    """One step of our learner: the batch is split over devices, or all on one, as in the training loop."""
    config = dataclasses.replace(recipe.config, encoding=encoding)
    config = dataclasses.replace(config, job=JobConfig(mesh=MeshConfig(data=1)))
    program = from_config.create_program(config, tasks.create(config.task.name, **config.task.options))
    learner, state, batch = program.learner, program.init([0]), dict(recipe.batch())
    size = recipe.config.training.batch_size
    if devices > 1 and size % devices == 0:
        split = Split.over(devices, dimension=0)
        state, batch = split.copy(state), split.share(batch)
        train = data_parallel.train_step(learner, split)
    else:
        batch = jax.tree.map(lambda array: jax.numpy.asarray(array[None]), batch)
        train = program.train_steps

    def step() -> float:
        nonlocal state
        state, metrics = train(state, batch)
        return jax.block_until_ready(metrics["loss"]).item()

    if size % devices:
        return Noted({STEP: step}, f"on 1 device, for {devices} cannot share a batch of {size} evenly")
    return {STEP: step}


X_TRANSFORMERS = ("cope", "rope")


def _x_transformers(recipe: Recipe, encoding: str) -> Mapping[str, Task]:
    try:
        module = importlib.import_module("experiments.benchmarks.torch_training")
        return module.x_transformers(recipe, encoding)
    except ModuleNotFoundError as error:
        raise LeftOut(f"{error.name} is not installed: pip install -e '.[bench]'") from error


def read_encodings(text: str) -> list[str]:
    """The encodings of a flag; ConfigError for an unknown one."""
    labels = [label.strip() for label in encodings.split_outside_parentheses(text, ",")]
    for label in labels:
        encodings.EncodingConfig.parse(label)
    return labels
