"""Computes the vector of each word from its characters."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.errors import ConfigError
from cope_jax.ops.gather import lookup
from cope_jax.ops.product import linear
from cope_jax.registry import check_at_least, check_fields
from cope_jax.tokenizers.characters import NUM_CHARACTERS

ORIGINAL_FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024))


@dataclasses.dataclass(frozen=True)
class CharCNNConfig:
    """The sizes of a `CharCNN`. The defaults are the sizes of the original ELMo.

    Attributes:
      embed_dim: width of the embedding of a character.
      filters: pairs of (width in characters, number of filters of this width).
      num_highways: number of highway layers after the filters.
      projection: width of a word's vector. If None, there is no projection, and the width is the
        number of all filters.
    """

    embed_dim: int = 16
    filters: tuple[tuple[int, ...], ...] = ORIGINAL_FILTERS
    num_highways: int = 2
    projection: int | None = 512

    def __post_init__(self):
        check_fields(self, "characters")
        check_at_least(1, "characters", embed_dim=self.embed_dim, projection=self.projection)
        check_at_least(0, "characters", num_highways=self.num_highways)
        if not self.filters or any(len(pair) != 2 or min(pair) < 1 for pair in self.filters):
            raise ConfigError(
                f"characters.filters must be pairs (width, number), each at least 1, got {self.filters}"
            )

    @property
    def num_filters(self) -> int:
        return sum(number for _, number in self.filters)

    def flops_per_word(self, max_characters: int) -> float:
        """Forward FLOPs of a word's products. A filter is applied at each offset where it fits."""
        indices = (
            max(max_characters - width + 1, 0) * width * number for width, number in self.filters
        )
        dense = 2 * self.num_highways * self.num_filters**2 + self.num_filters * (
            self.projection or 0
        )
        return 2.0 * (self.embed_dim * sum(indices) + dense)


class Highway(nnx.Module):
    """A highway layer, y = g · relu(W_t x + b_t) + (1 − g) · x with g = σ(W_c x + b_c).

    Srivastava et al. (arXiv 1505.00387). b_c is initialised to −2, so that at first y has most of
    x. The matrices are initialised from a normal distribution with variance 1/width.
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.carry = _dense(width, width, ("embed", "mlp"), bias=-2.0, rngs=rngs)
        self.transform = _dense(width, width, ("embed", "mlp"), rngs=rngs)

    def __call__(self, x_ND: Array) -> Array:
        gate_ND = jax.nn.sigmoid(self.carry(x_ND))
        return gate_ND * jax.nn.relu(self.transform(x_ND)) + (1 - gate_ND) * x_ND


class CharCNN(nnx.Module):
    """Turns the characters of words into vectors: convolutions, maxima, highway layers, projection.

        f_k = relu(max_p (Σ_i W_ki e_{p+i} + b_k)),  x = W_p highway_n(… highway_1(f)) + b_p

    e_p is the embedding of the character at place p. Filters are applied only where they fit into
    the word. The characters that pad a word are embedded like other characters. Kim et al. (arXiv
    1508.06615), in the version of Peters et al. (arXiv 1802.05365). `tokenizers.characters` numbers
    the characters. All characters of a padding word are 0, and its vector is 0.

    >>> config = CharCNNConfig(embed_dim=4, filters=((1, 2), (2, 3)), num_highways=1, projection=6)
    >>> layer = CharCNN(config, rngs=nnx.Rngs(0))
    >>> x_BLD = layer(jnp.array([[[259, 98, 260, 261], [0, 0, 0, 0]]]))
    >>> x_BLD.shape, bool((x_BLD[0, 1] == 0).all())
    ((1, 2, 6), True)
    """

    def __init__(self, config: CharCNNConfig, *, rngs: nnx.Rngs):
        def uniform(bound: float, *shape: int) -> nnx.Param[Array]:
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))

        self.config = config
        self.embedding_KE = uniform(1.0, NUM_CHARACTERS, config.embed_dim)
        self.filters = nnx.List(
            [uniform(0.05, width, config.embed_dim, number) for width, number in config.filters]
        )
        self.biases = nnx.List([nnx.Param(jnp.zeros(number)) for _, number in config.filters])
        self.highways = nnx.List(
            [Highway(config.num_filters, rngs=rngs) for _ in range(config.num_highways)]
        )
        outputs, axes = config.projection, ("mlp", "embed")
        self.projection = _dense(config.num_filters, outputs, axes, rngs=rngs) if outputs else None

    def __call__(self, characters_BLC: Array) -> Array:
        """The vectors x_BLD of words of int32 characters 0 to 261; NaN if one is out of range.

        Raises:
          ConfigError: words are shorter than a filter.
        """
        batch, length, size = characters_BLC.shape
        widest = max(width for width, _ in self.config.filters)
        if size < widest:
            raise ConfigError(
                f"words of {size} characters are shorter than a filter of {widest}: pad them to {widest}"
            )
        characters_NC = characters_BLC.reshape(batch * length, size)
        table_KE = self.embedding_KE[...]
        # Row 0 is unused, but the official sizes include it.
        is_none_NC = characters_NC == 0
        e_NCE = jnp.where(
            is_none_NC[..., None], jnp.zeros((), table_KE.dtype), lookup(table_KE, characters_NC)
        )
        pairs = zip(self.filters, self.biases, strict=True)
        x_ND = jnp.concatenate(
            [_maxima(e_NCE, w_WEF[...], b_F[...]) for w_WEF, b_F in pairs], axis=-1
        )
        for highway in self.highways:
            x_ND = highway(x_ND)
        x_ND = x_ND if self.projection is None else self.projection(x_ND)
        x_ND = jnp.where(is_none_NC.all(axis=-1, keepdims=True), jnp.zeros((), x_ND.dtype), x_ND)
        return x_ND.reshape(batch, length, x_ND.shape[-1])


def _dense(
    inputs: int, outputs: int, axes: tuple[str, str], *, bias: float = 0.0, rngs: nnx.Rngs
) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=jax.nn.initializers.normal(inputs**-0.5),
        bias_init=jax.nn.initializers.constant(bias),
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )


def _maxima(e_NCE: Array, w_WEF: Array, b_F: Array) -> Array:
    """The relu of each filter's maximum over the word.

    Products with windows replace the convolution, because on a CPU the gradient of a convolution
    takes up to 1.5 times as long.
    """
    width, _, filters = w_WEF.shape
    indices = e_NCE.shape[1] - width + 1
    windows_NPW = jnp.concatenate(
        [e_NCE[:, start : start + indices] for start in range(width)], axis=-1
    )
    maximum_NF = jnp.max(linear(windows_NPW, w_WEF.reshape(-1, filters)), axis=1)
    return jax.nn.relu(maximum_NF + b_F[None])
