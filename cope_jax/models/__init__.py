"""Models: one file each, one line each below."""

from typing import Any

from flax import nnx

from cope_jax.models import decoder as decoder
from cope_jax.models.base import MODELS as MODELS


def names() -> tuple[str, ...]:
    """The names of all models.

    >>> names()
    ('decoder',)
    """
    return MODELS.names()


def create(name: str, config: Any, *, rngs: nnx.Rngs) -> nnx.Module:
    """Creates the model called `name` from its config (`MODELS.get(name).Config`)."""
    return MODELS.get(name)(config, rngs=rngs)
