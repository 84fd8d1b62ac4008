"""The Chomsky hierarchy suite: fifteen problems from regular to context-sensitive languages.

Delétang et al., "Neural Networks and the Chomsky Hierarchy", arXiv:2207.02098.
"""

import dataclasses

import numpy as np

from cope_jax.registry import check_at_least, unknown
from cope_jax.tasks.chomsky_problems import PROBLEMS
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check


@TASKS.register("chomsky")
class Chomsky(QuestionTask):
    """One of the fifteen problems; answers with the output for a random input of n symbols.

    The problems are: even_pairs, parity_check, cycle_navigation, modular_arithmetic (regular
    languages); stack_manipulation, reverse_string, modular_arithmetic_brackets, solve_equation
    (context-free); duplicate_string, missing_duplicate_string, odds_first, binary_addition,
    binary_multiplication, compute_sqrt, bucket_sort (context-sensitive).
    `cope_jax.tasks.chomsky_problems` defines them. `=` of equations is written `:`, and an even n
    in modular_arithmetic counts as the odd number below.

    The original trains on n up to 40 and tests n from 41 to 500, which are splits such as
    "length=500". Its inputs have a fixed place for each output; here the model writes the output,
    as decoders do. Outputs that end with 2 end there, because the zeros after it do not count in
    the original's accuracy.

    >>> task = Chomsky(Chomsky.Config(problem="odds_first", length=8))
    >>> batch = task.sample(np.random.default_rng(0), 1, "length=5")
    >>> task.decode(batch["inputs"][0])
    '1 1 0 0 0 = 1 0 0 1'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of the suite.

        Attributes:
          problem: the name of the problem.
          length: the largest n in "train" and "in_distribution"; it is twice as large in "longer",
            and four times in "longest".
        """

        problem: str = "parity_check"
        length: int = 40

        def __post_init__(self):
            if self.problem not in PROBLEMS:
                raise unknown("problem of chomsky", self.problem, PROBLEMS)
            check_at_least(PROBLEMS[self.problem][1], "chomsky", length=self.length)
            check(
                self.problem != "modular_arithmetic" or self.length % 2 == 0,
                f"chomsky.length must be even in modular_arithmetic, got {self.length}",
            )

    abilities = ("count", "state", "steps", "stack", "copy", "arithmetic")
    axis = "length"
    sweep_label = "symbols of the input, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        self._problem, smallest, self._outputs = PROBLEMS[config.problem]
        symbols, size = ("0", "1", "2", "3", "4", *"+-*()x:"), config.length
        super().__init__(config, symbols=symbols, size=size, times=(2, 4), smallest=smallest)

    def _tokens(self, size: int) -> int:
        return size + self._outputs(size)

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        return self._problem(rng, size)
