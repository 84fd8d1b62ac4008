"""Addition of two numbers, digit by digit, with abacus embeddings or position coupling.

McLeish et al., "Transformers Can Do Arithmetic with the Right Embeddings", arXiv:2405.17399; Cho et
al., "Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task
Structure", arXiv:2405.20671.
"""

import dataclasses
import string
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, next_token_batch

PLUS, EQUALS, END, PAD = range(10, 14)
Positions = Literal["consecutive", "abacus", "coupled"]


@TASKS.register("addition")
class Addition(SyntheticTask):
    """Two numbers and their sum. The digits of the sum and the end count in loss and metric.

    Each number has between n//2 + 1 and n digits, where n is the level; a leading 0 becomes 1. The
    least significant digit of every number is first, so that a carry moves forward. With the
    positions "coupled" only the sum is written so: the operands begin with the most significant
    digit, and have zeros in front until they are equally long. Positions belong to the batch:

    - *consecutive*: 0, 1, 2, …
    - *abacus*: the place of a digit in its number, from 1; all other tokens have 0
    - *coupled*: the significance of a digit, from 1; `+`, `=` and the end have 0. Digits that are
      added to each other have the same position. The positions of these three tokens in the
      paper were not available to us

    In training each sequence adds a random number below `offsets` to the positions of its digits
    ("abacus") or of all its tokens ("coupled"), so that larger positions are trained too. A table
    of positions needs `offsets` + 2·`digits` + 2 rows. `<pad>` has position 0.

    >>> task = Addition(Addition.Config(digits=3, positions="abacus"))
    >>> batch = task.sample(np.random.default_rng(2), 1, "in_distribution")
    >>> task.decode(batch["inputs"][0])
    '1 2 4 + 8 4 = 9 6 4 $ <pad>'
    >>> batch["positions"][0].tolist()
    [1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 0]
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '9 6 4 $'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of addition.

        Attributes:
          digits: the most digits of an operand in "train" and "in_distribution"; "longer" has twice
            as many.
          positions: the positions in the batch.
          offsets: how many different numbers may be added to the positions in training; 1 means
            that none is. It has no effect on consecutive positions.
        """

        digits: int = 10
        positions: Positions = "consecutive"
        offsets: int = 100

        def __post_init__(self):
            check_fields(self, "addition")
            check_at_least(1, "addition", digits=self.digits, offsets=self.offsets)

    metric = "sequence_error"
    abilities = ("arithmetic",)
    axis = "digits"
    sweep_label = "digits, at most"

    def __init__(self, config: Config):
        n = config.digits
        super().__init__(
            config,
            vocabulary=(*string.digits, "+", "=", "$", "<pad>"),
            levels={"train": n, "in_distribution": n, "longer": 2 * n},
            sweep=[
                (level, level)
                for level in sorted(
                    {n, n + (n + 3) // 4, n + (n + 1) // 2, n + (3 * n + 3) // 4, 2 * n}
                )
            ],
        )

    def sample(self, rng: np.random.Generator, n: int, split: str = "train") -> Batch:
        batch = super().sample(rng, n, split)
        if split != "train" or self.config.positions == "consecutive":
            return batch
        coupled = self.config.positions == "coupled"
        moved = batch["inputs"] != PAD if coupled else batch["positions"] > 0
        offsets = rng.integers(self.config.offsets, size=(n, 1))
        positions = np.where(moved, batch["positions"] + offsets, 0).astype(np.int32)
        return {**batch, "positions": positions}

    def _length(self, level: float) -> int:
        return 3 * int(level) + 3

    def _valid(self, level: float) -> bool:
        return level >= 1 and level == int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        most, coupled = int(level), self.config.positions == "coupled"
        sizes = rng.integers(most // 2 + 1, most + 1, size=(n, 2))
        digits = rng.integers(10, size=(n, 2, most))  # the least significant first
        shape = (n, self._length(level) + 1)
        tokens = np.full(shape, PAD)
        positions = np.zeros(shape, np.int32)
        weights = np.zeros(shape, bool)
        for row, (of_operands, places) in enumerate(zip(digits, sizes, strict=True)):
            padded = zip(of_operands, places, strict=True)
            operands = [_number(digits_of[:size]) for digits_of, size in padded]
            longest = len(str(max(operands)))
            lengths = [longest if coupled else len(str(operand)) for operand in operands]
            pairs = zip(operands, lengths, strict=True)
            written = [str(operand).zfill(length) for operand, length in pairs]
            total = str(sum(operands)).zfill(longest + 1 if coupled else 0)
            step = 1 if coupled else -1
            first, second = (map(int, digits_of[::step]) for digits_of in written)
            text = [*first, PLUS, *second, EQUALS, *map(int, total[::-1]), END]
            rising = [range(1, length + 1)[::-step] for length in lengths]
            places_of_text = [*rising[0], 0, *rising[1], 0, *range(1, len(total) + 1), 0]
            tokens[row, : len(text)] = text
            positions[row, : len(text)] = places_of_text
            weights[row, len(text) - len(total) - 1 : len(text)] = True
        batch = next_token_batch(tokens, weights[:, 1:])
        if self.config.positions == "consecutive":
            return batch
        return {**batch, "positions": positions[:, :-1]}


def _number(digits: np.ndarray) -> int:
    """The number with these digits, the least significant first, without a leading zero."""
    last = max(1, int(digits[-1])) if len(digits) > 1 else int(digits[-1])
    return int("".join(map(str, [last, *digits[-2::-1]])))
