"""Position encodings, each of which is defined in its own file and imported below.

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
from cope_jax.encodings import cable as cable
from cope_jax.encodings import carope as carope
from cope_jax.encodings import cope as cope
from cope_jax.encodings import cope_signed as cope_signed
from cope_jax.encodings import cope_two_sided as cope_two_sided
from cope_jax.encodings import dape as dape
from cope_jax.encodings import darope as darope
from cope_jax.encodings import fire as fire
from cope_jax.encodings import fox as fox
from cope_jax.encodings import grape as grape
from cope_jax.encodings import grape_additive as grape_additive
from cope_jax.encodings import kerple as kerple
from cope_jax.encodings import learned as learned
from cope_jax.encodings import learned_sink as learned_sink
from cope_jax.encodings import mapformer as mapformer
from cope_jax.encodings import none as none
from cope_jax.encodings import path as path
from cope_jax.encodings import pope as pope
from cope_jax.encodings import relative as relative
from cope_jax.encodings import repo as repo
from cope_jax.encodings import rope as rope
from cope_jax.encodings import row_fox as row_fox
from cope_jax.encodings import scale_invariant as scale_invariant
from cope_jax.encodings import selective as selective
from cope_jax.encodings import selective_rope as selective_rope
from cope_jax.encodings import sinusoidal as sinusoidal
from cope_jax.encodings import ssmax as ssmax
from cope_jax.encodings import stick_breaking as stick_breaking
from cope_jax.encodings import t5 as t5
from cope_jax.encodings import tra as tra
from cope_jax.encodings import wall as wall
from cope_jax.encodings.base import ENCODINGS as ENCODINGS
from cope_jax.encodings.base import AttentionShape as AttentionShape
from cope_jax.encodings.base import Carry as Carry
from cope_jax.encodings.base import Encoding as Encoding
from cope_jax.encodings.base import Pairs as Pairs
from cope_jax.encodings.base import Tokens as Tokens
from cope_jax.encodings.base import Traits as Traits
from cope_jax.encodings.compose import Composed as Composed
from cope_jax.encodings.encoding_config import EncodingConfig as EncodingConfig
from cope_jax.encodings.encoding_config import Sharing as Sharing
from cope_jax.encodings.encoding_config import (
    split_outside_parentheses as split_outside_parentheses,
)
from cope_jax.encodings.encoding_file import load as load
from cope_jax.errors import ConfigError
from cope_jax.registry import checked, unknown


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
    """Creates an encoding by its name, or several encodings as one `Composed`.

    Args:
      name: a name, `name(option=value)`, or several of these joined by `+`, such as "cope+rope".
      num_heads: H, the number of query heads.
      head_dim: K, the width of one head.
      num_kv_heads: G, the number of key/value heads; None means H.
      model_dim: D, the width of the model; None means H·K.
      max_length: the length of the longest sequence to expect; some tables have this number of
        rows. None means that the length is not known.
      rngs: the source of initial parameters.
      **options: the options of the encoding. For a composition, each keyword is the name of a part,
        and its value is a dict of this part's options: `cope={"npos_max": 8}`.

    Raises:
      ConfigError: a name or option is unknown, or a value is out of range.
    """
    checked(rngs, nnx.Rngs, "rngs")
    config = config_of(name, options)
    shape = AttentionShape(num_heads, head_dim, num_kv_heads, model_dim, max_length)
    composed = config.build(shape, rngs=rngs)
    return composed if len(config.parts) > 1 else composed.parts[config.parts[0][0]]


def config_of(name: str, options: Mapping[str, Any]) -> EncodingConfig:
    """Reads the name and the options that `create` takes, with its errors."""
    parts = {part_name: dict(given) for part_name, given in EncodingConfig.parse(name).parts}
    if len(parts) == 1:
        options = {part_name: options for part_name in parts}
    for part_name, given in options.items():
        if part_name not in parts:
            raise unknown(f"part of {name}", part_name, parts)
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{name}: {part_name}={given!r} must be a dict of the options of {part_name}"
            )
        if twice := sorted(parts[part_name].keys() & given.keys()):
            raise ConfigError(
                f"{name}: {twice[0]} is in the name and an argument too: give it once"
            )
    return EncodingConfig.parse(name, options)
