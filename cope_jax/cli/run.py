"""Runs commands: parses their flags, and lets them work in local folders for those in buckets."""

import contextlib
import difflib
import io
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from logging import StreamHandler, getLogger
from typing import Any

from absl import app, flags, logging

import cope_jax
from cope_jax.cli import command_file, config_flags, interrupts
from cope_jax.cli.exits import clear_errors, no_late_words, one_line
from cope_jax.errors import ConfigError, Interrupted, NonFiniteError, StorageError
from cope_jax.registry import check_plain_numbers, unknown

FOLDERS = ("workdir", "model", "out")
"""The flags that name a folder."""
_FILES = 256
"""The number of files that may be open at a time; checkpoints and readers need this many."""
HELP = {"--help", "-help", "-h", "-?", "--helpshort"}
NARROWEST = 40
"""The least width of a help text; absl fails if a line has no room after its indent."""


def run_command() -> None:
    """Runs the command that the first argument names, with the other arguments as its flags."""
    _open_streams()
    with clear_errors():
        known = command_file.command_names()
        if sys.argv[1:2] == ["help"] and sys.argv[2:]:  # help NAME
            sys.argv[1:] = [*sys.argv[2:], "--help"]
        name = sys.argv[1] if sys.argv[1:] else "--help"
        if name in {"help", *HELP}:
            print(command_file.overview())
            sys.exit(0)
        if name == "--version":
            print(f"cope-jax {cope_jax.__version__}")
            sys.exit(0)
        if name not in known:
            raise unknown("command", name, known)
    sys.argv = [f"cope-jax {name}", *sys.argv[2:]]
    module, import_rest = command_file.load(name)
    run(module.main, getattr(module, "MIRRORED", FOLDERS), import_rest)


def run(
    main: Callable[[], None],
    mirrors: Sequence[str] = FOLDERS,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Parses the flags, prepares what a command with right flags needs, and calls `main`.

    `mirrors` names the flags whose folder may be in a bucket: the command then works in a local
    folder.
    """

    def guarded(argv: Sequence[str]) -> None:
        with clear_errors():
            _check_arguments(argv)
            _allow_open_files()
            prepare()
            if "jax" in sys.modules:
                from cope_jax.storage.programs import keep_programs

                keep_programs()
            with _mirrored_folders(mirrors):
                main()
            # Each process waits for the others here, because they need the first one.
            if jax := sys.modules.get("jax"):
                jax.distributed.shutdown()

    def parse(argv: Sequence[str]) -> list[str]:
        with clear_errors():
            if HELP & {argument.partition("=")[0] for argument in argv[1:]}:
                print(help_text(main.__module__, argv), flush=True)
                sys.exit(0)
            try:
                _check_text(argv)
                argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
                _check_names(argv)
                _load_encoding(argv)
                argv = config_flags.with_defaults(argv)
                rest = flags.FLAGS(argv)
                _check_numbers(argv)
                for name in flags.FLAGS:
                    config_flags.check_names(flags.FLAGS[name])
                _check_folders()
                _check_lists()
                return rest
            except flags.Error as error:
                raise _wrapped(error) or ConfigError(_flag_error(str(error))) from None
            except (AttributeError, KeyError) as error:
                raise ConfigError(config_flags.unknown_field(one_line(error), argv)) from error
            except (TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
                # other errors from reading a --config file and setting its fields
                raise ConfigError(one_line(error)) from error

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        interrupts.install()
    _open_streams()
    logging.set_verbosity(logging.WARNING)
    if not (ours := getLogger("cope_jax")).handlers:  # plain lines, without absl's prefix
        ours.addHandler(StreamHandler())
        ours.propagate = False
    getLogger("gcsfs").setLevel(logging.FATAL)  # it logs the errors that it raises
    # Orbax raises its errors and also logs them, with a traceback, from its own threads.
    orbax = f"{os.sep}orbax{os.sep}"
    logging.get_absl_logger().addFilter(lambda record: orbax not in record.pathname)
    with no_late_words():
        app.run(guarded, flags_parser=parse)


def _open_streams() -> None:
    """Opens stdout and stderr if closed, and lets them replace characters they do not have."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started the command
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in (
            "strict",
            "surrogateescape",
        ):
            # A terminal or file may not support every character.
            stream.reconfigure(errors="replace")


def _check_text(argv: Sequence[str]) -> None:
    """Refuses names of files that are not UTF-8, because results and messages name them."""
    for word in argv[1:]:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            shown = word.encode(errors="backslashreplace").decode()
            raise ConfigError(
                f"{shown} is not UTF-8: rename the file or folder, or convert the text"
            )


def _check_names(argv: Sequence[str]) -> None:
    """Refuses unknown flags, as absl does, but before the values of flags are read: a config needs
    JAX.
    """
    known = flags.FlagValues()
    for name in flags.FLAGS:
        boolean = flags.FLAGS[name].boolean
        define = flags.DEFINE_boolean if boolean else flags.DEFINE_string
        define(name, None, "", flag_values=known)
    words = itertools.pairwise(["", *argv])
    _check_arguments(known([word for before, word in words if not _is_of_field(before, word)]))


def _is_of_field(before: str, word: str) -> bool:
    """True for a flag of a field of a config, and for its value, a word of its own."""
    is_value = _sets_field(before) and "=" not in before and not word.startswith("--")
    return is_value or _sets_field(word)


def _sets_field(word: str) -> bool:
    """True for a flag of a field of a config, such as --config.training.steps."""
    fields = tuple(f"{name}." for name in config_flags.names())
    return word.startswith("-") and word.lstrip("-").removeprefix("no").startswith(fields)


def _check_arguments(argv: Sequence[str]) -> None:
    """Refuses words that belong to no flag."""
    if argv[1:]:
        name, equals, _ = argv[1].partition("=")
        is_flag = equals and (name in flags.FLAGS or _sets_field(f"--{name}"))
        hint = "give all options as flags, names of a list with commas between them, see --help"
        hint = f"write {shlex.quote(f'--{argv[1]}')}" if is_flag else hint
        raise ConfigError(f"unexpected argument {argv[1]!r}: {hint}")


def _load_encoding(argv: Sequence[str]) -> None:
    """Loads the file of --encoding before flags are read, because a config may name its encodings."""
    for word, following in itertools.pairwise([*argv[1:], ""]):
        name, equals, text = word.lstrip("-").partition("=")
        if name == "encoding" and word.startswith("-"):
            from cope_jax import encodings

            encodings.load(text if equals else following)


def _check_lists() -> None:
    """Refuses a list that is empty or has an empty item; () empties a field of a config."""
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        empty = value == [] != flags.FLAGS[name].default and "." not in name
        if isinstance(value, list) and (empty or "" in value):
            mistake = "has an empty item" if value[1:] else "is empty, as with an unset variable"
            raise ConfigError(f"--{name} {mistake}: give a value, or omit the flag")


def _allow_open_files() -> None:
    """Raises the limit of open files, if it is low. ConfigError: that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        if 0 <= hard < _FILES:
            raise ConfigError(
                f"only {hard} files may be open at a time: allow at least {_FILES} with `ulimit -n`"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))


def _check_numbers(argv: Sequence[str]) -> None:
    """Refuses numbers that only Python reads as such: 1_000, 0x10."""
    for word, following in itertools.pairwise([*argv[1:], ""]):
        name, equals, text = word.lstrip("-").partition("=")
        leaves = _leaves(flags.FLAGS[name].value) if name in flags.FLAGS else []
        # Not bool, which the next word does not belong to.
        if any(type(leaf) in (int, float) for leaf in leaves):
            check_plain_numbers(text if equals else following, f"--{name}")


def _leaves(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple)
    return [leaf for inner in values for leaf in _leaves(inner)] if nested else [value]


def _check_folders() -> None:
    """Refuses folders that are the sign of a mistake in the shell."""
    for name in FOLDERS:
        value = flags.FLAGS[name].value if name in flags.FLAGS else None
        if value == "":
            raise ConfigError(
                f"--{name} is empty, as with an unset variable: give a folder, or . for the current one"
            )
        if isinstance(value, str) and value.startswith("~"):
            raise ConfigError(
                f"the shell does not replace ~ in --{name}={value}: write $HOME, or ./~ for that name"
            )


@contextlib.contextmanager
def _mirrored_folders(names: Sequence[str]) -> Iterator[None]:
    """Replaces folders in buckets by local ones for the command: see `storage.mirror`."""
    from cope_jax.storage.files import in_bucket
    from cope_jax.storage.mirror import mirrored

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
    """The help: the command's docstring, its flags, and the fields of configs that `argv` names."""
    main = sys.modules[module].__doc__ or ""
    home = argv[0] if module == "__main__" else module
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    # Without the heading, which is a path.
    flag_lines = flags.FLAGS.module_help(home).strip().partition("\n")[2]
    text = f"{main.strip()}\n\nFlags:\n{flag_lines}\n\n"
    return text + config_flags.help_of_fields(home, argv) + command_file.MORE


def _wrapped(error: BaseException | None) -> ConfigError | None:
    """The innermost ConfigError of a chain, or None.

    Flag libraries wrap the ConfigError of a --config file.
    """
    innermost = None
    while error is not None:
        innermost = error if isinstance(error, ConfigError) else innermost
        error = error.__cause__ or error.__context__
    return innermost


def _own_flags() -> list[str]:
    """The flags of this project, as a user writes them, without those of absl."""
    modules = flags.FLAGS.flags_by_module_dict().items()
    return [
        f"--{flag.name}" for module, listed in modules if "absl" not in module for flag in listed
    ]


def _flag_error(message: str) -> str:
    missing = re.findall(r"flag --(\w+)=None: ", message)
    if missing:
        return f"missing {' and '.join(f'--{name}' for name in sorted(missing))}; see --help"
    name = re.match(r"Unknown command line flag '([^']+)'", message)
    if name:
        flag, dot, field = name[1].partition(".")
        close = difflib.get_close_matches(f"--{flag}", _own_flags(), n=1)
        mistyped = difflib.get_close_matches(f"--{flag}", close, cutoff=0.85)
        near = [f"{known}{dot}{field}" for known in close]
        if not mistyped and "config" in flags.FLAGS:
            known_field = config_flags.field_that_ends(name[1])
            near = [known_field] if known_field else near
        hint = f": did you mean {near[0]}? See" if near else "; see"
        return f"unknown flag --{name[1]}{hint} --help"
    number = re.match(
        r"flag (--\S+?=.*): (invalid literal for int|could not convert string to float)", message
    )
    if number:
        kind = "a whole number" if number[2].endswith("int") else "a number"
        return f"{number[1]}: the value must be {kind}; see --help"
    return f"{' '.join(message.split())}; see --help"
