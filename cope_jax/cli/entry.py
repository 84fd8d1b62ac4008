"""Starts every command, and parses its flags."""

import contextlib
import importlib
import io
import itertools
import os
import pkgutil
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from logging import getLogger
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from cope_jax import models, tasks
from cope_jax.cli import interrupts
from cope_jax.cli.exits import clear_errors, no_late_words, one_line
from cope_jax.encodings import EncodingConfig
from cope_jax.errors import ConfigError, NonFiniteError, StorageError
from cope_jax.registry import check_plain_numbers, unknown
from cope_jax.storage.files import in_bucket
from cope_jax.storage.mirror import mirrored
from cope_jax.storage.programs import keep_programs
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.preemption import Interrupted

flags.disclaim_key_flags()  # flags that this module defines belong to the module that calls it, whose --help shows them

COMMANDS = Path(__file__).parents[1] / "commands"
"""The folder of the commands: each is a module with `main`."""
FOLDERS = ("workdir", "model", "out")
"""The flags that name a folder."""
_FILES = 256
"""The number of files that may be open at a time in a command; checkpoints and readers need this many."""
HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
MORE = "cope-jax list shows all commands, configs, encodings, tasks and models."


def run_command() -> None:
    """Runs the command that the first argument names, with the other arguments as its flags."""
    _open_streams()
    with clear_errors():
        name = sys.argv[1] if sys.argv[1:] else "--help"
        if name in HELP:
            print(overview())
            sys.exit(0)
        if name not in command_names():
            raise unknown("command", name, command_names())
    sys.argv = [f"cope-jax {name}", *sys.argv[2:]]
    module = importlib.import_module(f"cope_jax.commands.{name}")
    run(module.main, getattr(module, "MIRRORED", FOLDERS))


def command_names() -> tuple[str, ...]:
    """The names of all commands."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules([str(COMMANDS)])))


def overview() -> str:
    """All commands, with one line for each."""
    return f"cope-jax NAME FLAGS runs a command:\n\n{', '.join(command_names())}\n\n{MORE}"


def run(main: Callable[[], None], mirrors: Sequence[str] = FOLDERS) -> None:
    """Parses the flags and calls `main`.

    `mirrors` names the flags whose folder may be in a bucket: the command then works in a local folder.
    """

    def guarded(argv: Sequence[str]) -> None:
        with clear_errors():
            if argv[1:]:
                raise ConfigError(f"unexpected argument {argv[1]!r}: give all options as flags, see --help")
            _allow_open_files()
            with _mirrored_folders(mirrors):
                main()
            jax.distributed.shutdown()  # each process waits for the others here, because they need the first one

    def parse(argv: Sequence[str]) -> list[str]:
        with clear_errors():
            if HELP & {argument.partition("=")[0] for argument in argv[1:]}:
                print(help_text(main.__module__, argv), flush=True)
                sys.exit(0)
            try:
                _check_text(argv)
                argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
                rest = flags.FLAGS(argv)
                _check_numbers(argv)
                for name in flags.FLAGS:
                    _check_names(flags.FLAGS[name])
                _check_folders()
                _check_lists()
                return rest
            except flags.Error as error:
                raise _wrapped(error) or ConfigError(_flag_error(str(error))) from None
            except (AttributeError, KeyError) as error:
                raise ConfigError(_unknown_field(one_line(error), argv)) from error
            except (TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
                # other errors from reading a --config file and setting its fields
                raise ConfigError(one_line(error)) from error

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        interrupts.install()
    _open_streams()
    keep_programs()
    logging.set_verbosity(logging.WARNING)
    getLogger("gcsfs").setLevel(logging.FATAL)  # it logs the errors that it raises
    # Orbax raises its errors and also logs them, with a traceback, from its own threads.
    logging.get_absl_logger().addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    with no_late_words():
        app.run(guarded, flags_parser=parse)


def _open_streams() -> None:
    """Opens stdout and stderr if they are closed, and lets them replace characters that they do not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started the command
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")  # a terminal or file may not support every character


def _check_text(argv: Sequence[str]) -> None:
    """Refuses names of files that are not UTF-8, because results and messages name them."""
    for word in argv[1:]:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            shown = word.encode(errors="backslashreplace").decode()
            raise ConfigError(f"{shown} is not UTF-8: rename the file or folder, or convert the text")


def _check_lists() -> None:
    """Refuses a list that is empty or has an empty item."""
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, list) and (value == [] != flags.FLAGS[name].default or "" in value):
            what = "has an empty item" if value[1:] else "is empty, as with an unset variable"
            raise ConfigError(f"--{name} {what}: give a value, or omit the flag")


def _allow_open_files() -> None:
    """Raises the limit of open files, if it is low. ConfigError: that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        if 0 <= hard < _FILES:
            raise ConfigError(f"only {hard} files may be open at a time: allow at least {_FILES} with `ulimit -n`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))


def _check_numbers(argv: Sequence[str]) -> None:
    """Refuses numbers that only Python reads as such: 1_000, 0x10."""
    for word, following in itertools.pairwise([*argv[1:], ""]):
        name, equals, text = word.lstrip("-").partition("=")
        leaves = jax.tree.leaves(flags.FLAGS[name].value) if name in flags.FLAGS else []
        if any(type(leaf) in (int, float) for leaf in leaves):  # not bool, which the next word does not belong to
            check_plain_numbers(text if equals else following, f"--{name}")


def _check_folders() -> None:
    """Refuses folders that are the sign of a mistake in the shell."""
    for name in FOLDERS:
        value = flags.FLAGS[name].value if name in flags.FLAGS else None
        if value == "":
            raise ConfigError(f"--{name} is empty, as with an unset variable: give a folder, or . for the current one")
        if isinstance(value, str) and value.startswith("~"):
            raise ConfigError(f"the shell does not replace ~ in --{name}={value}: write $HOME, or ./~ for that name")


@contextlib.contextmanager
def _mirrored_folders(names: Sequence[str]) -> Iterator[None]:
    """Lets the command work in local folders for those in buckets: see `cope_jax.storage.mirror`."""
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in names:
            flag = flags.FLAGS[name] if name in flags.FLAGS else None
            if flag is not None and isinstance(flag.value, str) and in_bucket(flag.value):
                url, flag.value = flag.value, stack.enter_context(mirrored(flag.value))
                urls[flag.value] = url
        try:
            yield
        except (ConfigError, StorageError, NonFiniteError, Interrupted) as error:
            full = str(error).startswith("cannot write to ")  # the local disk: its path helps
            for folder, url in urls.items() if not full else ():
                error.args = tuple(str(text).replace(folder, url) for text in error.args)
            raise


def help_text(module: str, argv: Sequence[str]) -> str:
    """The help text: what the command does, its flags, and the fields of each config that `argv` names."""
    main = sys.modules[module].__doc__ or ""
    home = argv[0] if module == "__main__" else module
    flag_lines = flags.FLAGS.module_help(home).strip().partition("\n")[2]  # without the heading, which is a path
    text = f"{main.strip()}\n\nFlags:\n{flag_lines}\n\n"
    given = {}
    for argument, following in itertools.pairwise([*argv[1:], ""]):
        name, equals, value = argument.lstrip("-").partition("=")
        given[name] = value if equals else following
    for flag in flags.FLAGS.get_key_flags_for_module(home):
        if isinstance(flag.parser, _ConfigParser) and given.get(flag.name):
            fields = _leaves(f"--{flag.name}", config_files.named(given[flag.name]))
            text += (
                f"Fields of {given[flag.name]}:\n" + "".join(f"  {name}={value!r}\n" for name, value in fields) + "\n"
            )
    return text + MORE


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (flag, value) for each field of a config."""
    if not isinstance(value, config_files.ConfigDict):
        yield name, value
        return
    for field in value:
        yield from _leaves(f"{name}.{field}", value[field])


def _wrapped(error: BaseException | None) -> ConfigError | None:
    """The innermost ConfigError of a chain, or None. Flag libraries wrap the ConfigError of a --config file."""
    found = None
    while error is not None:
        found = error if isinstance(error, ConfigError) else found
        error = error.__cause__ or error.__context__
    return found


def _flag_error(message: str) -> str:
    missing = re.findall(r"flag --(\w+)=None: ", message)
    if missing:
        return f"missing {' and '.join(f'--{name}' for name in sorted(missing))}; see --help"
    unknown = re.match(r"Unknown command line flag '(\w+)'", message)
    if unknown and "config" in flags.FLAGS:
        fields = (name for name, _ in _leaves("--config", config_files.named("quick")))
        if field := next((name for name in fields if name.endswith(f".{unknown[1]}")), None):
            return f"unknown flag --{unknown[1]}: did you mean {field}? See --help"
    number = re.match(r"flag (--\S+?=.*): (invalid literal for int|could not convert string to float)", message)
    if number:
        kind = "a whole number" if number[2].endswith("int") else "a number"
        return f"{number[1]}: the value must be {kind}; see --help"
    return f"{' '.join(message.split())}; see --help"


def _check_names(flag: Any) -> None:
    """Raises ConfigError if a flag replaces the task or model of a config file, because other fields depend on it."""
    changed = config_flags.get_override_values(flag) if isinstance(flag.value, config_files.ConfigDict) else {}
    for part, known in (("task", tasks.names()), ("model", models.names())):
        name = changed.get(f"{part}.name")
        if name not in known or config_files.named(flag.config_filename)[part].name == name:
            continue
        others = [other for other in config_files.names() if config_files.named(other)[part].name == name]
        raise ConfigError(
            f"--{flag.name}.{part}.name={name} is not possible, because {Path(flag.config_filename).name} fixes the "
            f"{part}: choose another --{flag.name}{f', such as {others[0]}' if others else ''}"
        )


def _unknown_field(text: str, argv: Sequence[str]) -> str:
    """The message for a flag whose field the config does not have.

    >>> _unknown_field('stepz Did you mean "steps" instead of "stepz"?', ["train.py", "--config.training.stepz=5"])
    "unknown field 'stepz' in --config.training.stepz: did you mean 'steps'? Add --help to see all fields"
    >>> _unknown_field("'block'", ["train.py", "--config.block.qk_norm=True"]).partition("A")[0]
    "unknown field 'block' in --config.block.qk_norm: did you mean --config.model.block.qk_norm? "
    """
    name, _, rest = text.partition(" ")
    name = name.strip("'")
    given = (word.partition("=")[0] for word in argv[1:])
    flag = next((word for word in given if f".{name}" in word), None)
    if flag is None:
        return f"unknown field in a --config flag: {text}; see --help"
    close = re.search(r'Did you mean "(\w+)"', rest)
    prefix, _, field = flag.lstrip("-").partition(".")
    known = (path for path, _ in _leaves(f"--{prefix}", config_files.named("quick")))
    deeper = next((path for path in known if path.endswith(f".{field}")), None)
    meant = deeper or (repr(close[1]) if close else None)
    hint = f"did you mean {meant}? A" if meant else "a"
    return f"unknown field {name!r} in {flag}: {hint}dd --help to see all fields"


class _ConfigParser(flags.ArgumentParser[Any]):
    """Parses a flag for a config file, which may also be given by name instead of path."""

    def __init__(self, parser: flags.ArgumentParser[Any]):
        self._parser = parser

    def parse(self, text: str) -> Any:
        return config_files.named(text).lock()

    def flag_type(self) -> str:
        return self._parser.flag_type()


def DEFINE_config(name: str, default: str | None = None, what: str = "") -> flags.FlagHolder[Any]:
    """Defines a flag for a config, and a flag for each of its fields. The help begins with `what`, the config's use."""
    path = None if default is None else config_files.find(default)
    holder = config_flags.DEFINE_config_file(
        name,
        path,
        f"{what}Name of a config in cope_jax/configs, such as quick, or path of a config file. "
        f"--{name}.FIELD=VALUE changes a field, for example --{name}.training.steps=100. "
        f"--{name}=NAME --help lists all fields.",
    )
    flag = flags.FLAGS[name]
    flag.parser = _ConfigParser(flag.parser)
    flag.default_as_str = default and repr(default)  # the name, not the path
    return holder


def DEFINE_seed() -> flags.FlagHolder[int | None]:
    """Defines --seed, which chooses one of the models of a run."""
    return flags.DEFINE_integer(
        "seed", None, "Seed of the model to use, if the run trained several seeds; without this flag, the first seed."
    )


def warn_of_unused(name: str, config: ExperimentConfig) -> None:
    """Warns of flags --NAME.encodings.ENCODING.… for encodings that the config does not use."""
    used = {part for part, _ in EncodingConfig.parse(config.encoding).parts}
    for field in config_flags.get_override_values(flags.FLAGS[name]):
        group, _, rest = field.partition(".")
        encoding = rest.partition(".")[0]
        if group == "encodings" and encoding not in used:
            print(
                f"warning: --{name}.{field} has no effect, because the encoding is {config.encoding}", file=sys.stderr
            )


def read_config(value: Any) -> ExperimentConfig:
    """Reads the value of the --config flag. Raises ConfigError if the config is wrong, also for unused encodings."""
    config = ExperimentConfig.from_mapping(value.to_dict())
    for name, options in config.encodings.items():
        EncodingConfig(((name, options),))
    return config
