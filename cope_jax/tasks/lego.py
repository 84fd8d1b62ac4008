"""LEGO: follow a chain of assignments with signs to the value of a variable.

Zhang et al., arXiv:2206.04301, as in Kazemnejad et al., arXiv:2305.19466.
"""

import dataclasses
import string

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check


@TASKS.register("lego")
class Lego(QuestionTask):
    """A chain `a=+1; b=-a; c=+b; …` over random letters, and one of them; the answer is its value.

    The variable is from the second half of the chain. Each character is a token, and `is` is
    written `:`, because `=` precedes the answer. With `permuted`, the assignments are in random
    order.

    >>> task = Lego(Lego.Config(variables=4))
    >>> batch = task.sample(np.random.default_rng(3), 1)
    >>> task.decode(batch["inputs"][0])
    'u : + 1 ; x : + u ; d : + x ; r : - d ; r ='
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '-'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of LEGO.

        Attributes:
          variables: the longest chain in "train" and "in_distribution"; "longer" has up to twice as
            many, at most 26.
          permuted: whether the assignments are in random order.
        """

        variables: int = 8
        permuted: bool = False

        def __post_init__(self):
            check_at_least(2, "lego", variables=self.variables)
            check(self.variables < 26, f"lego.variables must be below 26, got {self.variables}")

    abilities = ("recall",)
    axis = "variables"
    sweep_label = "variables, at most"
    metric = "token_error"

    def __init__(self, config: Config):
        symbols = (*string.ascii_lowercase, *":+-1;")
        super().__init__(config, symbols=symbols, size=config.variables, smallest=2, largest=26)

    def _tokens(self, size: int) -> int:
        return 5 * size + 2

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        names = [string.ascii_lowercase[letter] for letter in rng.permutation(26)[:size]]
        signs = rng.choice([-1, 1], size=size)
        links = zip(names, signs, ["1", *names], strict=False)
        written = [f"{name}:{'+' if sign > 0 else '-'}{before};" for name, sign, before in links]
        asked = int(rng.integers(size // 2, size))
        if self.config.permuted:
            written = [written[index] for index in rng.permutation(size)]
        return "".join(written) + names[asked], "+" if np.prod(signs[: asked + 1]) > 0 else "-"
