"""Creates the learner, program and data of an experiment from its config."""

from collections.abc import Sequence
from typing import Any

import grain
import jax
import numpy as np

from cope_jax.data import pipeline
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from cope_jax.tasks import Task
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.learner import Learner
from cope_jax.training.optimizer import create_optimizer, create_schedule
from cope_jax.training.program import Program, SeedBatch
from cope_jax.training.sharding import LENGTH, check_sizes, create_mesh, layout_of

MOST_TOKENS = 2**24
"""The greatest length of a sequence."""


def batch_shapes(task: Task, rows: int, split: str = "train") -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and types of a batch of `split` with `rows` rows."""
    example = task.sample(np.random.default_rng(0), 1, split)
    shapes = {name: ((rows, *field.shape[1:]), field.dtype) for name, field in example.items()}
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def create_learner(config: ExperimentConfig, task: Task, layout: Layout = WHOLE) -> Learner:
    """Creates the learner of the experiment, which has the pure functions of training."""
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
    """Creates the training program for `width` seeds side by side, on the mesh of `config.job`.

    The mesh uses `devices`. If None, the mesh uses all available devices.

    Raises:
      ConfigError: the mesh does not fit the devices, or does not fit the sizes of the experiment.
    """
    mesh = create_mesh(config.job.mesh, devices)
    training, longest = config.training, task.max_length
    if longest > MOST_TOKENS:
        raise ConfigError(
            f"{task.name} has sequences of {longest:,} tokens, over {MOST_TOKENS:,}: lower its sizes"
        )
    for name, rows in (
        ("training", training.batch_size),
        ("evaluation", config.evaluation.batch_size),
    ):
        if rows * longest >= 2**31:
            raise ConfigError(
                f"{name}.batch_size={rows:,} sequences of up to {longest:,} tokens are 2³¹ tokens or more: lower it"
            )
    batch_sizes = {
        "training.batch_size / accumulate": training.batch_size // training.accumulate,
        "evaluation.batch_size": config.evaluation.batch_size,
    }
    check_sizes(mesh, getattr(config.model, "block", None), batch_sizes)
    learner = create_learner(config, task, layout_of(mesh))
    carry = jax.eval_shape(lambda: learner.initial_carry(training.batch_size))
    if mesh.shape[LENGTH] > 1 and jax.tree.leaves(carry):
        raise ConfigError(f"{config.model.name} reads word by word: leave job.mesh.sequence at 1")
    mixer = getattr(getattr(config.model, "block", None), "mixer", "attention")
    if mesh.shape[LENGTH] > 1 and mixer != "attention":
        raise ConfigError(
            f"block.mixer={mixer} does not split the sequence: leave job.mesh.sequence at 1"
        )
    return Program(learner, SeedBatch(width), mesh)


def create_iterator(
    config: ExperimentConfig, task: Task, seed: int, rows: Sequence[int] | np.ndarray | None = None
) -> grain.DatasetIterator:
    """Creates the iterator over training batches of a seed; `rows` selects rows of each."""
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
