"""Recurrent layers instead of attention: linear attention, GLA, DeltaNet, gated DeltaNet, KDA."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.attention import Cache
from cope_jax.encodings import Encoding
from cope_jax.encodings.common import project
from cope_jax.errors import ConfigError
from cope_jax.layers.basic import create_linear
from cope_jax.layers.block_config import KINDS, BlockConfig
from cope_jax.layers.self_attention import Context
from cope_jax.ops.convolution import causal_convolution
from cope_jax.ops.linear_recurrence import linear_recurrence

WIDTH = 4  # tokens in the convolutions on queries, keys and values
RANK, DIVISOR = 16, 16.0  # of the decay of GLA: its rank, and g = log σ(…)/16
OF_ATTENTION = ("features", "rotate", "score", "sink")  # hooks of encodings that need attention
_EPSILON = 1e-6


class RecurrentMixer(nnx.Module):
    """A layer that carries a matrix S from token to token, in the place of attention.

        S_t = e^{g_t} S_{t−1} + β_t k_t (v_t − …)ᵀ,   out = W_o (norm(S_tᵀ q_t/√K) · silu(W_g x_t)),

    see `linear_recurrence`. q, k and v pass a convolution over four tokens and SiLU; q and k of
    each head have length
    1. β = σ(w·x), or 2σ(w·x) with `negative_eigenvalues` (Grazzi et al., arXiv 2411.12537). The
    decay g is log σ(W_2 W_1 x + b)/16 for each channel in GLA, −A softplus(a·x + b) for each head
    in gated DeltaNet, and −A softplus(W_2 W_1 x + b) for each channel in KDA, with a rate A for
    each head. The gate on the output is that of GLA and gated DeltaNet; that of KDA is
    σ(W_2 W_1 x), and in the library `fla`, DeltaNet has none by default.

    Encodings that act on the embeddings work with it. Others have no effect, and are refused. There
    are no weights to drop, so `dropout` acts only on what the layer adds to the residual stream.

    Raises:
      ConfigError: grouped heads or an option around attention is given, the encoding needs
        attention, or maps are asked for.
    """

    def __init__(self, config: BlockConfig, residual_scale: float, *, rngs: nnx.Rngs):
        shape, width = config.attention_shape(None), config.model_dim
        heads, size = shape.num_heads, shape.head_dim
        if shape.kv_heads != heads or config.attention_options:
            raise ConfigError(
                f"block.mixer={config.mixer} has no grouped heads and no options around attention: leave num_kv_heads "
                f"and {', '.join(config.attention_options) or 'such options'} out"
            )
        self.config, self.shape, self.kind = config, shape, KINDS[config.mixer]
        for name in ("query", "key", "value"):
            setattr(
                self,
                name,
                create_linear(config, width, heads * size, ("embed", "heads"), rngs=rngs),
            )
            bound = WIDTH**-0.5
            kernel = jax.random.uniform(
                rngs.params(), (WIDTH, heads * size), minval=-bound, maxval=bound
            )
            setattr(self, f"{name}_convolution", nnx.Param(kernel, axes=(None, "heads")))
        self.gate = create_linear(config, width, heads * size, ("embed", "heads"), rngs=rngs)
        self.out = create_linear(
            config, heads * size, width, ("heads", "embed"), scale=residual_scale, rngs=rngs
        )
        self.scale = nnx.Param(jnp.ones((heads, size)), axes=("heads", None))
        initial = jax.nn.initializers.lecun_normal()
        if self.kind.delta:
            self.beta = nnx.Param(initial(rngs.params(), (width, heads)), axes=("embed", "heads"))
        if self.kind.decay is None:
            return
        if self.kind.decay == "channel":
            rank, rows = size if self.kind.delta else RANK, heads * size
            self.decay_in = nnx.Param(initial(rngs.params(), (width, rank)), axes=("embed", None))
            self.decay_out = nnx.Param(initial(rngs.params(), (rank, rows)), axes=(None, "heads"))
        else:
            rows = heads
            self.decay = nnx.Param(initial(rngs.params(), (width, rows)), axes=("embed", "heads"))
        bias = jnp.zeros((rows,))
        if self.kind.delta:
            rates = jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)
            self.log_rate = nnx.Param(jnp.log(rates), axes=("heads",))
            low, high = math.log(1e-3), math.log(0.1)
            steps = jnp.exp(jax.random.uniform(rngs.params(), (rows,), minval=low, maxval=high))
            bias = jnp.log(jnp.expm1(steps))
        self.decay_bias = nnx.Param(bias, axes=("heads",))

    def __call__(
        self, x_BLD: Array, encoding: Encoding, context: Context, dropout_key: Array | None = None
    ) -> Array:
        self._check(encoding, context)
        return self._mix(x_BLD, context.segment_ids, None, context)[0]

    def extend(
        self,
        x_BLD: Array,
        encoding: Encoding,
        context: Context,
        cache: Cache,
        layer: Any,
        *,
        first: bool,
    ) -> tuple[Array, Cache]:
        """Like a call, for tokens after those of a cache: see `SelfAttention.extend`."""
        self._check(encoding, context)
        segment_ids_BL = cache.latest(x_BLD.shape[1])[1]
        out_BLD, windows = self._mix(x_BLD, segment_ids_BL, cache.windows_of(layer), context)
        return out_BLD, cache.with_windows(windows, layer)

    def maps(self, x_BLD: Array, encoding: Encoding, context: Context) -> dict[str, Array]:
        raise ConfigError(
            f"block.mixer={self.config.mixer} has no attention weights: choose mixer=attention"
        )

    def windows(self, batch: int) -> PyTree:
        """Returns what a cache keeps for this layer, as shapes and types."""
        x_BLD = jax.ShapeDtypeStruct((batch, 1, self.config.model_dim), self.config.dtype)
        return jax.eval_shape(lambda x_BLD: self._mix(x_BLD, None, None)[1], x_BLD)

    def _mix(
        self,
        x_BLD: Array,
        segment_ids_BL: Array | None,
        state: PyTree,
        context: Context | None = None,
    ) -> tuple[Array, PyTree]:
        kept = {}

        def heads(name: str) -> Array:
            x = getattr(self, name)(x_BLD)
            kernel = getattr(self, f"{name}_convolution")[...]
            before = None if state is None else state[name]
            x, kept[name] = causal_convolution(x, kernel.astype(x.dtype), segment_ids_BL, before)
            x = jax.nn.silu(x).reshape(*x.shape[:2], self.shape.num_heads, -1)
            return (
                x
                if context is None
                else context.layout.constrain(x, "batch", "length", "width", None)
            )

        q, k, v = heads("query"), heads("key"), heads("value")
        beta = None
        if self.kind.delta:
            largest = 2.0 if self.config.negative_eigenvalues else 1.0
            beta = largest * jax.nn.sigmoid(project("the mixer", x_BLD, self.beta[...]))
        out_BLHK, kept["state"] = linear_recurrence(
            _unit(q),
            _unit(k),
            v,
            log_decay=self._log_decay(x_BLD),
            beta_BLH=beta,
            segment_ids_BL=segment_ids_BL,
            state=None if state is None else state["state"],
        )
        wide = out_BLHK.astype(accumulator_dtype(out_BLHK.dtype))
        root = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.config.norm_epsilon)
        normed = (wide * root * self.scale[...].astype(wide.dtype)[None, None]).astype(x_BLD.dtype)
        gated = normed.reshape(*x_BLD.shape[:2], -1) * jax.nn.silu(self.gate(x_BLD))
        return self.out(gated), kept

    def _check(self, encoding: Encoding, context: Context) -> None:
        if not context.causal:
            raise ConfigError(
                f"block.mixer={self.config.mixer} reads from left to right: choose mixer=attention"
            )
        for name, member in getattr(encoding, "parts", {}).items():
            if any(
                getattr(type(member), hook) is not getattr(Encoding, hook) for hook in OF_ATTENTION
            ):
                mixer = self.config.mixer
                raise ConfigError(
                    f"the encoding {name!r} has no effect with block.mixer={mixer}: choose one that acts on the "
                    "embeddings, or none"
                )

    def _log_decay(self, x_BLD: Array) -> Array | None:
        if self.kind.decay is None:
            return None
        if self.kind.decay == "channel":
            low = project("the mixer", x_BLD, self.decay_in[...])
            logits = project("the mixer", low, self.decay_out[...], self.decay_bias[...])
        else:
            logits = project("the mixer", x_BLD, self.decay[...], self.decay_bias[...])
        logits = logits.reshape(*x_BLD.shape[:2], self.shape.num_heads, -1)
        if not self.kind.delta:
            return jax.nn.log_sigmoid(logits) / DIVISOR
        rates_H1 = jnp.exp(self.log_rate[...].astype(logits.dtype))[:, None]
        return -rates_H1[None, None] * jax.nn.softplus(logits)


def _unit(x_BLHK: Array) -> Array:
    wide = x_BLHK.astype(accumulator_dtype(x_BLHK.dtype))
    return wide * jax.lax.rsqrt(jnp.sum(wide**2, axis=-1, keepdims=True) + _EPSILON)
