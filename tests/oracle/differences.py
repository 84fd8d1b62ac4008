"""Gradients by central differences."""

from collections.abc import Callable, Mapping

import numpy as np


def gradients(
    function: Callable[[Mapping[str, np.ndarray]], float], at: Mapping[str, np.ndarray], step: float = 1e-5
) -> dict[str, np.ndarray]:
    """(f(x + h) − f(x − h)) / 2h for every entry of every array; exact to about 1e-10 where f is
    smooth in float64.

    >>> {name: g.round(6).tolist() for name, g in gradients(lambda v: v["a"][0] ** 2, {"a": np.array([3.0])}).items()}
    {'a': [6.0]}
    """
    at = {name: np.array(value, np.float64) for name, value in at.items()}
    result = {}
    for name, value in at.items():
        gradient = np.zeros(value.shape)
        for index in np.ndindex(value.shape):
            kept = value[index]
            value[index] = kept + step
            above = function(at)
            value[index] = kept - step
            below = function(at)
            value[index] = kept
            gradient[index] = (above - below) / (2 * step)
        result[name] = gradient
    return result
