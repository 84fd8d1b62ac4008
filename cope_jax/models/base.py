"""The registry of models."""

from typing import Any

from cope_jax.registry import Registry

# Classes of nnx modules that take (config, *, rngs) and name their config dataclass `Config`.
MODELS: Registry[Any] = Registry("model")
