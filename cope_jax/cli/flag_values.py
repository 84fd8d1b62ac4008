"""Reads and checks values of flags: encodings, numbers, models on disk, task options."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cope_jax import encodings
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.models.embedder import Embedder
from cope_jax.runs.load import load
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig


def read_names(flag: str, text: str, check: Callable[[str], Any]) -> list[str]:
    """Reads the comma-separated names of a flag.

    Raises ConfigError if `check` rejects a name or a name is repeated.
    """
    names = [name.strip() for name in encodings.split_outside_parentheses(text, ",")]
    for name in names:
        check(name)
        if names.count(name) > 1:
            raise ConfigError(f"--{flag} names {name!r} twice: name it once")
    return names


def read_numbers(flag: str, texts: Sequence[str]) -> list[int]:
    """Reads positive whole numbers. Raises ConfigError for anything else.

    >>> read_numbers("lengths", ["512", "1k"])
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: --lengths takes positive whole numbers separated by commas, not '1k'
    """
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(
                f"--{flag} takes positive whole numbers separated by commas, not {text!r}"
            )
    return [int(text) for text in texts]


def load_models(models: Sequence[str]) -> list[Embedder]:
    """Loads the embedders of --models with `pretrained.load`.

    Embedders with the same name get longer names.
    """
    if not models or "" in models:
        raise ConfigError(
            '--models names no model: give runs of cope-jax train, folders of models, or "minilm"'
        )
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
    """The models of --models by kind, such as "elmo".

    Raises:
      ConfigError: a kind is not in `kinds`, or two models have the same kind.
    """
    model_of: dict[str, str] = {}
    for model in models:
        kind = load(model).name
        if kind not in kinds:
            raise ConfigError(
                f"--models names {model}, which contains a {kind}: give only {' and '.join(kinds)}"
            )
        if kind in model_of:
            raise ConfigError(
                f"--models names two models of {kind}, {model_of[kind]} and {model}: give only one"
            )
        model_of[kind] = model
    return model_of


def with_options(config: ExperimentConfig, **options: Any) -> ExperimentConfig:
    """Replaces options of the config's task. Options that are None stay unchanged."""
    given = {name: value for name, value in options.items() if value is not None}
    task = TaskConfig(config.task.name, {**config.task.options, **given})
    return dataclasses.replace(config, task=task)
