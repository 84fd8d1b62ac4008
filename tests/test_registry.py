"""Names to classes, and options to configs: every kind of field, and every mistake."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Optional, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.registry import (
    Registry,
    check_at_least,
    check_fields,
    configure,
    field_types,
    unknown,
)
from cope_jax.training import config_files


def registry(*names):
    table = Registry("shape")
    for name in names:
        table.register(name)(type(name, (), {}))
    return table


def test_names_are_sorted_and_looked_up():
    table = registry("square", "circle")
    assert table.names() == tuple(table) == ("circle", "square")
    assert table.get("square").__name__ == "square"
    assert "square" in table and "triangle" not in table and 3 not in table


def test_the_decorator_returns_the_class():
    table = Registry("shape")

    @table.register("square")
    class Square: ...

    assert table.get("square") is Square


@pytest.mark.parametrize(
    "names, name, message",
    [
        (
            ["circle", "square"],
            "squire",
            "unknown shape 'squire': did you mean 'square'? Choose from circle, square",
        ),
        (
            ["cope", "pope"],
            "cpoe",
            "unknown shape 'cpoe': did you mean 'cope'? Choose from cope, pope",
        ),
        (
            ["cope", "pope"],
            "CPOE",
            "unknown shape 'CPOE': did you mean 'cope'? Choose from cope, pope",
        ),
        (["cope", "rope"], "eopc1", "unknown shape 'eopc1': choose from cope, rope"),
        (["cope", "elope"], "epoc", "unknown shape 'epoc': choose from cope, elope"),
        (["square", "circle"], "xyz", "unknown shape 'xyz': choose from circle, square"),
        ([], "square", "unknown shape 'square': no shape exists, so leave it out"),
    ],
)
def test_an_unknown_name_lists_the_choices(names, name, message):
    with pytest.raises(ConfigError) as error:
        registry(*names).get(name)
    assert str(error.value) == message


def test_a_name_that_is_no_text_is_unknown():
    assert str(unknown("shape", None, ["b", "a"])) == "unknown shape None: choose from a, b"
    assert str(unknown("size", 3, ["16", "8", "all"])) == "unknown size 3: choose from 8, 16, all"
    with pytest.raises(ConfigError, match=r"^the name of a shape must be text, got \[1\]$"):
        Registry("shape").get([1])


def test_a_second_class_under_one_name_is_an_error():
    table = Registry("shape")

    @table.register("square")
    class Square: ...

    with pytest.raises(
        ValueError, match=r"shape 'square' is registered already, by .*Square"
    ) as error:

        @table.register("square")
        class Other: ...

    assert not isinstance(error.value, ConfigError)
    assert table.get("square") is Square


def test_a_notebook_cell_may_run_twice():
    """The same class, defined again, takes the place of the first."""
    table = Registry("shape")

    def cell():
        @table.register("square")
        class Square: ...

        return Square

    first, second = cell(), cell()
    assert first is not second and table.get("square") is second and table.names() == ("square",)


def test_a_class_of_the_same_name_in_another_file_is_another():
    table = Registry("shape")
    first, second = type("Square", (), {}), type("Square", (), {"__module__": "elsewhere"})
    table.register("square")(first)
    with pytest.raises(ValueError, match="registered already"):
        table.register("square")(second)


def test_functions_are_entries_too():
    table = Registry("function")
    table.register("unknown")(unknown)
    assert table.get("unknown") is unknown


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 1
    share: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer:
    whole: int = 0
    real: float = 0.0
    yes: bool = False
    text: str = ""
    anything: Any = None
    choice: Literal["one", "two", 3] = "one"
    numbers: tuple[float, ...] = ()
    inners: tuple[Inner, ...] = ()
    inner: Inner = Inner()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    bare: dict = dataclasses.field(default_factory=dict)
    maybe_whole: int | None = None
    maybe_real: float | None = None
    maybe_text: str | None = None
    maybe_numbers: tuple[float, ...] | None = None
    whole_or_text: int | str = 0


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("whole", 3, 3),
        ("real", 2.5, 2.5),
        ("real", 2, 2.0),
        ("yes", True, True),
        ("text", "a", "a"),
        ("anything", [object], [object]),
        ("choice", "two", "two"),
        ("choice", 3, 3),
        ("numbers", [1, 2.5], (1.0, 2.5)),
        ("numbers", (1, 2.5), (1.0, 2.5)),
        ("numbers", [], ()),
        ("inners", [{"size": 3}, Inner(4)], (Inner(3), Inner(4))),
        ("inner", {"size": 3, "share": 1}, Inner(3, 1.0)),
        ("inner", Inner(4), Inner(4)),
        ("options", {"a": [1]}, {"a": [1]}),
        ("bare", {1: 2}, {1: 2}),
        ("maybe_whole", None, None),
        ("maybe_whole", 3, 3),
        ("maybe_real", 3, 3.0),
        ("maybe_real", 3.5, 3.5),
        ("maybe_text", None, None),
        ("maybe_text", "a", "a"),
        ("maybe_numbers", None, None),
        ("maybe_numbers", [1], (1.0,)),
        ("whole_or_text", 3, 3),
        ("whole_or_text", "a", "a"),
    ],
)
def test_values_that_fit(name, value, expected):
    config = configure(Outer, {name: value}, "outer")
    actual = getattr(config, name)
    assert actual == expected and type(actual) is type(expected)
    assert dataclasses.replace(config, **{name: getattr(Outer(), name)}) == Outer()
    if isinstance(actual, tuple):
        assert [type(item) for item in actual] == [type(item) for item in expected]
    if isinstance(actual, Inner):
        assert type(actual.share) is float


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("whole", 2.0, "outer.whole must be int, got 2.0 of type float"),
        ("whole", True, "outer.whole must be int, got True of type bool"),
        ("whole", "3", "outer.whole must be int, got '3' of type str"),
        ("whole", None, "outer.whole must be int, got None of type NoneType"),
        ("real", True, "outer.real must be float, got True of type bool"),
        ("real", "1", "outer.real must be float, got '1' of type str"),
        ("yes", 1, "outer.yes must be bool, got 1 of type int"),
        ("text", 1, "outer.text must be str, got 1 of type int"),
        (
            "choice",
            "tow",
            "unknown outer.choice 'tow': did you mean 'two'? Choose from 3, one, two",
        ),
        ("choice", ["one"], "unknown outer.choice ['one']"),
        ("numbers", 1.0, "outer.numbers must be tuple, got 1.0"),
        ("numbers", "12", "outer.numbers must be tuple, got '12'"),
        ("numbers", ["a"], "outer.numbers must be float, got 'a' of type str"),
        ("inners", [3], "outer.inners must be Inner, got 3 of type int"),
        ("inner", 3, "outer.inner must be Inner, got 3 of type int"),
        ("inner", {"size": 2.5}, "outer.inner.size must be int, got 2.5 of type float"),
        (
            "inner",
            {"sizes": 2},
            "unknown option of outer.inner 'sizes': did you mean 'size'? Choose from share, size",
        ),
        ("options", 3, "outer.options must be dict, got 3 of type int"),
        ("bare", 3, "outer.bare must be dict, got 3 of type int"),
        ("maybe_whole", 2.5, "outer.maybe_whole must be int or None, got 2.5 of type float"),
        ("maybe_whole", True, "outer.maybe_whole must be int or None, got True of type bool"),
        ("maybe_real", True, "outer.maybe_real must be float or None, got True of type bool"),
        ("maybe_text", 3, "outer.maybe_text must be str or None, got 3 of type int"),
        ("maybe_numbers", ["a"], "outer.maybe_numbers must be float, got 'a' of type str"),
        ("maybe_numbers", 1.0, "outer.maybe_numbers must be tuple or None, got 1.0 of type float"),
        ("real", float("inf"), "outer.real must be finite, got inf"),
        ("real", 10**400, "outer.real must be finite, got inf"),
        ("maybe_real", float("nan"), "outer.maybe_real must be finite, got nan"),
        ("whole", -(2**63), "outer.whole must have at most 63 bits, got -9.22e+18"),
        ("whole_or_text", 1.5, "outer.whole_or_text must be int or str, got 1.5 of type float"),
        ("wole", 1, "unknown option of outer 'wole': did you mean 'whole'?"),
    ],
)
def test_values_that_do_not(name, value, message):
    with pytest.raises(ConfigError) as error:
        configure(Outer, {name: value}, "outer")
    assert message in str(error.value) and "\n" not in str(error.value)


T = TypeVar("T")


class Shaped(Protocol):
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Own:
    """Fields that a config of somebody else may have; each default is allowed."""

    textual: "float" = 1
    either: "int | None" = None
    old: Optional[float] = 2  # noqa: UP045
    nested: Inner | None = None
    pairs: tuple = (1, "a")
    cap: float = math.inf
    sloppy: float = None  # type: ignore[assignment]
    names: Sequence[str] = ("a",)
    table: Mapping[str, float] = dataclasses.field(default_factory=dict)
    function: Callable[[int], int] = abs
    unknown: T = 3  # type: ignore[valid-type]
    shaped: Shaped | None = None
    scalar: np.float32 = np.float32(0.5)
    array: jax.Array = dataclasses.field(default_factory=lambda: jnp.float32(1))
    norm: Literal["layer", "rms"] = "layer"

    def __post_init__(self):
        check_fields(self, "own")


@dataclasses.dataclass(frozen=True)
class ForTypeCheckers:
    base: "float" = 1.0
    other: "Missing" = 2  # noqa: F821


def test_annotations_of_every_kind():
    """An annotation may be text; what `isinstance` does not understand is not checked."""
    values = {
        "textual": 2,
        "either": 3,
        "nested": {"share": 1},
        "pairs": [1, 2, 3],
        "cap": math.inf,
        "sloppy": None,
    }
    values |= {"unknown": "x", "shaped": [], "names": ["b"]}
    config = configure(Own, values, "own")
    assert dataclasses.replace(Own(), **values | {"nested": Inner(1, 1.0)}) == config
    assert type(config.textual) is type(config.nested.share) is type(config.old) is float
    assert (config.pairs, type(config.scalar)) == (
        (1, 2, 3),
        np.float32,
    ) and config.array.dtype == jnp.float32
    assert configure(ForTypeCheckers, {"base": "x", "other": []}, "own") == ForTypeCheckers("x", [])
    assert field_types(Own)["textual"] is float
    assert config_files._fields(ForTypeCheckers(other=None)).other is None  # what flags can set
    for name, wrong in {
        "textual": "x",
        "either": 2.5,
        "nested": 3,
        "pairs": 1,
        "cap": math.nan,
        "table": 3,
    }.items():
        with pytest.raises(ConfigError, match=rf"^own\.{name} must be "):
            dataclasses.replace(Own(), **{name: wrong})
    with pytest.raises(
        ConfigError, match=r"^unknown own\.norm numpy int64\[2\]: choose from layer, rms"
    ):
        configure(Own, {"norm": np.array([1, 2])}, "own")


def test_no_options_are_the_defaults():
    assert configure(Outer, {}, "outer") == Outer()


def test_the_bound_itself_and_no_value_are_allowed():
    check_at_least(1, "block", heads=1, width=2, length=None)


def test_a_size_has_31_bits_unless_another_bound_is_given():
    check_at_least(1, "block", width=2**31 - 1, share=1e12)
    check_at_least(0, "data", 2**63 - 1, seed=2**40)
    with pytest.raises(
        ConfigError, match=r"^block\.width must be at most 2,147,483,647, got 2,147,483,648$"
    ):
        check_at_least(0, "block", width=2**31)


def test_infinity_is_an_error():
    with pytest.raises(ConfigError, match=r"^block\.width must be at least 0 and finite, got inf$"):
        check_at_least(0, "block", width=float("inf"))


@pytest.mark.parametrize("value", [0, -3, 0.5, float("nan")])
def test_a_value_below_its_bound_is_an_error(value):
    with pytest.raises(ConfigError) as error:
        check_at_least(1, "block", heads=1, width=value)
    assert str(error.value) == f"block.width must be at least 1, got {value}"
