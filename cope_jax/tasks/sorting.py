"""Sorting: write items in increasing order.

Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization", arXiv:2305.19466.
"""

import dataclasses
import string
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check

SINGLE = (string.ascii_lowercase + string.ascii_uppercase)[:50]
NUMBERS = range(10, 10_000)


@TASKS.register("sorting")
class Sorting(QuestionTask):
    """Different items in random order; the answer has the same items in increasing order.

    An item is one of 50 symbols ("single"), a token each, or a number from 10 to 9999
    ("multi_digit"), a token for each digit and one after the number.

    >>> task = Sorting(Sorting.Config(form="multi_digit", items=2))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    '5 1 1 6 , 6 3 7 2 , = 5 1 1 6 , 6 3 7 2'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of sorting.

        Attributes:
          form: what an item is.
          items: the largest number of items in "train" and "in_distribution"; "longer" has up to
            twice as many.
        """

        form: Literal["single", "multi_digit"] = "single"
        items: int = 16

        def __post_init__(self):
            check_fields(self, "sorting")
            check_at_least(2, "sorting", items=self.items)
            there_are = len(SINGLE) if self.form == "single" else len(NUMBERS)
            check(
                2 * self.items <= there_are,
                f"sorting.items must be at most {there_are // 2}, because there are {there_are:,} different items, "
                f"got {self.items}",
            )

    abilities = ("copy",)
    axis = "items"
    sweep_label = "items, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        single = config.form == "single"
        symbols, largest = (SINGLE, len(SINGLE)) if single else (f"{string.digits},", len(NUMBERS))
        super().__init__(config, symbols=symbols, size=config.items, largest=largest)

    def _tokens(self, size: int) -> int:
        return 2 * size if self.config.form == "single" else 10 * size

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        if self.config.form == "single":
            chosen = rng.permutation(len(SINGLE))[:size]
            question, answer = ("".join(SINGLE[n] for n in of) for of in (chosen, sorted(chosen)))
            return question, answer
        numbers = rng.choice(np.array(NUMBERS), size=size, replace=False).tolist()
        return "".join(f"{number}," for number in numbers), "".join(
            f"{number}," for number in sorted(numbers)
        )
