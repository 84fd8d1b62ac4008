"""A learned weighted sum of layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array


class ScalarMix(nnx.Module):
    """Mixes layers, γ · Σ_j softmax(w)_j h_j, from w = 0, γ = 1. Peters et al. (1802.05365), 3.2.

    With `layer_norm` every h_j is first replaced by (h_j − μ_j) / √(σ²_j + ε). The scalars μ_j and
    σ²_j are the mean and variance of h_j over all real tokens of the batch and all D features.

    >>> mix = ScalarMix(num_layers=3, rngs=nnx.Rngs(0))
    >>> mix(jnp.array([0.0, 3.0, 6.0]).reshape(3, 1, 1, 1)).tolist()
    [[[3.0]]]
    """

    def __init__(
        self, num_layers: int, *, layer_norm: bool = False, epsilon: float = 1e-12, rngs: nnx.Rngs
    ):
        del rngs
        self.layer_norm, self.epsilon = layer_norm, epsilon
        self.weights_J = nnx.Param(jnp.zeros(num_layers))
        self.gamma = nnx.Param(jnp.ones(()))

    def __call__(self, layers_JBLD: Array, mask_BL: Array | None = None) -> Array:
        """Returns the mix, `[B, L, D]`.

        Only `layer_norm` uses the mask, which is 0 for padding. If the mask is None, all tokens are
        real.
        """
        if self.layer_norm:
            layers_JBLD = self._normed(layers_JBLD, mask_BL)
        return self.gamma[...] * jnp.einsum("J,JBLD->BLD", self.shares(), layers_JBLD)

    def shares(self) -> Array:
        """The weight of each layer, softmax(w), `[J]`."""
        return jax.nn.softmax(self.weights_J[...])

    def penalty(self, strength: float) -> Array:
        """A term of the loss, strength · ‖w‖², that keeps the mix near the mean of all layers."""
        return strength * jnp.sum(self.weights_J[...] ** 2)

    def _normed(self, layers_JBLD: Array, mask_BL: Array | None) -> Array:
        dtype, width = layers_JBLD.dtype, layers_JBLD.shape[-1]
        real_BL = (
            jnp.ones(layers_JBLD.shape[1:3], dtype)
            if mask_BL is None
            else mask_BL.astype(bool).astype(dtype)
        )
        mask_1BL1 = real_BL[None, :, :, None]
        count = jnp.maximum(jnp.sum(mask_1BL1), 1) * width

        def mean(values_JBLD: Array) -> Array:
            return jnp.sum(values_JBLD * mask_1BL1, axis=(1, 2, 3), keepdims=True) / count

        centred_JBLD = layers_JBLD - mean(layers_JBLD)
        return centred_JBLD / jnp.sqrt(mean(centred_JBLD**2) + self.epsilon)
