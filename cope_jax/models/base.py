"""The registry of models."""

from flax import nnx

from cope_jax.registry import Registry

MODELS: Registry[type[nnx.Module]] = Registry("model")
