"""Independent tokens with the frequencies of words: text for measuring speed without a corpus.

Zipf, "Human Behavior and the Principle of Least Effort", 1949.
"""

import dataclasses

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, next_token_batch


@TASKS.register("zipf")
class Zipf(SyntheticTask):
    """Predicts each next token of independent tokens with p(rank) ∝ 1/rankˢ. A token is its rank.

    Only the frequencies can be learned, and no context helps. The best possible loss is `entropy`.
    If a loss stays above `entropy`, the training has a fault. Every token counts.

    The level is the exponent s, 1 in training; the sweep shows the level in per cent.

    >>> task = Zipf(Zipf.Config(vocab_size=9, length=8))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    '3 1 1 1 6 7 3 4'
    >>> task.decode(batch["targets"][0])
    '1 1 1 6 7 3 4 3'
    >>> float(batch["weights"].min())
    1.0
    >>> round(task.entropy(), 3)
    1.91
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of zipf.

        Attributes:
          vocab_size: V, the number of different tokens.
          length: L, the number of inputs of a sequence.
        """

        vocab_size: int = 1024
        length: int = 64

        def __post_init__(self):
            check_at_least(1, "zipf", vocab_size=self.vocab_size, length=self.length)

    axis = "exponent"
    sweep_label = "exponent of the frequencies (%)"

    def __init__(self, config: Config):
        super().__init__(
            config,
            vocabulary=map(str, range(1, config.vocab_size + 1)),
            levels={"train": 1.0, "in_distribution": 1.0, "flat": 0.5, "steep": 1.5},
            sweep=[(round(100 * s), s) for s in (0.5, 0.75, 1.0, 1.25, 1.5)],
        )

    def entropy(self, split: str = "train") -> float:
        """−Σ p ln p in nats: the lowest loss, of a model that knows the frequencies."""
        p_V = self._probabilities(self.level(split))
        return float(-np.sum(p_V * np.log(p_V)))

    def _probabilities(self, level: float) -> np.ndarray:
        p_V = np.arange(1, self.vocab_size + 1, dtype=np.float64) ** -level
        return p_V / p_V.sum()

    def _length(self, level: float) -> int:
        return self.config.length

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        # Without the last sum, because rounding may change it.
        below_V = np.cumsum(self._probabilities(level))[:-1]
        tokens = np.searchsorted(below_V, rng.random((n, self.config.length + 1)), side="right")
        return next_token_batch(tokens, np.ones((n, self.config.length)))
