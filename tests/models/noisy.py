"""Modules whose parameters all are random and matter: no bias is 0, no weights of a mix equal."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx


def noisy(
    build: Callable[[], nnx.Module], dtype: Any = np.float32, *, scale: float = 0.5, seed: int = 0
) -> Any:
    """The module that `build` makes, in another type; its own numbers are not computed."""
    graphdef, state = nnx.split(nnx.eval_shape(build))
    rng = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda a: rng.normal(scale=scale, size=a.shape).astype(dtype), nnx.to_pure_dict(state)
    )
    nnx.replace_by_pure_dict(state, values)
    with jax.ensure_compile_time_eval():  # numbers, even where a trace asks for them
        return nnx.merge(graphdef, jax.tree.map(jax.numpy.asarray, state))


def numbers(module_or_state: Any) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, by path, float64."""
    state = (
        nnx.state(module_or_state) if isinstance(module_or_state, nnx.Module) else module_or_state
    )
    return {
        "/".join(map(str, path)): np.asarray(leaf[...], np.float64)
        for path, leaf in nnx.to_flat_state(state)
    }


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(
        np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance
    )
