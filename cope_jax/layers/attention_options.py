"""Options before and after attention: shifts, short convolutions, norms of heads, and a gate."""

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array, PyTree, accumulator_dtype
from cope_jax.encodings.common import project
from cope_jax.layers.basic import create_linear
from cope_jax.layers.block_config import BlockConfig
from cope_jax.ops.convolution import causal_convolution


class AttentionOptions(nnx.Module):
    """The options of an attention layer, each of which works with every encoding.

    They apply in this order:

    1. `kv_shift`:     k_t ← α_t k_{t−1} + (1 − α_t) k_t, α_t = σ(a·x_t) for each key head; the same
       for v.
    2. `convolution`:  each channel of q, k and v is a sum over the last W tokens. It starts as the
       token itself.
    3. `qk_norm`:      q and k of each head are divided by their root mean square, and scaled by a
       learned vector of the head or, with `qk_norm_shared`, of all heads.
    4. Attention, with the encoding.
    5. `output_norm`:  the output of each head is divided by its root mean square, and scaled.
    6. `output_gate`:  out ← out · σ(W_g x), before the last matrix.

    All but 2 are the "Pro" block of the Forgetting Transformer (arXiv 2503.02130); 3 and 6 are also
    in other models. The first two read earlier tokens of the same document only. `windows` keeps
    these tokens when decoding.
    """

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        shape = config.attention_shape(None)
        self.config, width = config, shape.head_dim
        heads, groups = shape.num_heads, shape.kv_heads
        if config.kv_shift:
            initial = jax.nn.initializers.lecun_normal()
            self.key_shift = nnx.Param(
                initial(rngs.params(), (config.model_dim, groups)), axes=("embed", "kv_heads")
            )
            self.value_shift = nnx.Param(
                initial(rngs.params(), (config.model_dim, groups)), axes=("embed", "kv_heads")
            )
        if config.convolution:
            for name, number, axis in (
                ("q", heads, "heads"),
                ("k", groups, "kv_heads"),
                ("v", groups, "kv_heads"),
            ):
                itself = jnp.zeros((config.convolution, number, width)).at[-1].set(1.0)
                setattr(self, f"{name}_convolution", nnx.Param(itself, axes=(None, axis, None)))
        if config.qk_norm_shared:
            self.q_scale = nnx.Param(jnp.ones((width,)), axes=(None,))
            self.k_scale = nnx.Param(jnp.ones((width,)), axes=(None,))
        elif config.qk_norm:
            self.q_scale = nnx.Param(jnp.ones((heads, width)), axes=("heads", None))
            self.k_scale = nnx.Param(jnp.ones((groups, width)), axes=("kv_heads", None))
        if config.output_norm:
            self.output_scale = nnx.Param(jnp.ones((heads, width)), axes=("heads", None))
        if config.output_gate:
            self.gate = create_linear(
                config, config.model_dim, heads * width, ("embed", "heads"), rngs=rngs
            )

    def before(
        self,
        x_BLD: Array,
        q_BLHK: Array,
        k_BLGK: Array,
        v_BLGK: Array,
        segment_ids_BL: Array | None,
        windows: PyTree = None,
    ) -> tuple[Array, Array, Array, PyTree]:
        """Returns (q, k, v, windows); `windows` are those of the previous tokens, or None."""
        arrays, kept = {"q": q_BLHK, "k": k_BLGK, "v": v_BLGK}, {}

        def over_tokens(name: str, x: Array, kernel: Array) -> Array:
            rows = x.reshape(*x.shape[:2], -1)
            flat = kernel.astype(x.dtype).reshape(len(kernel), -1)
            y, kept[name] = causal_convolution(
                rows, flat, segment_ids_BL, None if windows is None else windows[name]
            )
            return y.reshape(x.shape)

        if self.config.kv_shift:
            for name, kernel in (("k", self.key_shift), ("v", self.value_shift)):
                x, current = arrays[name], jnp.ones(arrays[name].shape[2:])
                share = jax.nn.sigmoid(project("kv_shift", x_BLD, kernel[...]))[..., None].astype(
                    x.dtype
                )
                before = over_tokens(f"{name}_shift", x, jnp.stack([current, 0 * current]))
                arrays[name] = share * before + (1 - share) * x
        if self.config.convolution:
            for name in arrays:
                kernel = getattr(self, f"{name}_convolution")[...]
                arrays[name] = over_tokens(f"{name}_convolution", arrays[name], kernel)
        if self.config.qk_norm:
            arrays["q"] = self._normed(arrays["q"], self.q_scale[...])
            arrays["k"] = self._normed(arrays["k"], self.k_scale[...])
        return arrays["q"], arrays["k"], arrays["v"], kept

    def after(self, x_BLD: Array, out_BLHK: Array) -> Array:
        """Returns out_BLHK, ready for the last matrix."""
        if self.config.output_norm:
            out_BLHK = self._normed(out_BLHK, self.output_scale[...])
        if self.config.output_gate:
            out_BLHK = out_BLHK * jax.nn.sigmoid(self.gate(x_BLD)).reshape(out_BLHK.shape)
        return out_BLHK

    def _normed(self, x: Array, scale: Array) -> Array:
        wide = x.astype(accumulator_dtype(x.dtype))
        root = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.config.norm_epsilon)
        scale = scale.astype(wide.dtype).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
        return (wide * root * scale).astype(x.dtype)
