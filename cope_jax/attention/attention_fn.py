"""`attend` as the `attention_fn` of Flax's own attention layers."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from flax import nnx

from cope_jax.array_types import Array
from cope_jax.attention.attend import attend
from cope_jax.attention.checks import check_is_encoding
from cope_jax.encodings import Encoding
from cope_jax.errors import ConfigError
from cope_jax.registry import unknown


class AttentionFn(nnx.Module):
    """Self-attention with a position encoding, as an `attention_fn` for `MultiHeadAttention` of NNX
    and of Linen.

    An `AttentionFn` is a module, so an NNX layer that uses it also owns the encoding. The
    encoding's parameters are in `nnx.state(layer)`, and are trained with the layer's parameters.
    Layers that use the same `AttentionFn` share the parameters of the encoding.

    >>> import jax
    >>> from cope_jax import encodings
    >>> rngs = nnx.Rngs(0)
    >>> cope = encodings.create("cope", num_heads=2, head_dim=4, npos_max=16, rngs=rngs)
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=AttentionFn(cope), decode=False, rngs=rngs)
    >>> layer(jax.numpy.ones((1, 5, 8)), is_causal=True).shape
    (1, 5, 8)
    >>> nnx.state(layer)["attention_fn"]["encoding"]["table"].shape
    (16, 4)

    Flax does not pass the layer's input on, which some encodings read. In NNX call the layer within
    `reading(x)`; in Linen, create the `AttentionFn` with x.

    >>> fox = encodings.create("fox", num_heads=2, head_dim=4, rngs=rngs)
    >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=AttentionFn(fox, causal=True), decode=False, rngs=rngs)
    >>> x = jax.numpy.ones((1, 5, 8))
    >>> with layer.attention_fn.reading(x):
    ...     layer(x).shape
    (1, 5, 8)

    Args:
      encoding: the position encoding, created for the layer's heads.
      x: the layer's input, `[B, L, D]`, if it is known here.
      causal: hide the keys after each query in every call. A call with `is_causal=True` hides them
        in this call.
      **options: arguments of `attend`, such as `embedded`, `window` and `implementation`; values
        must be hashable.

    Raises:
      ConfigError: the encoding is not an encoding, an option is not an argument of `attend`, or
        Flax passes it at each call.
    """

    def __init__(
        self, encoding: Encoding, *, x: Array | None = None, causal: bool = False, **options: Any
    ):
        check_is_encoding(encoding)
        self.encoding = encoding
        self.x = nnx.data(x)
        self.causal = causal
        # Flax passes the others at each call.
        passed = {"encoding", "x", "bias", "mask", "causal", "dropout_rate", "dropout_key"}
        arguments = inspect.signature(attend).parameters.values()
        known = {item.name for item in arguments if item.kind is item.KEYWORD_ONLY} - passed
        for name in options:
            if name not in known:
                raise unknown("argument of attend", name, known)
        self.options = tuple(options.items())

    @contextlib.contextmanager
    def reading(self, x: Array) -> Iterator[None]:
        """Gives the layer's input, `[B, L, D]`, to the calls within this context."""
        before, self.x = self.x, x
        try:
            yield
        finally:
            self.x = before

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
    ) -> Array:
        """Calls `attend` with the argument names and defaults of Flax; arrays are
        `[B, L, heads, K]`.

        As in Flax, nonzero entries of the mask count as True, and attention is bidirectional by
        default. The softmax is float32 (float64 for float64 inputs), so `force_fp32_for_softmax` of
        a Linen layer has no effect.

        Raises:
          ConfigError: `attend` does not support an argument, or `attend` raises ConfigError.
        """
        # Linen silently drops arguments that this signature does not name, so the signature names
        # these.
        einsums = {
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
        }
        unserved = {"precision": precision, "module (sow_weights=True)": module, **einsums}
        for name, given in unserved.items():
            if given is not None:
                raise ConfigError(f"AttentionFn does not support {name}: omit it")
        length, keys = query.shape[-3], key.shape[-3]
        if length != keys:
            counts = f"{length} queries and {keys} keys"
            raise ConfigError(
                f"AttentionFn is self-attention, got {counts}: to decode with a cache, use attend_cached"
            )
        drops = dropout_rate > 0 and not deterministic
        if drops and (broadcast_dropout or dropout_rng is None):
            raise ConfigError(
                "AttentionFn samples dropout by example and head: set broadcast_dropout=False and pass dropout_rng"
            )
        return attend(
            *(x if dtype is None else x.astype(dtype) for x in (query, key, value)),
            encoding=self.encoding,
            x=self.x,
            bias=bias,
            mask=None if mask is None else mask.astype(bool),
            causal=is_causal or self.causal,
            dropout_rate=dropout_rate,
            dropout_key=dropout_rng if drops else None,
            **dict(self.options),
        )
