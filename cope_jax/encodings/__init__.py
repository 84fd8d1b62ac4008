"""Position encodings: each has one file, and one line of import below.

>>> encoding = create("cope", num_heads=4, head_dim=16, npos_max=64, rngs=nnx.Rngs(0))
>>> encoding.table.shape
(64, 16)
>>> create("cope+rope", num_heads=4, head_dim=16, cope={"npos_max": 32}, rngs=nnx.Rngs(0)).cope.table.shape
(32, 16)
"""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from cope_jax.encodings import alibi as alibi
from cope_jax.encodings import cope as cope
from cope_jax.encodings import cope_two_sided as cope_two_sided
from cope_jax.encodings import fire as fire
from cope_jax.encodings import fox as fox
from cope_jax.encodings import kerple as kerple
from cope_jax.encodings import learned as learned
from cope_jax.encodings import none as none
from cope_jax.encodings import relative as relative
from cope_jax.encodings import rope as rope
from cope_jax.encodings import sinusoidal as sinusoidal
from cope_jax.encodings import t5 as t5
from cope_jax.encodings.base import ENCODINGS as ENCODINGS
from cope_jax.encodings.base import AttentionShape as AttentionShape
from cope_jax.encodings.base import Carry as Carry
from cope_jax.encodings.base import Encoding as Encoding
from cope_jax.encodings.base import Pairs as Pairs
from cope_jax.encodings.compose import Composed as Composed
from cope_jax.encodings.encoding_config import EncodingConfig as EncodingConfig
from cope_jax.encodings.encoding_config import Sharing as Sharing
from cope_jax.encodings.encoding_config import split_outside_parentheses as split_outside_parentheses
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown


def names() -> tuple[str, ...]:
    """The names of all encodings."""
    return ENCODINGS.names()


def create(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    model_dim: int | None = None,
    max_length: int | None = None,
    rngs: nnx.Rngs,
    **options: Any,
) -> Encoding:
    """Creates an encoding, or several as one `Composed`, by name.

    Args:
      name: a name, `name(option=value)`, or several joined by `+` ("cope+rope").
      num_heads: H.
      head_dim: K.
      num_kv_heads: G; None means H.
      model_dim: D; None means H·K.
      max_length: the longest sequence to expect; some tables take their size from it.
      rngs: the source of initial parameters.
      **options: the encoding's options; for a composition, a dict of options under the name of each part.

    Raises:
      ConfigError: an unknown name or option, or a value out of range.
    """
    names_of_parts = [part for part, _ in EncodingConfig.parse(name).parts]
    if len(names_of_parts) == 1:
        options = {names_of_parts[0]: options}
    for part, own in options.items():
        if part not in names_of_parts:
            raise unknown(f"part of {name}", part, names_of_parts)
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name}: {part}={own!r} must be a dict of the options of {part}")
    shape = AttentionShape(num_heads, head_dim, num_kv_heads, model_dim, max_length)
    composed = EncodingConfig.parse(name, options).build(shape, rngs=rngs)
    return composed.parts[names_of_parts[0]] if len(names_of_parts) == 1 else composed
