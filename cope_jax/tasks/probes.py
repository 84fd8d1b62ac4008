"""Five probes of what attention can look up: by place, by content, and by both.

DaRoPE, arXiv:2609.34556, appendix E.
"""

import dataclasses
import string
from collections.abc import Mapping
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check

Probe = Literal["fixed_offset", "assoc_recall", "dup_key_recall", "needle", "induction"]


@TASKS.register("probes")
class Probes(QuestionTask):
    """A question about a string of n symbols, of one of five kinds; each character is a token.

    - "fixed_offset": n digits and a number k; the answer is the digit at place k from the end.
    - "assoc_recall": n pairs of a letter and a digit, and one of the letters; the answer is its
      digit. The letter is in one pair only, others may repeat.
    - "dup_key_recall": the same, but the letter is in two pairs with different digits; the answer
      is the later digit.
    - "needle": n digits; the answer has a 1 for each digit that came before, and a 0 for each other
      digit.
    - "induction": n digits; the answer has for each digit what followed the same digit the last
      time, or 0.

    The examples in the paper have one output less than inputs for the last two, and do not say
    which; here each digit has one. The headline metric is `normalised_error`, the token error
    divided by the error of always answering the same: 100 % is chance, as in the paper. For a digit
    that is 90 %. For "needle" it is the expected share of digits that are new (0), and for
    "induction" of those that follow another digit than 0.

    >>> task = Probes(Probes.Config(probe="fixed_offset", symbols=7))
    >>> batch = task.sample(np.random.default_rng(1), 1)
    >>> task.decode(batch["inputs"][0])
    'F O : 5 7 9 0 # 0 0 0 1 = 0 <pad> <pad>'
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '0'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of the probes.

        Attributes:
          probe: the kind of question.
          symbols: the largest n in "train" and "in_distribution". It is twice as large in "longer",
            and eight times in "longest".
        """

        probe: Probe = "fixed_offset"
        symbols: int = 64

        def __post_init__(self):
            check_fields(self, "probes")
            check_at_least(4, "probes", symbols=self.symbols)
            check(
                self.symbols < 1250,
                f"probes.symbols must be below 1250, got {self.symbols}: places have four digits",
            )

    abilities = ("recall", "index")
    axis = "symbols"
    sweep_label = "symbols in the string, at most"
    metric = "normalised_error"
    other_metrics = ("token_error", "sequence_error")

    def __init__(self, config: Config):
        super().__init__(
            config,
            symbols=(*string.digits, *string.ascii_lowercase, *sorted({*"FOARDKNI:#?"})),
            size=config.symbols,
            times=(2, 8),
            smallest=2,
            largest=9999,
        )

    def reported_metrics(self, split: str, metrics: Mapping[str, float]) -> dict[str, float]:
        error = metrics["token_error"] / self.chance_error(split)
        return {**metrics, "normalised_error": error}

    def chance_error(self, split: str) -> float:
        """The expected token error of the best answer that is always the same.

        >>> task = Probes(Probes.Config(probe="needle"))
        >>> [round(task.chance_error(split), 3) for split in task.splits]
        [0.264, 0.264, 0.104, 0.026]
        """
        kind, sizes = self.config.probe, self._sizes(self.level(split))
        if kind not in ("needle", "induction"):
            return 0.9
        # The expected share of digits that are new.
        new = sum(10 * (1 - 0.9**size) for size in sizes) / sum(sizes)
        return min(new, 1 - new) if kind == "needle" else 0.9 * (1 - new)

    def _tokens(self, size: int) -> int:
        kind = self.config.probe
        return {"fixed_offset": size + 9, "needle": 2 * size + 2, "induction": 2 * size + 2}.get(
            kind, 2 * size + 6
        )

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        kind = self.config.probe
        digits = "".join(map(str, rng.integers(10, size=size)))
        if kind == "fixed_offset":
            index = int(rng.integers(1, size + 1))
            return f"FO:{digits}#{index:04d}", digits[-index]
        if kind == "needle":
            seen = (int(digit in digits[:index]) for index, digit in enumerate(digits))
            return f"N:{digits}", "".join(map(str, seen))
        if kind == "induction":
            return f"I:{digits}", "".join(_successor(digits[: index + 1]) for index in range(size))
        queried, *others = (string.ascii_lowercase[letter] for letter in rng.permutation(26))
        keys = [others[number] for number in rng.integers(len(others), size=size)]
        values = list(digits)
        count = 1 if kind == "assoc_recall" else 2
        places = sorted(rng.choice(size, size=count, replace=False).tolist())
        for index in places:
            keys[index] = queried
        if len(places) == 2:  # the earlier digit is another one
            values[places[0]] = str((int(values[places[1]]) + int(rng.integers(1, 10))) % 10)
        pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
        return f"{'AR' if kind == 'assoc_recall' else 'DK'}:{pairs}?{queried}", values[places[-1]]


def _successor(digits: str) -> str:
    """The digit that followed the last digit at its previous occurrence, or 0.

    >>> "".join(_successor("55791289"[: n + 1]) for n in range(8))
    '05000001'
    """
    before = digits.rfind(digits[-1], 0, len(digits) - 1)
    return digits[before + 1] if before >= 0 else "0"
