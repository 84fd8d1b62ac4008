"""Maps names to classes, with errors that list the choices."""

import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cope_jax.errors import ConfigError

T = TypeVar("T")


def unknown(kind: str, name: object, choices: Iterable[str], hint: str = "") -> ConfigError:
    """The error for an unknown name; it suggests the nearest choices, or gives the `hint`, and
    lists all choices.

    >>> str(unknown("encoding", "rop", ["cope", "rope"]))
    "unknown encoding 'rop': did you mean 'rope'? Choose from cope, rope"
    >>> str(unknown("encoding", "kope", ["cope", "rope"]))
    "unknown encoding 'kope': did you mean 'cope' or 'rope'? Choose from cope, rope"
    >>> str(unknown("encoding", "CoPE", ["cope", "rope"]))
    "unknown encoding 'CoPE': did you mean 'cope'? Choose from cope, rope"
    >>> str(unknown("cell", "LSTN", ["GRU", "LSTM"]))
    "unknown cell 'LSTN': did you mean 'LSTM'? Choose from GRU, LSTM"
    >>> str(unknown("encoding", "my-own", ["cope", "rope"], "load its file, or "))
    "unknown encoding 'my-own': load its file, or choose from cope, rope"
    >>> str(unknown("split", "dense", ["pass_100", "pass_20"]))
    "unknown split 'dense': choose from pass_20, pass_100"
    """
    choices = sorted(choices, key=_natural)
    nearest = [*map(repr, _near(str(name), choices))]
    near = " or ".join(filter(None, (", ".join(nearest[:-1]), *nearest[-1:])))
    if not choices:
        return ConfigError(f"unknown {kind} {abridged(name)}: no {kind} exists, so leave it out")
    advice = f"did you mean {near}? Choose from" if near else f"{hint}choose from"
    return ConfigError(f"unknown {kind} {abridged(name)}: {advice} {', '.join(choices)}")


def _near(name: str, choices: Iterable[str]) -> list[str]:
    """Returns the choices most like a name; those with the same letters, if any, come first."""
    choices, name = {choice.lower(): choice for choice in choices}, name.lower()
    swapped = [choice for choice in choices if sorted(choice) == sorted(name)]
    for among in (swapped, choices):
        likeness = {x: difflib.SequenceMatcher(None, x, name).ratio() for x in among}
        nearest = max(likeness.values(), default=0.0)
        if nearest >= 0.6:
            return [choices[x] for x in among if likeness[x] == nearest]
    return []


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that compares numbers within names by value."""
    return [
        (not run.isdecimal(), int(run) if run.isdecimal() else 0, run)
        for run in re.split(r"(\d+)", name)
    ]


class Registry(Generic[T]):
    """A table from names to classes or functions of one kind; `hint` is part of an error without a
    name that is near.

    >>> shapes = Registry("shape")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.names()
    ('square',)
    >>> shapes.get("circle")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown shape 'circle': choose from square
    """

    def __init__(self, kind: str, hint: str = ""):
        self.kind, self.hint = kind, hint
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Returns a decorator that registers a class or function under `name`.

        If another class has this name already, the decorator raises ValueError. If the same class
        is registered again, as when a notebook cell is executed twice, the new class replaces the
        old class.
        """

        def enter(entry: T) -> T:
            old = self._entries.get(name)
            if old is not None and _origin(old) != _origin(entry):
                raise ValueError(
                    f"{self.kind} {name!r} is registered already, by {_origin(old)}: choose another name"
                )
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """Returns the entry called `name`.

        Raises:
          ConfigError: no entry has this name; the message lists all names.
        """
        if not isinstance(name, str):
            raise ConfigError(f"the name of a {self.kind} must be text, got {abridged(name)}")
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries, self.hint)
        return self._entries[name]

    def forget(self, module: str) -> None:
        """Removes the entries of a module."""
        entries = self._entries.items()
        self._entries = {name: entry for name, entry in entries if _module(entry) != module}

    @contextlib.contextmanager
    def kept_after_errors(self) -> Iterator[None]:
        """Restores the entries if the `with` block raises."""
        entries = dict(self._entries)
        try:
            yield
        except BaseException:
            self._entries = entries
            raise

    def names(self) -> tuple[str, ...]:
        """Returns all names, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _module(entry: Any) -> str:
    return str(entry.__module__)


def _origin(entry: Any) -> str:
    return f"{_module(entry)}.{entry.__qualname__}"


C = TypeVar("C")


def configure(cls: type[C], options: Mapping[str, Any], owner: str) -> C:
    """Builds the config dataclass `cls` from `options`; checks names and types, also nested.

    An int is accepted for a float field, and a list for a tuple; no other type is converted. A
    wrong name or type raises ConfigError. `owner`, such as "rope", is the name in the error
    message.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     base: float = 1.0
    >>> configure(Config, {"base": 2}, "rope")
    Config(base=2.0)
    >>> configure(Config, {"bas": 2}, "rope")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown option of rope 'bas': did you mean 'base'? Choose from base
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # C is always a dataclass
    values = {}
    for name, value in options.items():
        if name not in fields:
            raise unknown(f"option of {owner}", name, fields)
        values[name] = _checked_field(value, cls, fields[name], owner)
    return cls(**values)


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The type of each field of a config dataclass, whose annotations may be text."""
    try:
        return get_type_hints(cls)
    except Exception:  # a name that only a type checker knows
        return {field.name: field.type for field in dataclasses.fields(cls)}


def _checked_field(value: Any, cls: type, field: dataclasses.Field[Any], owner: str) -> Any:
    try:
        return checked(value, field_types(cls)[field.name], f"{owner}.{field.name}")
    except ConfigError:
        # A default is always valid, such as infinity for no limit.
        if type(value) is type(field.default) and value in (field.default,):
            return value
        raise


_ODD = re.compile(r"(?i)(?<!\w)(?:[\d.][\w.]*_|0[xob])|(?![0-9])\d")


def check_plain_numbers(text: str, source: str) -> None:
    """ConfigError if a number in `text` is not a plain decimal; quoted text may be anything.

    >>> check_plain_numbers("(1000, -1e-3, 'run_1_2')", "--config.task.options.lengths")
    >>> check_plain_numbers("1_000", "--seeds")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: --seeds needs plain decimals, such as 1000 and 1e-3, not 1_000
    """
    if _ODD.search(re.sub(r"'[^']*'|\"[^\"]*\"", "", text)):
        raise ConfigError(
            f"{source} needs plain decimals, such as 1000 and 1e-3, not {text.strip()}"
        )


def check_at_least(
    least: float, owner: str, most: int = 2**31 - 1, /, **values: float | None
) -> None:
    """ConfigError for a value that is NaN, infinite, below `least`, or an int above `most`.

    The default of `most` is for sizes and counts, which are int32 on devices; seeds may be larger.

    >>> check_at_least(1, "decoder", num_layers=0)
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: decoder.num_layers must be at least 1, got 0
    """
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ConfigError(
                f"{owner}.{name} must be a number, got {abridged(value)} of type {type(value).__name__}"
            )
        if value is not None and not least <= value < math.inf:  # `not` makes NaN an error too
            finite = " and finite" if value == math.inf else ""
            raise ConfigError(f"{owner}.{name} must be at least {least}{finite}, got {value}")
        if isinstance(value, int) and value > most:
            raise ConfigError(f"{owner}.{name} must be at most {most:,}, got {value:,}")


def check_seeds(seeds: Any, owner: str) -> None:
    """ConfigError unless `seeds` are a tuple of distinct ints that an int32 of a device can hold.

    >>> check_seeds((0, 1), "a cell")
    """
    if (
        not isinstance(seeds, tuple)
        or not seeds
        or not all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
        or len({*seeds}) < len(seeds)
    ):
        raise ConfigError(
            f"the seeds of {owner} must be whole numbers of at least 0, below 2³¹ and distinct, such as (0, 1), "
            f"not {abridged(seeds)}"
        )


def check_tokens(name: str, tokens: Any, vocab_size: int) -> Any:
    """Returns tokens as an array `[L]`.

    ConfigError: they are no integers, or one is outside of the vocabulary.
    """
    import numpy as np  # here, because what only lists names does without it

    try:
        listed = (
            [] if hasattr(tokens, "shape") else [*tokens]
        )  # an array shows booleans by its type
        array = np.asarray(tokens if hasattr(tokens, "shape") else listed)
        # Integers of more than 64 bits are objects.
        whole = array.dtype.kind in "iu" or all(isinstance(token, int) for token in array)
        booleans = any(isinstance(token, bool | np.bool_) for token in listed)
    except (TypeError, ValueError):
        array, whole, booleans = np.array(None), False, False
    if array.ndim != 1 or not whole or booleans:
        raise ConfigError(f"{name}: tokens must be a list of integers, got {abridged(tokens)}")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ConfigError(
            f"{name}: token {outside[0]} is outside of the vocabulary of {vocab_size} tokens; give tokens from 0 to "
            f"{vocab_size - 1}"
        )
    return array.astype(int, copy=False)


def check_unused(config: Any, owner: str, **fields: str) -> None:
    """Raises ConfigError if a field that has no effect is not its default.

    Args:
      config: the dataclass.
      owner: what error messages call it.
      **fields: the names of fields without effect, each with the reason.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     form: str = "table"
    ...     slope: float = 1.0
    >>> check_unused(Config(slope=0.5), "cope", slope="without form=slope")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: cope.slope has no effect without form=slope: leave it out
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, reason in fields.items():
        if getattr(config, name) != defaults[name]:
            raise ConfigError(f"{owner}.{name} has no effect {reason}: leave it out")


def check_fields(config: Any, owner: str) -> None:
    """Checks each field of a config against its annotation, by `checked`; for `__post_init__`.

    The default of a field is always allowed, such as infinity.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     norm: Literal["layer", "rms"] = "layer"
    ...     def __post_init__(self):
    ...         check_fields(self, "block")
    >>> Config("rsm")
    Traceback (most recent call last):
    ...
    cope_jax.errors.ConfigError: unknown block.norm 'rsm': did you mean 'rms'? Choose from layer, rms
    """
    for field in dataclasses.fields(config):
        value = _checked_field(getattr(config, field.name), type(config), field, owner)
        object.__setattr__(config, field.name, value)  # the dataclass is frozen


def checked(value: Any, kind: Any, where: str) -> Any:
    """Returns `value` as an object of the type `kind`, the annotation of a field or an argument.

    An int becomes a float, a list a tuple, a mapping a config dataclass, and a scalar of NumPy or
    JAX a number of Python. Nothing else is converted: True is no int, and 2.0 is no int. A kind
    that `isinstance` does not understand, such as a type variable, is not checked.

    >>> checked(2, float | None, "generate.temperature")
    2.0

    Raises:
      ConfigError: the value has another type, or is too large; the message begins with `where`.
    """
    choices = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    for choice in choices:
        fitting = _as_kind(value, choice, where)
        if fitting is not _OTHER:
            return fitting
    if get_origin(kind) is Literal:
        raise unknown(where, value, map(str, get_args(kind)))
    names = " or ".join(
        "None" if c is types.NoneType else getattr(c, "__name__", str(c)) for c in choices
    )
    value = _number(value)
    raise ConfigError(
        f"{where} must be {names}, got {abridged(value)} of type {type(value).__name__}"
    )


_OTHER = object()
"""`_as_kind` returns it for a value of another kind."""


def _as_kind(given: Any, kind: Any, where: str) -> Any:
    """The value as one kind, which is no union; `_OTHER` if it is of another kind."""
    value = _number(given)
    plain, entries = get_origin(kind) or kind, get_args(kind)
    if plain is Literal:
        return (
            value
            if any(isinstance(value, type(entry)) and value == entry for entry in entries)
            else _OTHER
        )
    if isinstance(plain, type) and dataclasses.is_dataclass(plain) and isinstance(value, Mapping):
        return configure(plain, value, where)
    if plain is tuple and isinstance(value, tuple | list):
        kinds = (
            entries[:1] * len(value) if entries[1:] == (...,) else entries or (Any,) * len(value)
        )
        if len(kinds) != len(value):
            return _OTHER
        return tuple(checked(entry, of, where) for entry, of in zip(value, kinds, strict=True))
    if plain in (int, float):
        return _as_number(value, plain, where)
    try:
        # A kind may be a scalar type of NumPy or JAX.
        return next((item for item in (value, given) if isinstance(item, plain)), _OTHER)
    except (
        TypeError
    ):  # `isinstance` does not understand `plain`, such as Any, a type variable, or text
        return given


def _number(value: Any) -> Any:
    """A scalar of NumPy or JAX as a number of Python; any other value as it is."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        with contextlib.suppress(TypeError):  # a random key, or a value that JAX traces
            return value.item()
    return value


def _as_number(value: Any, kind: type, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        return _OTHER
    if kind is int:
        if abs(value) >= 2**63:
            raise ConfigError(f"{where} must have at most 63 bits, got {value:.3g}")
        return value
    if isinstance(value, int):
        value = float(value) if abs(value) < 2**1023 else math.inf
    if not abs(value) < 2.0**127:  # a larger number has no float32
        raise ConfigError(
            f"{where} must be finite{' in float32' * math.isfinite(value)}, got {value}"
        )
    return value


def abridged(value: Any) -> str:
    """Returns a value as short text in one line, for an error's message.

    >>> import numpy as np
    >>> abridged(np.zeros((2, 3))), abridged("a name")
    ('numpy float64[2, 3]', "'a name'")
    """
    text, kind = repr(value), type(value)
    if isinstance(getattr(value, "shape", None), tuple) and value.shape and hasattr(value, "dtype"):
        library = kind.__module__.split(".")[0].removesuffix("lib")
        return f"{library} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if "\n" in text and not isinstance(value, list | tuple | dict):
        return kind.__name__
    return " ".join(text.split())[:200]
