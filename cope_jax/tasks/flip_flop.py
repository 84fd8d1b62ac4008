"""Flip-flop language modelling: recall the last written bit after any number of ignored bits.

Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling", arXiv:2306.00946.
"""

import dataclasses

import numpy as np

from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, check, next_token_batch

WRITE, READ, IGNORE, ZERO = range(4)


@TASKS.register("flip_flop")
class FlipFlop(SyntheticTask):
    """Samples sequences of the language FFL(T, p_ignore): T tokens, instructions and bits in turn.

    The first instruction is `w` (write) and the last is `r` (read). The others are sampled
    independently: `i` (ignore) with probability p_ignore, `w` and `r` with probability (1 -
    p_ignore)/2 each. The bit after `r` is the last written bit; other bits are uniform. Only the
    bits after `r` count in loss and metric.

    The level is p_ignore; the sweep shows the level in per cent.

    >>> task = FlipFlop(FlipFlop.Config(length=12, p_ignore=0.5))
    >>> batch = task.sample(np.random.default_rng(3), 1)
    >>> task.decode(batch["inputs"][0])
    'w 1 i 0 r 1 w 0 i 1 r'
    >>> task.decode(batch["targets"][0])
    '1 i 0 r 1 w 0 i 1 r 0'
    >>> batch["weights"][0].astype(int).tolist()
    [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of flip-flop.

        Attributes:
          length: T, the number of tokens of a sequence; half of them are instructions and half are
            bits.
          p_ignore: share of `i` in "train" and "in_distribution".
          dense_p_ignore: share of `i` in "dense".
          sparse_p_ignore: share of `i` in "sparse".
        """

        length: int = 512
        p_ignore: float = 0.8
        dense_p_ignore: float = 0.1
        sparse_p_ignore: float = 0.98

        def __post_init__(self):
            check(
                self.length >= 4 and self.length % 2 == 0,
                f"flip_flop.length must be even and at least 4 (a write and a read), got {self.length}",
            )
            for name in ("p_ignore", "dense_p_ignore", "sparse_p_ignore"):
                p = getattr(self, name)
                check(
                    0 <= p <= 1, f"flip_flop.{name} must be a probability between 0 and 1, got {p}"
                )

    abilities = ("ignore",)
    axis = "ignore"
    sweep_label = "ignored instructions (%)"

    def __init__(self, config: Config):
        levels = dict.fromkeys(("train", "in_distribution"), config.p_ignore)
        levels |= {"dense": config.dense_p_ignore, "sparse": config.sparse_p_ignore}
        sweep = [(round(100 * p), p) for p in (0.1, 0.5, 0.8, 0.9, 0.98)]
        super().__init__(config, vocabulary=("w", "r", "i", "0", "1"), levels=levels, sweep=sweep)

    def _length(self, level: float) -> int:
        return self.config.length - 1

    def _valid(self, level: float) -> bool:
        return 0 <= level <= 1

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        shape = (n, self.config.length // 2)
        u = rng.random(shape)
        instructions = np.where(u < level, IGNORE, np.where(u < (1 + level) / 2, WRITE, READ))
        instructions[:, 0], instructions[:, -1] = WRITE, READ
        bits = rng.integers(2, size=shape)
        writes = np.where(instructions == WRITE, np.arange(shape[1]), 0)
        last_write = np.maximum.accumulate(writes, axis=1)
        bits = np.where(instructions == READ, np.take_along_axis(bits, last_write, axis=1), bits)
        tokens = np.stack([instructions, ZERO + bits], axis=2).reshape(n, self.config.length)
        return next_token_batch(tokens, tokens[:, :-1] == READ)
