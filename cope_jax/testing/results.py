"""Calls and their results: errors of one line, outputs as NumPy, and distances."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cope_jax.errors import first_line

Array = np.ndarray[Any, Any]


class CallError(Exception):
    """A call of the function under test failed; the message is one line."""


class clear_errors:
    """Turns exceptions of a call into a CallError of one line."""

    def __init__(self, name: str, arrays: Sequence[Array], keywords: Mapping[str, Any]):
        self.name, self.arrays, self.keywords = name, arrays, keywords

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, CallError):
            return
        words = "".join(f", {keyword}=…" for keyword in self.keywords)
        hint = ""
        if isinstance(error, TypeError | AttributeError) and "ndarray" in str(error):
            hint = "; wrap it in jax.jit, or in cope_jax.testing.from_torch if it takes tensors"
        raise CallError(
            f"{self.name}({shapes(self.arrays)}{words}) raised {type(error).__name__}: "
            f"{first_line(error)}{hint}"
        ) from error


def output(result: Any) -> Any:
    """Returns the output among results: the first of a tuple, or the logits."""
    while isinstance(result, tuple | list) and result:
        result = result[0]
    return getattr(result, "logits", result)


def to_numpy(result: Any) -> Array:
    """Returns the output, of NumPy, JAX or PyTorch, as NumPy; one of 16 bits as float32.

    Raises:
      CallError: it is no array of real numbers.
    """
    result = output(result)
    if not hasattr(result, "shape"):
        raise CallError(f"the function returned a {type(result).__name__}: return an array")
    if hasattr(result, "detach"):  # a tensor of PyTorch
        result = result.detach().cpu()
        result = result.float() if result.element_size() == 2 else result
    array = np.asarray(result)
    if np.iscomplexobj(array):
        raise CallError(f"a result has the type {array.dtype}: return real numbers")
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def distance(left: Array, right: Array) -> Array:
    """Returns |left − right| `[B, L]`, the largest over the other axes; NaN counts as infinite.

    >>> distance(np.array([[[1.0, 2.0], [np.nan, 0.0]]]), np.zeros((1, 2, 2)))
    array([[ 2., inf]])

    Raises:
      CallError: their shapes differ in more than the first axis.
    """
    if left.shape[1:] != right.shape[1:]:
        raise CallError(f"a result has shape {list(left.shape)}, and {list(right.shape)} is right")
    with np.errstate(invalid="ignore"):
        apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return apart.max(axis=tuple(range(2, apart.ndim)), initial=0)


def shapes(arrays: Sequence[Array]) -> str:
    """Returns types and shapes of arrays, for messages."""
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
