"""Loads config files; the `get_config()` of a config file returns the typed defaults with changes.

A file of cope_jax/configs is given by its name, any other file by its path. Text after a colon is
the variant: the argument of `get_config`. A file lists its variants in `VARIANTS`. A path may have
colons too: the variant follows the last. To find and to list files needs no JAX.
"""

import dataclasses
import difflib
import functools
import inspect
import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from ml_collections.config_dict import ConfigDict as ConfigDict
from ml_collections.config_dict import placeholder

from cope_jax.errors import ConfigError
from cope_jax.registry import checked, field_types, unknown
from cope_jax.storage.files import read_object

if TYPE_CHECKING:
    from cope_jax.training.experiment_config import ExperimentConfig

GPT3: Mapping[str, Any] = {"final_fraction": 0.1, "weight_decay": 0.1, "beta2": 0.95}
"""Common optimizer settings of large language models (arXiv 2005.14165)."""

BERT: Mapping[str, Any] = {
    "schedule": "linear",
    "epsilon": 1e-6,
    "weight_decay": 0.01,
    "decayed": "weights",
}
"""Common optimizer settings of BERT (arXiv 1810.04805)."""


def every(steps: int, checkpoints: int | None = None) -> dict[str, int]:
    """The fields of `TrainingConfig` for evaluations, and for checkpoints if they differ."""
    return {"evaluate_every": steps, "checkpoint_every": checkpoints or steps}


def adamw(rate: float, warmup: int, **options: Any) -> dict[str, Any]:
    """The fields of `OptimizerConfig`: the learning rate, the steps of warm-up, and other options."""
    return {"learning_rate": rate, "warmup_steps": warmup, **options}


def measured(examples: int, curve: int, batch_size: int, sweep: int = 0) -> dict[str, int]:
    """The fields of `EvaluationConfig`: examples at the end, of curves and of the sweep."""
    return {
        "examples": examples,
        "curve_examples": curve,
        "sweep_examples": sweep,
        "batch_size": batch_size,
    }


def config(name: str | os.PathLike[str], **changes: Any) -> "ExperimentConfig":
    """Loads a config by its name in cope_jax/configs, or by its path, and applies changes.

    >>> import cope_jax as cj
    >>> cj.config("quick", encoding="rope", training={"steps": 200}).training.steps
    200
    >>> cj.config("quikc")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown config 'quikc': did you mean 'quick'? Choose from ...

    Args:
      name: one of `names()`, such as "quick", or the path of a file that has a `get_config`, or
        that of the config.json of a run.
      **changes: new values of fields of `ExperimentConfig`. A nested config is given as a dict of
        its changed fields.

    Raises:
      ConfigError: there is no such file, a field is unknown, or a value has the wrong type.
    """
    from cope_jax.models.model import overlay
    from cope_jax.training.experiment_config import ExperimentConfig

    original = named(os.fspath(checked(name, str | os.PathLike, "the name of a config")))
    return ExperimentConfig.from_mapping(overlay(original.to_dict(), changes))


def named(name: str) -> ConfigDict:
    """Calls `get_config` of a config file and returns its ConfigDict, in which another config file
    can change fields.

    Args:
      name: as for `find`.
    """
    path, colon, variant = _split(find(name))
    argument = [variant] if colon else []
    family = name.removesuffix(colon + variant)
    extra = ConfigError(f"config {family} has no variants: omit :{variant}")
    if Path(path).is_fifo():
        raise ConfigError(f"the config {path} is a pipe, which may never end: give a file")
    if path.endswith(".json"):
        if argument:
            raise extra
        return _of_run(Path(path))
    try:
        # Do not run what is no config.
        if not re.search(rb"get_config|import \*", Path(path).read_bytes()):
            raise _not_a_config(path, "it has no such function")
        file = runpy.run_path(path)
        if argument and variant not in (variants := file.get("VARIANTS", argument)):
            raise unknown(f"variant of {Path(path).stem}", variant, variants)
        get_config = file.get("get_config")
        if argument and callable(get_config) and not inspect.signature(get_config).parameters:
            raise extra
        content = get_config(*argument) if callable(get_config) else None
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path} ({error.strerror}): give a file or the name of a config"
        ) from error
    except Exception as error:  # the file fails, or is not Python at all
        raise _not_a_config(path, f"{type(error).__name__}: {_reason(error)}") from error
    if not isinstance(content, ConfigDict):
        raise _not_a_config(path, "it has no such function")
    return content


def _of_run(path: Path) -> ConfigDict:
    """The config of a run, from its config.json."""
    from cope_jax.training.experiment_config import ExperimentConfig

    config = read_object(path, "give the config.json of a run", config=dict)["config"]
    try:
        ExperimentConfig.from_mapping(config)  # whose errors name the field
        task = config.pop("task")
        return experiment(task["name"], task["options"], **config)
    except (AttributeError, ConfigError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the config of a run ({_reason(error)}): give another config"
        ) from error


def _reason(error: Exception) -> str:
    """The text of an error on one line, without all the fields that a ConfigDict adds."""
    text = re.sub(r"""'?(Key ".*?" does not exist) and .*""", r"\1", str(error), flags=re.DOTALL)
    return " ".join(text.split())


def _not_a_config(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--config needs a Python file whose get_config() returns a ConfigDict, not {path} ({reason})"
    )


def find(name: str) -> str:
    """Finds the path of a config file.

    If `name` is already a path, returns `name` unchanged. A colon and the variant are kept.

    >>> Path(find("counting:3")).name
    'counting.py:3'
    >>> find("my/experiment.py:large")
    'my/experiment.py:large'
    """
    file, colon, variant = _split(name)
    if file.endswith(".py") or Path(file).is_file():
        return name
    if file not in families():
        near = difflib.get_close_matches(name, names(), n=1)  # may be a variant
        raise unknown("config", name, {*families(), *near})
    return f"{families()[file]}{colon}{variant}"


def _split(name: str) -> tuple[str, str, str]:
    """(file, colon, variant); a file whose path has a colon is not split."""
    return (name, "", "") if ":" not in name or Path(name).is_file() else name.rpartition(":")


def families() -> dict[str, Path]:
    """The files of cope_jax/configs, by name."""
    folder = Path(__file__).parents[1] / "configs"
    return {path.stem: path for path in sorted(folder.glob("[!_]*.py"))}


@functools.cache
def names() -> tuple[str, ...]:
    """The name of each config of the package, and NAME:VARIANT of each variant but the default."""
    known = []
    for name in families():
        known += [name, *(f"{name}:{variant}" for variant in variants_of(name)[1:])]
    return tuple(known)


@functools.cache
def variants_of(name: str) -> tuple[str, ...]:
    """The variants of a config of the package, the default first, then the others, sorted."""
    file = runpy.run_path(str(families()[name]))
    parameters = inspect.signature(file["get_config"]).parameters.values()
    default = [parameter.default for parameter in parameters]
    return (*default, *sorted(set(file.get("VARIANTS", ())) - {*default}))


def experiment(task: str, options: Mapping[str, Any] | None = None, **overrides: Any) -> ConfigDict:
    """Creates the config of an experiment on `task`; a flag can set every field.

    Args:
      task: name of the task.
      options: the task's options that differ from its defaults.
      **overrides: fields of `ExperimentConfig` that differ from its defaults, as nested dicts.
    """
    from cope_jax import encodings, tasks
    from cope_jax.models import MODELS
    from cope_jax.training.experiment_config import ExperimentConfig

    name = overrides.get("model", {}).get("name", ExperimentConfig().model.name)
    model = MODELS.get(name).Options()
    config = _fields(ExperimentConfig(model=model))
    config.task = {"name": task, "options": _fields(tasks.TASKS.get(task).Config())}
    kinds = {name: encodings.ENCODINGS.get(name) for name in encodings.names()}
    config.encodings = {name: _fields(kind.Config()) for name, kind in kinds.items()}
    config.paper = overrides.pop("paper", {})
    config.lock()
    config.update({"task": {"options": dict(options or {})}, **overrides})
    return config


def _fields(config: Any) -> ConfigDict:
    """Converts a dataclass to a ConfigDict; optional fields keep their types, for flags."""
    fields = ConfigDict()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _fields(value)
        elif value is None:
            kinds = get_args(field_types(config.__class__)[field.name])
            kind = next((kind for kind in kinds if kind is not type(None)), object)
            value = placeholder(get_origin(kind) or kind)
        fields[field.name] = value
    return fields
