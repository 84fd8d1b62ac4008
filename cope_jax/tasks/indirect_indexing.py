"""Indirect indexing: find a symbol in a string, and go a number of places from there.

PoPE, arXiv:2509.10534, appendix B.1.
"""

import dataclasses
import string

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check


@TASKS.register("indirect_indexing")
class IndirectIndexing(QuestionTask):
    """Different letters, one of them, and a shift; the answer is the letter at that distance.

    The letter is uniform in the string, and the shift is uniform from −`shift` to `shift` among
    those that stay inside the string. Each character is a token. A model must find a letter and
    then count from it; an encoding that mixes content and position is at a disadvantage.

    >>> task = IndirectIndexing(IndirectIndexing.Config(longest=8, shortest=8, shift=3))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    'M l s k x C e K , M , + 0 ='
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    'M'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of indirect indexing.

        Attributes:
          longest: the longest string in "train" and "in_distribution". Strings of "longer" have up
            to twice as many letters, but at most 52, the size of the alphabet, and none has a
            length of training.
          shortest: the shortest string.
          shift: the largest shift to either side.
        """

        longest: int = 40
        shortest: int = 20
        shift: int = 15

        def __post_init__(self):
            check_at_least(1, "indirect_indexing", shift=self.shift)
            check_at_least(2, "indirect_indexing", shortest=self.shortest)
            check(
                self.shortest <= self.longest < len(string.ascii_letters),
                f"indirect_indexing.longest must lie between shortest and 51, got {self.longest}",
            )

    abilities = ("index",)
    axis = "letters"
    sweep_label = "letters in the string, at most"
    metric = "token_error"

    def __init__(self, config: Config):
        super().__init__(
            config,
            symbols=(*string.ascii_letters, *string.digits, ",", "+", "-"),
            size=config.longest,
            smallest=config.shortest,
            largest=len(string.ascii_letters),
        )

    def _tokens(self, size: int) -> int:
        return size + 5 + len(str(min(self.config.shift, size - 1)))

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        chosen = rng.permutation(len(string.ascii_letters))[:size]
        letters = "".join(string.ascii_letters[letter] for letter in chosen)
        index, most = int(rng.integers(size)), self.config.shift
        target = int(rng.integers(max(0, index - most), min(size, index + most + 1)))
        return f"{letters},{letters[index]},{target - index:+d}", letters[target]
