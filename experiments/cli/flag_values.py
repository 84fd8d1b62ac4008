"""What the flags of these commands name: models on disk, systems, options of a task."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.models.embedder import Embedder
from cope_jax.runs.load import load
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig


def load_models(models: Sequence[str]) -> list[Embedder]:
    """The embedders of --models, see `pretrained.load`; of two of one kind each has its folder's name beside it.

    Raises:
      ConfigError: there is none, one twice, or no such model.
    """
    if not models or "" in models:
        raise ConfigError('--models names no model: give runs of experiments.train, folders of models, or "minilm"')
    if len(set(models)) < len(models):
        twice = next(model for model in models if models.count(model) > 1)
        raise ConfigError(f"--models names {twice!r} twice: name each model once")
    embedders: list[Embedder] = [pretrained.load(model) for model in models]
    names = [embedder.name for embedder in embedders]
    for embedder, name, model in zip(embedders, names, models, strict=True):
        if names.count(name) > 1:
            embedder.name = f"{name} {Path(model).parent.name}/{Path(model).name}"
    return embedders


def by_kind(models: Sequence[str], kinds: Sequence[str]) -> dict[str, str]:
    """The models of --models by the name of their kind, such as "elmo"; none is read.

    Raises:
      ConfigError: there is no such model, it is of another kind, or there are two of one kind.
    """
    found: dict[str, str] = {}
    for model in models:
        kind = load(model).name
        if kind not in kinds:
            raise ConfigError(f"--models: {model} holds {kind}: give models of {' and '.join(kinds)}")
        if kind in found:
            raise ConfigError(f"--models names two models of {kind}, {found[kind]} and {model}: give one")
        found[kind] = model
    return found


def with_options(config: ExperimentConfig, **options: Any) -> ExperimentConfig:
    """The config with other options of its task; those that are None stay."""
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(config, task=TaskConfig(config.task.name, {**config.task.options, **given}))
