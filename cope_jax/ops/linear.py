"""The product of a linear layer, with a fast gradient."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from cope_jax.typing import Array

PRODUCT = "product"  # the name of what `dot_general` returns, for rematerialisation


@jax.custom_vjp
def linear(x: Array, w_DF: Array) -> Array:
    """The product over the last axis of x, y = x W.

    The gradient of W is written by hand, so that the narrower of x and dy is the one that is transposed: on a CPU what
    autodiff makes takes up to three times as long.

    >>> linear(jnp.ones((1, 2, 3)), jnp.ones((3, 4))).shape
    (1, 2, 4)
    """
    return jnp.einsum("...D,DF->...F", x, w_DF)


def dot_general(x: Array, w_DF: Array, dimension_numbers: Any, **options: Any) -> Array:
    """`linear` as the argument `dot_general` of `flax.nnx.Linear`, which asks for just this product.

    Raises:
      ValueError: an option, such as a precision, that it does not know.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    if asked:
        raise ValueError(f"linear has no such options: {asked}")
    del dimension_numbers
    return checkpoint_name(linear(x, w_DF), PRODUCT)


def _forward(x: Array, w_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    return linear(x, w_DF), (x, w_DF)


def _backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w_DF = residuals
    dx = jnp.einsum("...F,DF->...D", dy, w_DF)
    if w_DF.shape[0] <= w_DF.shape[1]:
        dw_DF = jax.lax.optimization_barrier(jnp.einsum("...D,...F->DF", x, dy))
    else:
        dw_DF = jax.lax.optimization_barrier(jnp.einsum("...F,...D->FD", dy, x)).T
    return dx, dw_DF  # the barriers keep XLA from turning the products round


linear.defvjp(_forward, _backward)
