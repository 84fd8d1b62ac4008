"""Functions and modules of PyTorch as functions of NumPy arrays; torch is imported at a call."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cope_jax.testing.results import output


class from_torch:
    """Wraps a function or module of PyTorch: it takes NumPy arrays, and autograd gives gradients.

    Integers become int64. `check` wraps modules itself; wrap functions, and `step`.

    >>> wrapped = from_torch(lambda x: x * 2)
    >>> wrapped.__name__
    '<lambda>'
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the function with tensors in place of arrays, without gradients."""
        import torch

        with torch.no_grad():
            return self.function(
                *map(_tensor, arguments),
                **{name: _tensor(value) for name, value in keywords.items()},
            )

    def gradients(self, arrays: Sequence[Any], dout: Any, **keywords: Any) -> Any:
        """Returns the gradients by the arrays, or by the parameters if all arrays are integers."""
        import torch

        tensors = [_tensor(array) for array in arrays]
        floats = {n: t.requires_grad_() for n, t in enumerate(tensors) if t.is_floating_point()}
        learned = floats or {
            name: parameter
            for name, parameter in getattr(self.function, "named_parameters", list)()
            if parameter.requires_grad
        }
        result = self.function(*tensors, **{n: _tensor(value) for n, value in keywords.items()})
        if not learned:
            return {}
        out, some = output(result), list(learned.values())
        pulled = torch.autograd.grad(out, some, _tensor(dout).to(out.dtype), allow_unused=True)
        gradients = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(learned.items(), pulled, strict=True)
        }
        return [gradients.get(n) for n in range(len(tensors))] if floats else gradients


def wrapped(function: Any) -> Any:
    """Wraps a module of PyTorch; anything else is returned as it is."""
    torch = sys.modules.get("torch")
    is_module = torch is not None and isinstance(function, torch.nn.Module)
    return from_torch(function) if is_module else function


def _tensor(value: Any) -> Any:
    """Returns a tensor if the value is an array of NumPy, else the value."""
    import torch

    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    wide = np.int64 if np.issubdtype(value.dtype, np.integer) else value.dtype
    return torch.from_numpy(np.array(value, wide))
