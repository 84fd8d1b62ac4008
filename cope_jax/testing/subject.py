"""A function under test, called with NumPy arrays, and what it supports."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.testing.inputs import Arrays, Inputs
from cope_jax.testing.results import (
    Array,
    CallError,
    clear_errors,
    distance,
    output,
    shapes,
    to_numpy,
)

Adapter = str | Callable[[Array], Mapping[str, Any]]
"""The keyword that takes an array, or a function from the array to all keywords that it sets."""


class Gradient(NamedTuple):
    """A gradient: its name, and the index of the input that it belongs to, or None."""

    name: str
    input: int | None
    values: Array


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function under test; `cope_jax.testing.check` describes the attributes."""

    function: Callable[..., Any]
    inputs: Inputs
    length: int = 16
    batch: int = 4
    seed: int = 0
    causal: bool = True
    segments: Adapter | None = None
    positions: Adapter | None = None
    padding: Adapter | None = None
    mask: Adapter | None = None
    step: Callable[..., Any] | None = None
    blocks: Sequence[Any] | None = None
    devices: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    gradients: Callable[..., Any] | None = None
    shift: int | None = None
    lengths: Sequence[int] | None = None
    bfloat16: bool | None = None
    tolerance: float | None = None

    @property
    def name(self) -> str:
        """The name of the function in messages."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    @functools.cached_property
    def draws(self) -> tuple[Arrays, Arrays]:
        """Two sets of arrays `[batch, length, …]` that differ in every entry."""
        return self.inputs.two(self.seed, self.batch, self.length)

    @functools.cached_property
    def out(self) -> Array:
        """The output for the first arrays, without keywords."""
        return self.call(self.draws[0])

    @functools.cached_property
    def result(self) -> Any:
        """The result as the function returns it, from which its library and type are known."""
        with clear_errors(self.name, self.draws[0], {}):
            return output(self.function(*self.draws[0]))

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next number of the type of the result."""
        kind = str(getattr(self.result, "dtype", "float32")).rpartition(".")[2]
        bits = {"bfloat16": 7, "float16": 10, "float64": 52}
        return float(2.0 ** -bits.get(kind, 23))

    @property
    def short(self) -> bool:
        """Results have 16 bits: 100 roundings of bfloat16 are 78 % of a number."""
        return self.rounding > 1e-4

    @functools.cached_property
    def bound(self) -> float:
        """The largest error of an output: 100 roundings of the largest output, or 20 of 16 bits."""
        if self.tolerance is not None:
            return self.tolerance
        return (20 if self.short else 100) * self.rounding * _largest(self.out)

    @functools.cached_property
    def leak_bound(self) -> float:
        """The largest change of an output that must not change at all: of 16 bits, 4 roundings."""
        if self.tolerance is not None or not self.short:
            return self.bound
        return 4 * self.rounding * _largest(self.out)

    def gradient_bound(self, gradient: Array, leak: bool = False) -> float:
        """The largest error of an entry of a gradient, or the largest that must be 0.

        It is ten times that of an output; of 16 bits, 40 roundings, or 4 of what must be 0.
        """
        if self.tolerance is not None:
            return 10 * self.tolerance
        roundings = (4 if leak else 40) if self.short else 1000
        return roundings * self.rounding * _largest(gradient)

    def keywords(self, **data: Any) -> dict[str, Any]:
        """Returns the keywords that pass data of the names of adapters; others are left out."""
        given: dict[str, Any] = {}
        for name, array in data.items():
            adapter = getattr(self, name)
            if adapter is None:
                continue
            with clear_errors(f"the adapter {name}", [array], {}):
                more = {adapter: array} if isinstance(adapter, str) else adapter(array)
            if not isinstance(more, Mapping):
                raise CallError(
                    f"the adapter {name} must return a dict of keywords, got {type(more).__name__}"
                )
            given |= more
        return given

    def call(
        self,
        arrays: Sequence[Array],
        function: Callable[..., Any] | None = None,
        more: Mapping[str, Any] | None = None,
        **data: Any,
    ) -> Array:
        """Calls the function, or another one with the same arguments, and returns `[B, L, …]`.

        Raises:
          CallError: it raised an exception, or its result is no array with the axes B and L.
        """
        function, keywords = function or self.function, self.keywords(**data) | dict(more or {})
        with clear_errors(self.name, arrays, keywords):
            out = to_numpy(function(*arrays, **keywords))
        expected = arrays[0].shape[:2]
        if out.shape[:2] != expected:
            raise CallError(
                f"{self.name} returned shape {list(out.shape)} for inputs {shapes(arrays)}: it must "
                f"return [B, L, …] = [{expected[0]}, {expected[1]}, …]"
            )
        return out

    def callback(self, function: Callable[..., Any] | None) -> Any:
        """Returns the function that computes gradients of a function, or None."""
        given = self.gradients if function is None else None
        return given or getattr(function or self.function, "gradients", None)

    def differentiable(
        self,
        function: Callable[..., Any] | None = None,
        more: Mapping[str, Any] | None = None,
        **data: Any,
    ) -> bool:
        """Returns whether `pull` can compute gradients: of another function, by its result."""
        if self.callback(function) is not None:
            return True
        if not any(jnp.issubdtype(array.dtype, jnp.floating) for array in self.draws[0]):
            return False
        result = self.result
        if function is not None:
            result = output(function(*self.draws[0], **self.keywords(**data), **dict(more or {})))
        return isinstance(result, jax.Array)

    def pull(
        self,
        arrays: Sequence[Array],
        dout: Array,
        function: Callable[..., Any] | None = None,
        more: Mapping[str, Any] | None = None,
        **data: Any,
    ) -> list[Gradient]:
        """Returns the gradients of Σ dout·out: by the callback if there is one, else by JAX."""
        keywords = self.keywords(**data) | dict(more or {})
        callback = self.callback(function)
        with clear_errors(f"the gradient of {self.name}", arrays, keywords):
            if callback is None:
                return self._pull_in_jax(arrays, dout, function or self.function, keywords)
            results = callback(arrays, dout, **keywords)
            if isinstance(results, Mapping):
                of_arrays = [results.get(index) for index in range(len(arrays))]
                given = [i for i, result in enumerate(of_arrays) if result is not None]
                named = {n: g for n, g in results.items() if n not in given}
                return [
                    *(self._of_array(arrays, index, of_arrays[index]) for index in given),
                    *(Gradient(f"parameter {n}", None, to_numpy(g)) for n, g in named.items()),
                ]
            return self._by_inputs(arrays, results)

    def _by_inputs(self, arrays: Sequence[Array], results: Any) -> list[Gradient]:
        """Returns what a callback gives as gradients of the arrays."""
        if not isinstance(results, tuple | list) or len(results) != len(arrays):
            count = f" of {len(results)}" if isinstance(results, tuple | list) else ""
            raise CallError(
                f"gradients returned a {type(results).__name__}{count} for {len(arrays)} arrays: "
                "return a list of one gradient for each, None for integers, or a dict of parameters"
            )
        pulled = []
        for index, (array, result) in enumerate(zip(arrays, results, strict=True)):
            if not jnp.issubdtype(array.dtype, jnp.floating):
                continue
            pulled.append(self._of_array(arrays, index, result))
        return pulled

    def _of_array(self, arrays: Sequence[Array], index: int, result: Any) -> Gradient:
        """Returns the gradient of an array; CallError: it does not have its shape."""
        shape = None if result is None else list(to_numpy(result).shape)
        if shape != list(arrays[index].shape):
            words = "None" if shape is None else f"shape {shape}"
            raise CallError(
                f"gradients returned {words} for {self.inputs.name(index)}: return an array of "
                f"its shape {list(arrays[index].shape)}"
            )
        return Gradient(self.inputs.name(index), index, to_numpy(result))

    def _pull_in_jax(
        self, arrays: Sequence[Array], dout: Array, function: Any, keywords: Any
    ) -> list[Gradient]:
        indices = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]

        def out(*floats: Any) -> Any:
            values = [*arrays]
            for index, value in zip(indices, floats, strict=True):
                values[index] = value
            return output(function(*values, **keywords))

        value, pull = jax.vjp(out, *(jnp.asarray(arrays[index]) for index in indices))
        gradients = pull(jnp.asarray(dout, value.dtype))
        return [
            Gradient(self.inputs.name(index), index, to_numpy(gradient))
            for index, gradient in zip(indices, gradients, strict=True)
        ]


def _largest(values: Array) -> float:
    return float(np.abs(values).max(initial=0))


def _check_choices(subject: Subject) -> None:
    for name in ("segments", "positions", "padding", "mask"):
        adapter = getattr(subject, name)
        if not (adapter is None or isinstance(adapter, str) or callable(adapter)):
            raise ConfigError(f"{name} must be a keyword's name or a function, got {adapter!r}")
    for name in ("step", "devices", "reference", "gradients"):
        function = getattr(subject, name)
        if not (function is None or callable(function)):
            raise ConfigError(f"{name} must be a function, got {function!r}")
    for name in ("length", "batch", "seed", "shift"):
        number = getattr(subject, name)
        if not (isinstance(number, numbers.Integral) or (name == "shift" and number is None)):
            raise ConfigError(f"{name} must be a whole number, got {number!r}")
    if subject.seed < 0:
        raise ConfigError(f"seed must be at least 0, got {subject.seed}")
    most = subject.tolerance
    if most is not None and not (isinstance(most, numbers.Real) and most >= 0):
        raise ConfigError(f"tolerance must be a number of at least 0, got {most!r}")
    sizes = subject.lengths
    if sizes is not None and not (
        isinstance(sizes, list | tuple | range)
        and len(sizes) > 0
        and all(isinstance(n, int | np.integer) and 1 <= n < subject.length for n in sizes)
    ):
        raise ConfigError(
            f"lengths must be a list of whole numbers from 1 to length - 1 = {subject.length - 1}, "
            f"got {sizes!r}"
        )


def checked_subject(hint: str = "", **choices: Any) -> Subject:
    """Creates a subject, and calls its function, so that wrong input is one line.

    Raises:
      ConfigError: the function cannot be called, is random, or ignores its input.
    """
    subject = Subject(**choices)
    _check_choices(subject)
    if subject.batch < 2 or subject.length < 4:
        raise ConfigError(
            f"batch must be at least 2 and length at least 4, got {subject.batch} and "
            f"{subject.length}"
        )
    try:
        first, again = subject.out, subject.call(subject.draws[0])
        other = subject.call(subject.draws[1])
    except CallError as error:
        raise ConfigError(f"{error}{hint}") from error.__cause__
    if not np.isfinite(first).all():
        raise ConfigError(f"{subject.name} returns values that are not finite, without any keyword")
    apart = float(distance(first, again).max())
    if apart > subject.bound:
        raise ConfigError(
            f"{subject.name} is random: two calls with the same inputs differ by {apart:.2g}; turn "
            "dropout off, by eval() or deterministic=True, or fix the random key"
        )
    if float(distance(first, other).max()) <= subject.leak_bound:
        raise ConfigError(
            f"{subject.name} returns the same for all inputs, so no law says anything about it"
        )
    return subject
