"""Explains the shape letters in names of arrays, and defines the types that the package shares.

Arrays carry their shape in their name: `q_BLHK` is a query of shape
`[batch, length, heads, head width]`.

| letter | meaning                                    |
|--------|--------------------------------------------|
| B      | batch                                      |
| L      | query length                               |
| M      | key length                                 |
| D      | model width                                |
| H      | query heads                                |
| G      | key/value heads (G divides H)              |
| K      | head width                                 |
| V      | vocabulary                                 |
| N      | table size                                 |
| S      | seeds trained side by side                 |
| T      | training steps in one dispatch             |

A digit means an axis of that size: `mask_B1LM`. Positions and masks may have size 1 in place of B,
and then broadcast.
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any


def accumulator_dtype(dtype: Any) -> Any:
    """The type of logits, gates and sums: float64 if `dtype` is float64, else float32.

    >>> accumulator_dtype(jnp.bfloat16).__name__
    'float32'
    """
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
