"""Defines flags for configs and their fields, and explains mistakes in them.

Without a config, nothing here imports JAX.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from cope_jax.errors import ConfigError
from cope_jax.training import config_files

if TYPE_CHECKING:
    from cope_jax.training.experiment_config import ExperimentConfig

# Flags belong to the module that calls this one, whose --help shows them.
flags.disclaim_key_flags()


class _ConfigParser(flags.ArgumentParser[Any]):
    """Parses a flag for a config file, which may also be given by name instead of path."""

    def __init__(self, parser: flags.ArgumentParser[Any], default: str | None):
        self._parser, self.default = parser, default

    def parse(self, text: str) -> Any:
        return config_files.named(text).lock()

    def flag_type(self) -> str:
        return self._parser.flag_type()


def DEFINE_config(
    name: str, default: str | None = None, purpose: str = ""
) -> flags.FlagHolder[Any]:
    """Defines a flag for a config, and a flag for each of its fields.

    The help begins with `purpose`, the config's use.
    """
    holder = config_flags.DEFINE_config_file(
        name,
        None,  # because reading a config imports JAX, which help does not need
        f"{purpose}Name of a config in cope_jax/configs, such as quick, or path of a config file. "
        f"--{name}.FIELD=VALUE changes a field, for example --{name}.training.steps=100. "
        f"--{name}=NAME --help lists all fields.",
    )
    flag = flags.FLAGS[name]
    flag.parser = _ConfigParser(flag.parser, default)
    flag.default_as_str = default and repr(default)
    return holder


def names() -> tuple[str, ...]:
    """The names of the flags for configs."""
    return tuple(name for name in flags.FLAGS if _is_config(name))


def _is_config(name: str) -> bool:
    return isinstance(flags.FLAGS[name].parser, _ConfigParser)


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Adds the default of each flag for a config that `argv` does not have."""
    given = {argument.lstrip("-").partition("=")[0] for argument in argv[1:]}
    parsers: dict[str, Any] = {name: flags.FLAGS[name].parser for name in names()}
    added = [
        f"--{name}={parser.default}"
        for name, parser in parsers.items()
        if parser.default and name not in given
    ]
    return [*argv[:1], *added, *argv[1:]]


def overrides(name: str) -> dict[str, Any]:
    """The fields that flags --NAME.FIELD=VALUE set, and their values."""
    return config_flags.get_override_values(flags.FLAGS[name])


def warn_of_unused(name: str, config: "ExperimentConfig") -> None:
    """Warns of flags --NAME.encodings.ENCODING.… for encodings that the config does not use."""
    from cope_jax.encodings import EncodingConfig

    used = {name_of_encoding for name_of_encoding, _ in EncodingConfig.parse(config.encoding).parts}
    for field in overrides(name):
        group, _, rest = field.partition(".")
        encoding = rest.partition(".")[0]
        if group == "encodings" and encoding not in used:
            line = f"--{name}.{field} has no effect, because the encoding is {config.encoding}"
            print(f"warning: {line}", file=sys.stderr)


def read_config(value: Any) -> "ExperimentConfig":
    """Reads the value of the --config flag.

    Raises ConfigError if the config is wrong, also for unused encodings.
    """
    from cope_jax.encodings import EncodingConfig
    from cope_jax.training.experiment_config import ExperimentConfig

    config = ExperimentConfig.from_mapping(value.to_dict())
    for name, options in config.encodings.items():
        EncodingConfig(((name, options),))
    return config


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (flag, value) for each field of a config."""
    if not isinstance(value, config_files.ConfigDict):
        yield name, value
        return
    for field in value:
        yield from leaves(f"{name}.{field}", value[field])


def check_names(flag: Any) -> None:
    """ConfigError if a flag replaces the task or model of a config file, on which fields depend."""
    if not isinstance(flag.value, config_files.ConfigDict):
        return
    from cope_jax import models, tasks

    changed = overrides(flag.name)
    for group, known in (("task", tasks.names()), ("model", models.names())):
        name = changed.get(f"{group}.name")
        if name not in known or config_files.named(flag.config_filename)[group].name == name:
            continue
        names = sorted(config_files.names(), key=lambda other: ":" in other)  # variants last
        others = [other for other in names if config_files.named(other)[group].name == name]
        raise ConfigError(
            f"--{flag.name}.{group}.name={name} is not possible, because {Path(flag.config_filename).name} fixes the "
            f"{group}: choose another --{flag.name}{f', such as {others[0]}' if others else ''}"
        )


def help_of_fields(module: str, argv: Sequence[str]) -> str:
    """The fields of each config that `argv` names, for the help of a module."""
    given = {}
    for argument, following in itertools.pairwise([*argv[1:], ""]):
        name, equals, value = argument.lstrip("-").partition("=")
        given[name] = value if equals else following
    text = ""
    for flag in flags.FLAGS.get_key_flags_for_module(module):
        if _is_config(flag.name) and given.get(flag.name):
            text += f"Fields of {given[flag.name]}:\n"
            for name, value in leaves(f"--{flag.name}", config_files.named(given[flag.name])):
                text += f"  {name}={value!r}\n"
            text += "\n"
    return text


def field_that_ends(name: str, prefix: str = "config") -> str | None:
    """The flag of a field whose path ends with a name."""
    known = (path for path, _ in leaves(f"--{prefix}", config_files.named("quick")))
    return next((path for path in known if path.endswith(f".{name}")), None)


def unknown_field(text: str, argv: Sequence[str]) -> str:
    r"""The message for a flag whose field the config does not have.

    >>> unknown_field('stepz Did you mean "steps" instead of "stepz"?', ["cope-jax train", "--config.training.stepz=5"])
    "unknown field 'stepz' in --config.training.stepz: did you mean 'steps'? Add --help to see all fields"
    >>> unknown_field("'block'", ["cope-jax train", "--config.block.qk_norm=True"]).partition("A")[0]
    "unknown field 'block' in --config.block.qk_norm: did you mean --config.model.block.qk_norm? "
    >>> unknown_field('"\'num_heads\'"', ["cope-jax", "--config.model.num_heads=4"]).split(": ")[1].split("?")[0]
    'did you mean --config.model.block.num_heads'
    >>> close = '"\'encoding\'" Did you mean "full_encoding" instead of "encoding"?'
    >>> unknown_field(close, ["cope-jax", "--config.model.encoding=cope"]).split(": ")[1].split("?")[0]
    'did you mean --config.encoding'
    """
    name, _, rest = text.partition(" ")
    name = name.strip("'\"")
    given = (word.partition("=")[0] for word in argv[1:])
    flag = next((word for word in given if f".{name}" in word), None)
    if flag is None:
        return f"unknown field in a --config flag: {text}; see --help"
    close = re.search(r'Did you mean "(\w+)"', rest)
    prefix, _, field = flag.lstrip("-").partition(".")
    meant = field_that_ends(field, prefix) or field_that_ends(name, prefix)
    meant = meant or (repr(close[1]) if close else None)
    hint = f"did you mean {meant}? A" if meant else "a"
    return f"unknown field {name!r} in {flag}: {hint}dd --help to see all fields"
