"""MQAR: recall the values of many keys, in their random order.

Multi-query associative recall: Arora et al., "Zoology", arXiv:2312.04927.
"""

import dataclasses
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, batch_of, check


@TASKS.register("mqar")
class Mqar(SyntheticTask):
    """Pairs of key and value, then each key again among random tokens, with its value as target.

    The first half of the vocabulary are keys, the second half values. Queries are near the pairs
    more often than far from them: the gap x has the probability ∝ x^(power − 1). In the
    "forgetting" form, `updates` keys get another value after all pairs, and that value counts; it
    always differs, while in the published generator it may be the same. In the "compositional" form
    a key is two tokens, one of s first and one of s second tokens, where s is √pairs rounded up.
    If the number of pairs is 4, 9, 16, …, every such key occurs, so no token alone says the value;
    otherwise random ones are missing, and some tokens occur in one key only. Targets are not the
    next inputs.

    The random tokens are uniform, but never keys of the same sequence. In the published generator
    they may be keys; with a small vocabulary, a key and the token after it then often look like a
    pair. The published generator asks only at every second token after the pairs, as `every=2`
    does; by default it may ask at any token.

    The level is the number of pairs. A sequence has `space` times as many tokens as the pairs,
    which are two tokens each, or three in the compositional form.

    >>> task = Mqar(Mqar.Config(vocabulary=32, pairs=2))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0][:12])
    '3 18 12 27 24 3 15 31 12 31 13 22'
    >>> [(place, task.vocabulary[batch["targets"][0, place]]) for place in np.flatnonzero(batch["weights"][0]).tolist()]
    [(5, '18'), (8, '27')]
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of MQAR.

        Attributes:
          vocabulary: the number of tokens; 8192 as published.
          pairs: the number of pairs in "train" and "in_distribution"; twice as many in "longer",
            four times in "longest". Published: 4, 8, 16, 64.
          power: of the distribution of gaps, in (0, 10].
          form: what the pairs are.
          updates: the number of keys that get another value in the "forgetting" form.
          space: the length of a sequence as a multiple of that of its pairs. Published: 8, and 4
            with 64 pairs.
          every: a query may begin at every n-th token after the pairs. Published: 2. If None, the
            size of a key.
        """

        vocabulary: int = 256
        pairs: int = 4
        power: float = 0.01
        form: Literal["plain", "forgetting", "compositional"] = "plain"
        updates: int = 2
        space: int = 8
        every: int | None = None

        def __post_init__(self):
            check_fields(self, "mqar")
            check_at_least(1, "mqar", pairs=self.pairs, updates=self.updates)
            check_at_least(3, "mqar", space=self.space)
            check_at_least(8, "mqar", vocabulary=self.vocabulary)
            # A large power of a gap has no float64.
            check(0 < self.power <= 10, f"mqar.power must lie in (0, 10], got {self.power}")
            check(self.vocabulary % 2 == 0, f"mqar.vocabulary must be even, got {self.vocabulary}")
            check(
                4 * self.pairs < self.vocabulary // 2,
                f"mqar.vocabulary must be above {8 * self.pairs}, eight for each pair, got {self.vocabulary}",
            )
            check(
                self.form != "forgetting" or self.updates <= self.pairs,
                f"mqar.updates must be at most pairs={self.pairs}, got {self.updates}",
            )
            most = (self.space - (2 if self.form == "forgetting" else 1)) * (self.size + 1)
            check(
                self.every is None or self.size <= self.every <= most,
                f"mqar.every must lie between {self.size}, the size of a key, and {most}, so that all queries have "
                f"room, got {self.every}",
            )

        @property
        def size(self) -> int:
            """The number of tokens of a key."""
            return 2 if self.form == "compositional" else 1

    abilities = ("recall",)
    continues = False
    axis = "pairs"
    sweep_label = "pairs of keys and values"

    def __init__(self, config: Config):
        n = config.pairs
        super().__init__(
            config,
            vocabulary=map(str, range(config.vocabulary)),
            levels={"train": n, "in_distribution": n, "longer": 2 * n, "longest": 4 * n},
            sweep=[(point, point) for point in (n, 2 * n, 3 * n, 4 * n)],
        )

    def _length(self, level: float) -> int:
        return self.config.space * (self.config.size + 1) * int(level)

    def _valid(self, level: float) -> bool:
        return level >= 1 and level == int(level) and 2 * level < self.config.vocabulary

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        length = self._length(level)
        inputs = np.zeros((n, length), np.int64)
        targets, weights = inputs.copy(), np.zeros(inputs.shape, np.float32)
        for row in range(n):
            keys, values = self._pairs(rng, int(level))
            others = np.setdiff1d(np.arange(self.vocab_size), keys)
            inputs[row] = targets[row] = rng.choice(others, size=length)
            pairs = zip(keys, values, strict=True)
            written = [token for key, value in pairs for token in (*key, value)]
            if self.config.form == "forgetting":
                for number in rng.permutation(len(keys))[: self.config.updates]:
                    step = int(rng.integers(1, self.vocab_size // 2))
                    half = self.vocab_size // 2
                    values[number] = half + (values[number] - half + step) % half
                    written += [*keys[number], values[number]]
            begin, size = len(written), self.config.size
            every = self.config.every or size
            inputs[row, :begin] = written
            gaps = np.arange(1, (length - begin) // every + 1)
            share = gaps ** (self.config.power - 1)
            chosen = rng.choice(len(gaps), size=len(keys), replace=False, p=share / share.sum())
            for key, value, gap in zip(keys, values, chosen, strict=True):
                start = begin + every * int(gap)
                inputs[row, start : start + size] = key
                targets[row, start + size - 1], weights[row, start + size - 1] = value, 1
        return batch_of(inputs, targets, weights)

    def _pairs(
        self, rng: np.random.Generator, count: int
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """The keys, each a tuple of tokens, and their values."""
        half = self.vocab_size // 2
        if self.config.form != "compositional":
            keys = rng.permutation(np.arange(1, half))[:count]
            values = rng.permutation(half)[:count] + half
            return [(int(key),) for key in keys], values.tolist()
        side = int(np.ceil(np.sqrt(count)))
        tokens = rng.permutation(np.arange(1, half))[: 2 * side].tolist()
        grid = [(first, second) for first in tokens[:side] for second in tokens[side:]]
        pairs = [grid[index] for index in rng.permutation(len(grid))[:count]]
        return pairs, (rng.integers(half, size=count) + half).tolist()
