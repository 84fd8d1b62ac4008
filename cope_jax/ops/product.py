"""The product of a linear layer, with a fast gradient; and a small network."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cope_jax.array_types import Array
from cope_jax.ops import tile

MOST_UNITS = 64  # of a network in a kernel; the time to compile grows with them
PRODUCT = "product"  # name of the result of `dot_general`, for rematerialisation

# A custom_vjp has no forward mode; a custom_jvp leaves the order of the transposed product to
# autodiff.
_linear = Primitive("linear")


def linear(x: Array, w_DF: Array) -> Array:
    """Returns the product over the last axis, y = x W, with derivatives in both modes.

    On a CPU, autodiff's gradient of W takes up to three times as long as the gradient written here.

    >>> linear(jnp.ones((1, 2, 3)), jnp.ones((3, 4))).shape
    (1, 2, 4)
    """
    return _linear.bind(jnp.asarray(x), jnp.asarray(w_DF))


def dot_general(x: Array, w_DF: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Calls `linear` with the signature of the argument `dot_general` of `flax.nnx.Linear`.

    Raises:
      ValueError: an unsupported option is given, such as a precision.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    if asked:
        raise ValueError(f"linear does not support these options: {asked}: leave them out")
    del dimension_numbers
    return checkpoint_name(linear(x, w_DF), PRODUCT)


def relu_network(x_BLM: Array, kernel_F: Array, bias_F: Array, out_FH: Array) -> Array:
    """Returns Σ_f relu(x·kernel_f + bias_f)·out_fh, a hidden layer for each number, `[B, H, L, M]`.

    >>> x, ones = jnp.array([[[-1.0, 3.0]]]), jnp.ones((2,))
    >>> relu_network(x, ones, ones, jnp.ones((2, 1))).tolist()
    [[[[0.0, 8.0]]]]
    """
    if not tile.is_tracing():
        hidden_BLMF = jax.nn.relu(
            x_BLM[..., None] * kernel_F[None, None, None] + bias_F[None, None, None]
        )
        return jnp.einsum("BLMF,FH->BHLM", hidden_BLMF, out_FH)
    # A tile has no axis for the hidden units, so they come one after the other.
    if len(kernel_F) > MOST_UNITS:
        raise NotImplementedError(f"{len(kernel_F)} hidden units are more than {MOST_UNITS}")
    units = zip(jnp.unstack(kernel_F), jnp.unstack(bias_F), jnp.unstack(out_FH), strict=True)
    terms = [
        jax.nn.relu(x_BLM * k + b)[:, None] * out_H[None, :, None, None] for k, b, out_H in units
    ]
    return functools.reduce(jnp.add, terms)


def _product(x: Array, w_DF: Array) -> Array:
    return jnp.einsum("...D,DF->...F", x, w_DF)


def _gradient_of_x(dy: Array, x: Any, w_DF: Array) -> Array:
    return jnp.einsum("...F,DF->...D", dy, w_DF)


def _gradient_of_w(dy: Array, x: Array, w_DF: Any) -> Array:
    def on_cpu(x: Array, dy: Array) -> Array:
        # The narrower of x and dy comes first, because it is transposed; the barriers keep XLA from
        # reversing this.
        if x.shape[-1] <= dy.shape[-1]:
            return jax.lax.optimization_barrier(jnp.einsum("...D,...F->DF", x, dy))
        return jax.lax.optimization_barrier(jnp.einsum("...F,...D->FD", dy, x)).T

    def elsewhere(x: Array, dy: Array) -> Array:
        return jnp.einsum("...D,...F->DF", x, dy)

    return jax.lax.platform_dependent(x, dy, cpu=on_cpu, default=elsewhere)


def _vmap(arguments: tuple[Array, Array], axes: tuple[int | None, int | None]) -> tuple[Array, int]:
    (x, w_DF), (of_x, of_w) = arguments, axes
    if of_x is not None and of_w is None:
        return linear(jnp.moveaxis(x, of_x, 0), w_DF), 0
    return jax.vmap(_product, axes)(x, w_DF), 0


_linear.def_impl(jax.jit(_product))
_linear.def_abstract_eval(lambda x, w_DF: jax.make_jaxpr(_product)(x, w_DF).out_avals[0])
mlir.register_lowering(_linear, mlir.lower_fun(_product, multiple_results=False))
ad.defbilinear(_linear, _gradient_of_x, _gradient_of_w)
batching.primitive_batchers[_linear] = _vmap
