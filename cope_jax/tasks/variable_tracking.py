"""Variable tracking: name all variables that have a value, some of them through others.

RULER, arXiv:2404.06654, as tokens instead of English text.
"""

import dataclasses
import string

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.question import QuestionTask
from cope_jax.tasks.synthetic import SyntheticConfig
from cope_jax.tasks.task import TASKS, check

NOISE = "_"


@TASKS.register("variable_tracking")
class VariableTracking(QuestionTask):
    """Chains of assignments in a haystack; the answer names the variables of one chain, in order.

    `A:7;` gives A the value 7, and `B:A;` gives B the value of A. Each chain has one value and then
    `hops` copies of the variable before, in order. Places between are filled by `_`. The question
    is the value.

    >>> task = VariableTracking(VariableTracking.Config(tokens=24, hops=1, chains=2))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0])
    '_ _ _ T : 4 ; _ _ E : T ; _ K : 5 ; _ L : K ; ? 5 = K L'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of variable tracking.

        Attributes:
          tokens: the largest haystack in "train" and "in_distribution", in tokens; "longer" has up
            to twice as many.
          hops: the number of copies in a chain; 4 in RULER.
          chains: the number of chains, each with another value; 1 in RULER.
        """

        tokens: int = 64
        hops: int = 4
        chains: int = 2

        def __post_init__(self):
            check_at_least(1, "variable_tracking", hops=self.hops, chains=self.chains)
            count = self.chains * (self.hops + 1)
            check(
                count <= 26,
                f"variable_tracking has {count} variables, more than 26: lower chains or hops",
            )
            check(
                self.chains <= 10, f"variable_tracking.chains must be at most 10, got {self.chains}"
            )
            check(
                self.tokens >= 4 * count,
                f"variable_tracking.tokens must be at least {4 * count}, four for each assignment, got {self.tokens}",
            )

    abilities = ("recall",)
    axis = "tokens"
    sweep_label = "tokens of the haystack, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        super().__init__(
            config,
            symbols=(*string.ascii_uppercase, *string.digits, *":;?", NOISE),
            size=config.tokens,
            smallest=4 * config.chains * (config.hops + 1),
        )

    def _tokens(self, size: int) -> int:
        return size + 2 + self.config.hops + 1

    def _question(self, rng: np.random.Generator, size: int) -> tuple[str, str]:
        config = self.config
        names = [string.ascii_uppercase[letter] for letter in rng.permutation(26)]
        values = rng.permutation(10)[: config.chains]
        chains = [
            names[chain * (config.hops + 1) :][: config.hops + 1] for chain in range(config.chains)
        ]
        # Each chain is written in order; which chain comes next is random.
        order = rng.permutation(np.repeat(np.arange(config.chains), config.hops + 1))
        written, next_hop = [], [0] * config.chains
        for chain in order:
            hop = next_hop[chain]
            before = chains[chain][hop - 1] if hop else str(values[chain])
            written.append(f"{chains[chain][hop]}:{before};")
            next_hop[chain] += 1
        spare = size - 4 * len(written)
        breaks = np.sort(rng.integers(spare + 1, size=len(written)))
        gaps = np.diff(breaks, prepend=0, append=spare)
        pieces = zip(gaps, [*written, ""], strict=True)
        text = "".join(NOISE * gap + statement for gap, statement in pieces)
        asked = int(rng.integers(config.chains))
        return f"{text}?{values[asked]}", "".join(chains[asked])
