"""What every experiment's config is made from: the typed defaults, overridden."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from ml_collections import config_dict

from cope_jax import encodings, tasks
from cope_jax.models import MODELS
from cope_jax.training.config import ExperimentConfig

GPT3: Mapping[str, Any] = {"final_fraction": 0.1, "weight_decay": 0.1, "beta2": 0.95}
"""What optimizers of large language models have in common (arXiv 2005.14165)."""

BERT: Mapping[str, Any] = {"schedule": "linear", "epsilon": 1e-6, "weight_decay": 0.01, "decayed": "weights"}
"""What BERT's optimizers have in common (arXiv 1810.04805)."""


def experiment(task: str, options: Mapping[str, Any] | None = None, **overrides: Any) -> config_dict.ConfigDict:
    """The config of an experiment on `task`, every field of it reachable by a flag.

    Args:
      task: name of the task.
      options: the task's options that differ from its defaults.
      **overrides: fields of `ExperimentConfig` that differ from its defaults, as nested dicts.
    """
    model = MODELS.get(overrides.get("model", {}).get("name", "decoder")).Options()
    config = _fields(ExperimentConfig(model=model))
    config.task = {"name": task, "options": _fields(tasks.TASKS.get(task).Config())}
    config.encodings = {name: _fields(encodings.ENCODINGS.get(name).Config()) for name in encodings.names()}
    config.paper = overrides.pop("paper", {})
    config.lock()
    config.update({"task": {"options": dict(options or {})}, **overrides})
    return config


def _fields(config: Any) -> config_dict.ConfigDict:
    """A dataclass as a ConfigDict; an optional field keeps its type, so that a flag can set it."""
    fields = config_dict.ConfigDict()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _fields(value)
        elif value is None:
            kind = next(kind for kind in get_args(field.type) if kind is not type(None))
            value = config_dict.placeholder(get_origin(kind) or kind)
        fields[field.name] = value
    return fields
