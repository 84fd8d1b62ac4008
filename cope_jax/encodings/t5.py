"""Learned biases for buckets of distances."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.array_types import Array
from cope_jax.encodings.base import ENCODINGS, AttentionShape, Carry, Encoding, Pairs
from cope_jax.encodings.common import whole_numbers
from cope_jax.errors import ConfigError
from cope_jax.ops.gather import take_from_table
from cope_jax.registry import check_at_least


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The buckets of T5's biases.

    Attributes:
      num_buckets: N, the number of buckets. Each bucket of the nearer half has one distance, and
        the buckets of the farther half grow logarithmically.
      max_distance: all distances ≥ max_distance share the last bucket.
      bidirectional: if True, keys after the query use the upper half of the buckets, and all other
        keys use the lower half. If False, keys after the query count as distance 0.
      stddev: standard deviation of the initial biases.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    stddev: float = 0.02


@ENCODINGS.register("t5")
class T5(Encoding):
    """Adds a learned bias to each logit, one bias for each head and each bucket of distances.

    a_ij = softmax_j(q_i·k_j/√K + b[bucket(i−j), h]), b of shape `[N, H]`. Raffel et al. (arXiv
    1910.10683). By default the buckets are causal: a key after the query counts as distance 0. With
    `bidirectional`, each side has N/2 buckets of |i−j|.
    """

    Config = T5Config

    def __init__(self, config: T5Config, shape: AttentionShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        if config.bidirectional and (config.num_buckets % 2 or config.num_buckets < 4):
            raise ConfigError(
                f"t5(bidirectional=True) needs an even num_buckets ≥ 4, got {config.num_buckets}"
            )
        check_at_least(0, "t5", stddev=config.stddev)
        self.side = config.num_buckets // 2 if config.bidirectional else config.num_buckets
        if self.side < 2 or config.max_distance <= self.side // 2:
            raise ConfigError(
                "t5 needs num_buckets ≥ 2 and max_distance > num_buckets / 2 (num_buckets / 4 if bidirectional), got "
                f"num_buckets={config.num_buckets} and max_distance={config.max_distance}"
            )
        table = config.stddev * jax.random.normal(
            rngs.params(), (config.num_buckets, shape.num_heads)
        )
        self.table = nnx.Param(table, axes=(None, "heads"))

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        # The buckets are computed in float64 beforehand: a float32 logarithm misplaces distances on
        # a boundary.
        of_distance = jnp.asarray(buckets(self.side, self.config.max_distance))
        distance_BLM = whole_numbers("t5", pairs.distance)[:, 0]
        steps_BLM = jnp.abs(distance_BLM) if self.config.bidirectional else distance_BLM
        bucket_BLM = take_from_table(of_distance, jnp.clip(steps_BLM, 0, self.config.max_distance))
        if self.config.bidirectional:
            bucket_BLM += self.side * (distance_BLM < 0).astype(jnp.int32)
        bias_BHLM = jnp.moveaxis(take_from_table(self.table[...], bucket_BLM), -1, 1)
        return pairs.logits + bias_BHLM.astype(pairs.logits.dtype), carry


def buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance 0 … max_distance.

    >>> buckets(8, 16).tolist()
    [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    growth = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    logarithmic = exact + np.floor(growth * (num_buckets - exact) + 1e-9).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(logarithmic, num_buckets - 1)).astype(
        np.int32
    )
