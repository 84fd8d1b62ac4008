"""Needles with keys: recall the number that belongs to a key, among other keys and noise.

RULER's multi-key needle in a haystack, arXiv:2404.06654, as tokens instead of English text.
"""

import dataclasses
import string

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check

NOISE = "_"


@TASKS.register("needle_keys")
class NeedleKeys(QuestionTask):
    """Keys with numbers in a haystack; the question is a key, and the answer its number.

    A needle is a letter, `:` and `digits` digits. Places between are filled by `_`.

    >>> task = NeedleKeys(NeedleKeys.Config(tokens=16, keys=2, digits=3))
    >>> batch = task.sample(np.random.default_rng(2), 1)
    >>> task.decode(batch["inputs"][0])
    'O : 6 9 9 _ _ X : 8 6 3 _ _ _ ? O = 6 9 9'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of needles with keys.

        Attributes:
          tokens: the largest haystack in "train" and "in_distribution", in tokens; "longer" has up
            to twice as many.
          keys: the number of needles; 4 in RULER.
          digits: the number of digits of a needle; 7 in RULER.
        """

        tokens: int = 64
        keys: int = 4
        digits: int = 4

        def __post_init__(self):
            check_at_least(1, "needle_keys", keys=self.keys, digits=self.digits)
            check(self.keys <= 26, f"needle_keys.keys must be at most 26, got {self.keys}")
            least = self.keys * (self.digits + 2)
            check(
                self.tokens >= least,
                f"needle_keys.tokens must be at least {least}, all needles, got {self.tokens}",
            )

    abilities = ("recall",)
    axis = "tokens"
    sweep_label = "tokens of the haystack, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        super().__init__(
            config,
            symbols=(*string.ascii_uppercase, *string.digits, *":?", NOISE),
            size=config.tokens,
            smallest=config.keys * (config.digits + 2),
        )

    def _tokens(self, size: int) -> int:
        return size + 2 + self.config.digits

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        config = self.config
        keys = [string.ascii_uppercase[letter] for letter in rng.permutation(26)[: config.keys]]
        digits = rng.integers(10, size=(config.keys, config.digits))
        numbers = ["".join(map(str, row)) for row in digits]
        spare = size - config.keys * (config.digits + 2)
        gaps = np.diff(np.sort(rng.integers(spare + 1, size=config.keys)), prepend=0, append=spare)
        needles = [f"{key}:{number}" for key, number in zip(keys, numbers, strict=True)]
        text = "".join(
            NOISE * gap + needle for gap, needle in zip(gaps, (*needles, ""), strict=True)
        )
        asked = int(rng.integers(config.keys))
        return f"{text}?{keys[asked]}", numbers[asked]
