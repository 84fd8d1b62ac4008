"""Data-adaptive position encoding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs, Traits
from cope_jax.encodings.common import default_slopes
from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class DAPEConfig:
    """The options of DAPE.

    Attributes:
      hidden: width of the network f.
      keys: how many neighbouring keys the network sees at once, an odd number. 1 is the first
        version of the method, and 3 its second.
    """

    hidden: int = 32
    keys: int = 1


@ENCODINGS.register("dape")
class DAPE(Encoding):
    """A small network adapts position biases to the content logits of all heads.

        a_ij = softmax_j(s_ij + b_ij + f([s_ij; b_ij])),   s_ij = q_i·k_j/√K,   b_ij = −m_h (i − j).

    s and b have an entry for each head. f is a network 2H → hidden → H with LeakyReLU (slope 0.01),
    for each pair. Zheng et al. (arXiv 2405.14722). With keys = 3, the first layer also sees the
    pairs of the neighbouring keys (arXiv 2410.04798); keys that the query may not see count as 0.
    The bias inside f is always ALiBi; the paper also has Kerple and FIRE there. `dape+kerple` adds
    Kerple after f, which is another method.

    f mixes all heads, so this encoding cannot run for one head alone, and kernels refuse it.

    Raises:
      ConfigError: `keys` is even or below 1.
    """

    Config = DAPEConfig
    traits = Traits(splits_heads=False)

    def __init__(self, config: DAPEConfig, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        check_at_least(1, "dape", hidden=config.hidden, keys=config.keys)
        if config.keys % 2 == 0:
            raise ConfigError(f"dape.keys must be odd, got {config.keys}")
        self.traits = dataclasses.replace(self.traits, splits_keys=config.keys == 1)
        heads, hidden = shape.num_heads, config.hidden

        def uniform(inputs: int, *size: int) -> nnx.Param[Array]:
            bound = inputs**-0.5
            return nnx.Param(jax.random.uniform(rngs.params(), size, minval=-bound, maxval=bound))

        inputs = 2 * heads * config.keys
        self.hidden_kernel = uniform(inputs, config.keys, 2 * heads, hidden)
        self.hidden_bias = uniform(inputs, hidden)
        self.out_kernel = uniform(hidden, hidden, heads)
        self.out_bias = uniform(hidden, heads)

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        dtype = pairs.logits.dtype
        kernel, hidden_bias, out, out_bias = (
            parameter[...].astype(dtype)
            for parameter in (self.hidden_kernel, self.hidden_bias, self.out_kernel, self.out_bias)
        )
        slopes_1H11 = jnp.asarray(default_slopes(self.shape.num_heads), dtype)[None, :, None, None]
        bias_BHLM = jnp.broadcast_to(
            -slopes_1H11 * jnp.abs(pairs.distance).astype(dtype), pairs.logits.shape
        )
        both = jnp.concatenate([pairs.logits, bias_BHLM], axis=1)
        both = jnp.where(pairs.mask, both, jnp.zeros((), dtype))
        halo = self.config.keys // 2
        outside = jnp.zeros((*both.shape[:3], halo), dtype)
        wide = jnp.concatenate([outside, both, outside], axis=-1)
        length = both.shape[-1]
        hidden = sum(
            jnp.einsum("BCLM,CF->BFLM", wide[..., key : key + length], kernel[key])
            for key in range(self.config.keys)
        )
        hidden = jax.nn.leaky_relu(hidden + hidden_bias[None, :, None, None], 0.01)
        adapted_BHLM = jnp.einsum("BFLM,FH->BHLM", hidden, out) + out_bias[None, :, None, None]
        return pairs.logits + bias_BHLM + adapted_BHLM, carry
