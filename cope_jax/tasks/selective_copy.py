"""Selective copy: repeat the symbols of a sequence in order, without the blanks between them.

Golovneva et al., arXiv:2405.18719, section 5.2; Gu & Dao, arXiv:2312.00752, section 4.1.1.
"""

import dataclasses

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, next_token_batch

BLANK, SEPARATOR, FIRST_SYMBOL = range(3)


@TASKS.register("selective_copy")
class SelectiveCopy(SyntheticTask):
    """`num_tokens` symbols at random places among blanks, a separator, then the symbols in order.

    Only the copy counts in loss and metric. We take the paper's vocabulary of 16 tokens as 14
    symbols plus the blank and the separator. The paper's errors (100.0 ± 0.0 for RoPE out of
    distribution) fit errors of entire sequences, so `sequence_error` is the headline metric here.

    The level is the number of blanks.

    >>> task = SelectiveCopy(SelectiveCopy.Config(num_tokens=3, num_blanks=4))
    >>> batch = task.sample(np.random.default_rng(1), 1)
    >>> task.decode(batch["inputs"][0])
    '6 _ 7 _ _ 10 _ | 6 7'
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '6 7 10'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of selective copy.

        Attributes:
          num_symbols: number of different symbols, without blank and separator.
          num_tokens: number of symbols to copy.
          num_blanks: number of blanks in "train" and "in_distribution".
          dense_blanks: number of blanks in "dense". If None, half of num_blanks.
          sparse_blanks: number of blanks in "sparse". If None, twice num_blanks.
        """

        num_symbols: int = 14
        num_tokens: int = 256
        num_blanks: int = 256
        dense_blanks: int | None = None
        sparse_blanks: int | None = None

        def __post_init__(self):
            check_at_least(
                1, "selective_copy", num_symbols=self.num_symbols, num_tokens=self.num_tokens
            )
            names = ("num_blanks", "dense_blanks", "sparse_blanks")
            blanks = {name: getattr(self, name) for name in names}
            check_at_least(0, "selective_copy", **blanks)

    metric = "sequence_error"
    abilities = ("ignore", "copy")
    axis = "blanks"
    sweep_label = "blanks"

    def __init__(self, config: Config):
        blanks = config.num_blanks
        dense = blanks // 2 if config.dense_blanks is None else config.dense_blanks
        sparse = blanks * 2 if config.sparse_blanks is None else config.sparse_blanks
        low, high = min(dense, blanks, sparse), max(dense, blanks, sparse)
        points = sorted({low, (low + blanks) // 2, blanks, (blanks + high) // 2, high})
        super().__init__(
            config,
            vocabulary=("_", "|", *map(str, range(config.num_symbols))),
            levels={"train": blanks, "in_distribution": blanks, "dense": dense, "sparse": sparse},
            sweep=[(point, point) for point in points],
        )

    def _length(self, level: float) -> int:
        return 2 * self.config.num_tokens + int(level)

    def _valid(self, level: float) -> bool:
        return level >= 0 and level == int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        k, read_length = self.config.num_tokens, self.config.num_tokens + int(level)
        symbols = rng.integers(FIRST_SYMBOL, FIRST_SYMBOL + self.config.num_symbols, size=(n, k))
        # The k smallest of independent uniforms are a uniform choice of k places.
        indices = np.sort(np.argsort(rng.random((n, read_length)), axis=1)[:, :k], axis=1)
        tokens = np.full((n, read_length + 1 + k), BLANK)
        np.put_along_axis(tokens, indices, symbols, axis=1)
        tokens[:, read_length] = SEPARATOR
        tokens[:, read_length + 1 :] = symbols
        weights = np.broadcast_to(np.arange(read_length + k) >= read_length, (n, read_length + k))
        return next_token_batch(tokens, weights)
