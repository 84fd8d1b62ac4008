"""Dyck-2: close all open brackets of two kinds.

After MapFormer, arXiv:2511.19279, appendix B.4.
"""

import dataclasses

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.task import TASKS, check

OPEN, CLOSE = "([", ")]"


@TASKS.register("dyck")
class Dyck(QuestionTask):
    """The beginning of a well-formed sequence of brackets; the answer closes all that are open, the last one first.

    A bracket opens with probability 1/2, but always if none is open, and never beyond the largest depth, which grows
    with the length: it is `depth` at the training length and twice that in "longer". The kinds are uniform.

    The paper predicts each next bracket and measures F1 of the valid ones, which needs probabilities; of two valid
    brackets, any may follow. Here the answer is certain, so errors are those of the stack.

    >>> task = Dyck(Dyck.Config(length=9, depth=3))
    >>> batch = task.sample(np.random.default_rng(0), 1, "length=9")
    >>> task.decode(batch["inputs"][0])
    '[ ] ( ) [ [ [ ] = ] ] <pad>'
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '] ]'
    """

    @dataclasses.dataclass(frozen=True)
    class Config:
        """Options of Dyck-2.

        Attributes:
          length: the largest number of brackets in a question of "train" and "in_distribution"; "longer" has up to
            twice as many, "longest" four times.
          depth: the largest depth at this length.
        """

        length: int = 32
        depth: int = 4

        def __post_init__(self):
            check_at_least(2, "dyck", depth=self.depth)
            check(
                self.length >= 2 * self.depth,
                f"dyck.length must be at least {2 * self.depth}, twice the depth, got {self.length}",
            )

    abilities = ("stack",)
    axis = "length"
    sweep_label = "brackets in the question, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        n = config.length
        super().__init__(
            config,
            symbols=OPEN + CLOSE,
            sizes={"train": n, "in_distribution": n, "longer": 2 * n, "longest": 4 * n},
        )

    def _tokens(self, size: int) -> int:
        return size + self._depth(size)

    def _depth(self, size: int) -> int:
        """The largest depth of a question with `size` brackets, 2 or more."""
        return max(2, round(self.config.depth * size / self.config.length))

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        deepest = self._depth(size)
        while True:
            text, stack = "", ""
            for opens, kind in rng.integers(2, size=(size, 2)):
                if not stack or (opens and len(stack) < deepest):
                    text, stack = text + OPEN[kind], stack + CLOSE[kind]
                else:
                    text, stack = text + stack[-1], stack[:-1]
            if stack:  # else there is nothing to close
                return text, stack[::-1]
