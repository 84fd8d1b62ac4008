"""Reads values of flags: names, encodings with options in parentheses, numbers, models on disk, options of a task."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from cope_jax import encodings
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import pretrained
from cope_jax.models.embedder import Embedder
from cope_jax.registry import unknown
from cope_jax.runs.load import load
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig


def check_names(kind: str, names: Sequence[str], choices: Collection[str]) -> None:
    """Raises ConfigError for a name that is not among the choices."""
    for name in names:
        if name not in choices:
            raise unknown(kind, name, choices)


def read_names(flag: str, text: str, check: Callable[[str], Any]) -> list[str]:
    """The comma-separated names of a flag; ConfigError for one that `check` rejects, or that appears twice."""
    names = [name.strip() for name in encodings.split_outside_parentheses(text, ",")]
    for name in names:
        check(name)
        if names.count(name) > 1:
            raise ConfigError(f"--{flag} names {name!r} twice")
    return names


def read_numbers(flag: str, texts: Sequence[str]) -> list[int]:
    """Positive numbers; ConfigError for anything else.

    >>> read_numbers("lengths", ["512", "1k"])
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: --lengths takes positive numbers with commas between them, not '1k'
    """
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise ConfigError(f"--{flag} takes positive numbers with commas between them, not {text!r}")
    return [int(text) for text in texts]


def load_models(models: Sequence[str]) -> list[Embedder]:
    """The embedders of --models, by `pretrained.load`; if two have the same name, their folders are added to it."""
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
    """The models of --models by kind, such as "elmo"; ConfigError for another kind, or for two models of one kind."""
    found: dict[str, str] = {}
    for model in models:
        kind = load(model).name
        if kind not in kinds:
            raise ConfigError(f"--models: {model} contains {kind}: give models of {' and '.join(kinds)}")
        if kind in found:
            raise ConfigError(f"--models names two models of {kind}, {found[kind]} and {model}: give one")
        found[kind] = model
    return found


def with_options(config: ExperimentConfig, **options: Any) -> ExperimentConfig:
    """The config with the given options of its task replaced; those that are None stay unchanged."""
    given = {name: value for name, value in options.items() if value is not None}
    return dataclasses.replace(config, task=TaskConfig(config.task.name, {**config.task.options, **given}))
