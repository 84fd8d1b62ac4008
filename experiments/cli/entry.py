"""Starts every command: parses its flags and turns errors into one line."""

import contextlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from cope_jax.errors import ConfigError, NonFiniteError, StorageError, storage_reason
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig
from cope_jax.training.preemption import Interrupted

flags.disclaim_key_flags()  # a flag that is defined here belongs to the module that asks for it, whose --help shows it

_OTHERS = 3.0  # seconds that the other processes of a run may be behind the first one
TEXT = ("gensim", "h5py", "safetensors", "sklearn", "tokenizers")
"""Libraries of the extra "text", which are imported where they are needed."""


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Turns errors that the user can fix into one line and an exit status.

    2: wrong input; 3: a loss that is not finite; 4: the disk is full or read-only; 130: Ctrl-C; 143: SIGTERM.
    """
    try:
        yield
    except ConfigError as error:
        _leave(2, f"error: {error}")
    except NonFiniteError as error:
        _leave(3, f"error: {error}")
    except Interrupted as stop:
        _leave(stop.exit_code, str(stop))
    except KeyboardInterrupt:
        _leave(130, "interrupted; rerun the same command to resume")
    except ModuleNotFoundError as error:
        if error.name not in TEXT:
            raise
        _leave(2, f"error: {error.name} is not installed: pip install -e '.[text]'")
    except Exception as error:
        if isinstance(error, StorageError):
            _leave(4, f"error: {error}")
        if reason := storage_reason(error):
            _leave(4, f"error: {StorageError.of(getattr(error, 'filename', None) or 'the disk', reason)}")
        if traceback.extract_tb(error.__traceback__)[-1].filename.endswith("xla_bridge.py"):
            platforms = os.environ.get("JAX_PLATFORMS") or "not set"
            reason = _one_line(error) or "it is not installed"
            _leave(2, f"error: JAX cannot start its backend, JAX_PLATFORMS is {platforms} ({reason})")
        raise


def _leave(status: int, line: str) -> NoReturn:
    """Prints the line and exits; processes other than the first add their index."""
    several = jax.distributed.is_initialized()
    if several and jax.process_index() > 0:
        line = f"process {jax.process_index()}: {line}"
    print(line, file=sys.stderr, flush=True)
    if several and jax.process_index() == 0 and status == 2:
        time.sleep(_OTHERS)  # they find the same mistake, and JAX would abort them as soon as this process is gone
    if several and status == 4:
        # The others wait inside a checkpoint and do not learn of this error; an orderly exit would wait for them in
        # turn. JAX ends them when this process is gone.
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def no_late_words() -> Iterator[None]:
    """Closes stderr on exit, so that library threads that outlive an error add nothing to its one line.

    After Ctrl-C the process ends here: work that is still being computed or compiled would outlive the interpreter and
    crash.
    """
    try:
        yield
    except SystemExit as left:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if isinstance(left.__context__, KeyboardInterrupt) and not jax.distributed.is_initialized():
            with contextlib.suppress(OSError):  # the reader may be gone
                sys.stdout.flush()
            os._exit(130)
        raise


def run(main: Callable[[], None]) -> None:
    """Parses the flags and calls `main`."""

    def guarded(argv: Sequence[str]) -> None:
        with no_late_words(), clear_errors():
            if argv[1:]:
                raise ConfigError(f"unexpected argument {argv[1]!r}: all options are flags, see --help")
            main()
            jax.distributed.shutdown()  # of several processes each waits for the others, which would miss the first

    def parse(argv: Sequence[str]) -> list[str]:
        with clear_errors():
            try:
                return flags.FLAGS(argv)
            except flags.Error as error:
                raise _wrapped(error) or ConfigError(_flag_error(str(error))) from None
            except (AttributeError, KeyError) as error:
                raise ConfigError(_unknown_field(_one_line(error))) from error
            except (TypeError, ValueError, OSError, SyntaxError, ImportError) as error:
                # other errors from reading a --config file and setting its fields
                raise ConfigError(_one_line(error)) from error

    logging.set_verbosity(logging.WARNING)
    # Orbax raises its errors and also logs them, with a traceback, from its own threads.
    logging.get_absl_logger().addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    app.run(guarded, flags_parser=parse)


def _wrapped(error: BaseException | None) -> ConfigError | None:
    """The innermost ConfigError, which a --config file raised: flag libraries wrap it, even in an error of its type."""
    found = None
    while error is not None:
        found = error if isinstance(error, ConfigError) else found
        error = error.__cause__ or error.__context__
    return found


def _flag_error(message: str) -> str:
    missing = re.findall(r"flag --(\w+)=None: ", message)
    if missing:
        return f"missing {' and '.join(f'--{name}' for name in sorted(missing))}; see --help"
    return f"{' '.join(message.split())}; see --help"


def _unknown_field(text: str) -> str:
    """The message for a flag whose field the config does not have.

    >>> _unknown_field('stepz Did you mean "steps" instead of "stepz"?')
    "unknown field 'stepz' in a --config flag: did you mean 'steps'? See --help"
    """
    name, _, rest = text.partition(" ")
    close = re.search(r'Did you mean "(\w+)"', rest)
    if close:
        return "unknown field {!r} in a --config flag: did you mean {!r}? See --help".format(name.strip("'"), close[1])
    return f"unknown field in a --config flag: {text}; see --help"


def _one_line(error: BaseException) -> str:
    """The message of an error, without the quotes that each KeyError around it has added."""
    text: Any = error
    while isinstance(text, KeyError) and text.args:
        text = text.args[0]
    text = str(text)
    if isinstance(error, KeyError) or "\\'" in text:  # the repr of another error's message
        text = text.replace("\\n", " ").replace("\\'", "'").strip("'\"")
    return " ".join(text.split())


class _ConfigParser(flags.ArgumentParser[Any]):
    """Also finds a config file by its name."""

    def __init__(self, parser: flags.ArgumentParser[Any]):
        self._parser = parser

    def parse(self, text: str) -> Any:
        return self._parser.parse(config_files.find(text))

    def flag_type(self) -> str:
        return self._parser.flag_type()


def DEFINE_config(name: str, default: str | None = None, what: str = "") -> flags.FlagHolder[Any]:
    """Defines a flag for a config, whose fields become flags too; its help begins with `what`, the config's use."""
    path = None if default is None else config_files.find(default)
    holder = config_flags.DEFINE_config_file(
        name, path, f"{what}Name of a config in experiments/configs, such as quick, or path of a config file."
    )
    flags.FLAGS[name].parser = _ConfigParser(flags.FLAGS[name].parser)
    return holder


class _OldName(flags.Flag):  # type: ignore[type-arg]  # absl's class has no parameters when it runs
    """A flag that sets another one and prints a warning."""

    def __init__(self, old: str, new: str, values: flags.FlagValues):
        super().__init__(flags.ArgumentParser(), None, old, None, f"Old name of --{new}.")
        self._new, self._values = new, values

    def parse(self, argument: str) -> None:
        print(f"warning: --{self.name} is now --{self._new}; the next release removes the old name", file=sys.stderr)
        flag = self._values[self._new]
        flag.parse(",".join([*flag.value, argument]) if flag.present and isinstance(flag.value, list) else argument)
        flag.using_default_value = False


def renamed(old: str, new: str, values: flags.FlagValues = flags.FLAGS) -> None:
    """Makes --OLD an alias of the flag --NEW, with a warning on stderr; if --NEW is a list, each --OLD adds to it."""
    flags.DEFINE_flag(_OldName(old, new, values), values, module_name=__name__)


def read_config(value: Any) -> ExperimentConfig:
    """The config of the --config flag; ConfigError if its file is missing, or its config is wrong."""
    try:
        mapping = value.to_dict()
    except (OSError, AttributeError) as error:  # a file that cannot be read shows only now
        reason = str(error).splitlines()[-1].strip()
        raise ConfigError(f"--config must name a file whose get_config() returns a ConfigDict ({reason})") from error
    return ExperimentConfig.from_mapping(mapping)
