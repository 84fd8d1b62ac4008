"""Copying: repeat a string, or what follows some of its letters.

Jelassi et al., "Repeat After Me", arXiv:2402.01032.
"""

import dataclasses
import math
import string
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check

Form = Literal["copy", "prefix_ngram", "suffix_ngram", "repeated_ngrams"]


@TASKS.register("copying")
class Copying(QuestionTask):
    """Strings of random letters, a token each, in one of four forms.

    - "copy": `w`, and the answer `w`.
    - "repeated_ngrams": the same, but w repeats a few n-grams, one for each 4n letters and at least
      two, so that the letters before do not say what follows.
    - "prefix_ngram": n letters, `|`, and a string w that has them once; the answer is the n letters
      after them.
    - "suffix_ngram": the same with w first, so a model that reads once must keep all of w.

    >>> task = Copying(Copying.Config(form="suffix_ngram", letters=8, ngram=2))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    'q n h i b b a e | b b = a'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of copying.

        Attributes:
          form: the form of question and answer.
          letters: the longest w in "train" and "in_distribution"; "longer" has up to twice as many.
          ngram: n, the number of letters of a query, of its answer, and of what repeats.
        """

        form: Form = "copy"
        letters: int = 64
        ngram: int = 3

        def __post_init__(self):
            check_fields(self, "copying")
            check_at_least(1, "copying", ngram=self.ngram)
            check(
                self.letters >= self.smallest,
                f"copying.letters must be at least {self.smallest} with {self.form} and ngram={self.ngram}, "
                f"got {self.letters}",
            )
            check(
                2 * self.letters <= self.largest,
                f"copying.letters must be at most {self.largest // 2} with ngram={self.ngram}, because a query comes "
                f"once in its string, got {self.letters}",
            )

        @property
        def smallest(self) -> int:
            """The smallest number of letters."""
            return 2 if self.form == "copy" else 2 * self.ngram

        @property
        def largest(self) -> float:
            """The most letters. In longer strings, queries that come once are too rare."""
            return 3 * 26**self.ngram if self.form.endswith("_ngram") else math.inf

    abilities = ("copy", "recall")
    axis = "letters"
    sweep_label = "letters, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        super().__init__(
            config,
            symbols=(*string.ascii_lowercase, "|"),
            size=config.letters,
            smallest=config.smallest,
            largest=config.largest,
        )

    def _tokens(self, size: int) -> int:
        return size + 1 + 2 * self.config.ngram if self.config.form.endswith("_ngram") else 2 * size

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        form, n = self.config.form, self.config.ngram
        if form == "repeated_ngrams":
            known = [_letters(rng, n) for _ in range(max(2, size // n // 4))]
            chosen = rng.integers(len(known), size=size // n + 1)
            word = "".join(known[number] for number in chosen)[:size]
            return word, word
        word = _letters(rng, size)
        if form == "copy":
            return word, word
        while True:
            start = int(rng.integers(size - 2 * n + 1))
            query = word[start : start + n]
            if word.find(query) == word.rfind(query):
                break
            word = _letters(rng, size)
        answer = word[start + n : start + 2 * n]
        return (f"{query}|{word}" if form == "prefix_ngram" else f"{word}|{query}"), answer


def _letters(rng: np.random.Generator, n: int) -> str:
    return "".join(string.ascii_lowercase[letter] for letter in rng.integers(26, size=n))
