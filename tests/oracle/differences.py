"""Gradients by central differences."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np


def gradients(
    function: Callable[[Mapping[str, np.ndarray]], float],
    at: Mapping[str, np.ndarray],
    step: float = 1e-5,
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


def slopes(
    function: Callable[[Mapping[str, np.ndarray]], float],
    at: Mapping[str, np.ndarray],
    gradients_of: Mapping[str, np.ndarray],
    count: int = 3,
    step: float = 1e-5,
) -> Iterator[tuple[str, float, float]]:
    """(name, slope by the gradient, slope by a central difference) along random directions, `count` for each array.

    A wrong entry of a gradient changes the slope along every direction, so a few directions find it as all entries of
    `gradients` do, in a small part of the time. The directions have entries ±1/√n and length 1: no point moves further
    than `step`.

    >>> ((name, slope, difference),) = slopes(lambda at: at["a"] ** 2, {"a": 3.0}, {"a": 6.0}, count=1)
    >>> name, abs(slope), abs(round(difference, 6))
    ('a', 6.0, 6.0)
    """
    at, rng = (
        {name: np.array(value, np.float64) for name, value in at.items()},
        np.random.default_rng(1),
    )
    for name, value in at.items():
        for _ in range(count):
            direction = rng.choice([-1.0, 1.0], value.shape) / max(value.size, 1) ** 0.5
            above, below = (
                function(at | {name: value + sign * step * direction}) for sign in (1, -1)
            )
            yield (
                name,
                float(np.sum(gradients_of[name] * direction)),
                float(above - below) / (2 * step),
            )
