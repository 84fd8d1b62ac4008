"""SCAN: translate commands such as "jump twice" to actions.

Lake & Baroni, "Generalization without Systematicity", arXiv:1711.00350.
"""

import dataclasses
import functools
import itertools

import numpy as np

from cope_jax.errors import ConfigError
from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, next_token_batch

WORDS = "walk look run jump turn left right opposite around twice thrice and after".split()
ACTIONS = "WALK LOOK RUN JUMP LEFT RIGHT".split()
LONGEST = 48
"""The number of actions of the longest command."""


@functools.cache
def commands() -> tuple[tuple[str, str], ...]:
    """All 20,910 commands of the grammar with their actions, sorted by the number of actions.

    >>> len(commands())
    20910
    >>> commands()[0]
    ('walk', 'WALK')
    """
    verbs = [(verb, verb.upper()) for verb in ("walk", "look", "run", "jump")]
    phrases = list(verbs)
    for side in ("left", "right"):
        for verb, action in [*verbs, ("turn", "")]:
            turned = f"{side.upper()} {action}".strip()
            phrases += [
                (f"{verb} {side}", turned),
                (f"{verb} opposite {side}", f"{side.upper()} {turned}"),
                (f"{verb} around {side}", " ".join([turned] * 4)),
            ]
    repeated = [
        (f"{words} {often}".strip(), " ".join([actions] * times))
        for words, actions in phrases
        for often, times in (("", 1), ("twice", 2), ("thrice", 3))
    ]
    joined = [
        pair
        for (first, a), (second, b) in itertools.product(repeated, repeated)
        for pair in ((f"{first} and {second}", f"{a} {b}"), (f"{first} after {second}", f"{b} {a}"))
    ]
    return tuple(sorted(repeated + joined, key=lambda pair: len(pair[1].split())))


@TASKS.register("scan")
class Scan(SyntheticTask):
    """Commands of SCAN, uniform among those of the grammar of suitable length, and their actions.

    Turning is written LEFT and RIGHT. The level is the largest number of actions. "train" and
    "in_distribution" have all commands with up to `actions`, so both have the same ones; "longer"
    has those with more, as the published split by length. A level above `actions` has commands with
    more than `actions`.

    >>> task = Scan(Scan.Config())
    >>> batch = task.sample(np.random.default_rng(1), 1)
    >>> question, _, answer = task.decode(batch["inputs"][0]).partition(" = ")
    >>> question, answer.split(" <pad>")[0]
    ('run left thrice after jump right twice', 'RIGHT JUMP RIGHT JUMP LEFT RUN LEFT RUN LEFT RUN')
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of SCAN.

        Attributes:
          actions: the largest number of actions in "train" and "in_distribution".
        """

        actions: int = 22

        def __post_init__(self):
            check_at_least(1, "scan", actions=self.actions)
            if self.actions >= LONGEST:
                raise ConfigError(
                    f"scan.actions must be below {LONGEST}, the longest of all, got {self.actions}"
                )

    abilities = ("copy",)
    axis = "actions"
    sweep_label = "actions, at most"
    metric = "sequence_error"

    def __init__(self, config: Config):
        n = config.actions
        self._pairs = commands()
        self._sizes = np.array([len(actions.split()) for _, actions in self._pairs])
        above = np.unique(self._sizes[self._sizes > n])
        points = {n, *above[np.linspace(0, len(above) - 1, 4).round().astype(int)].tolist()}
        super().__init__(
            config,
            vocabulary=(*WORDS, *ACTIONS, "=", "<pad>"),
            levels={"train": n, "in_distribution": n, "longer": LONGEST},
            sweep=[(point, point) for point in sorted(points)],
        )

    def _length(self, level: float) -> int:
        return 9 + int(level)  # the longest command has nine words

    def _valid(self, level: float) -> bool:
        low, high = self._range(level)
        return low < high and level <= LONGEST and level == int(level)

    def _range(self, level: float) -> tuple[int, int]:
        """The first command of a level, and the first after it."""
        trained = self.config.actions
        first = 0 if level <= trained else trained + 1
        low, high = np.searchsorted(self._sizes, [first, level + 1])
        return int(low), int(high)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        tokens = np.full((n, self._length(level) + 1), self.vocab_size - 1, np.int32)
        weights = np.zeros(tokens.shape, bool)
        for row, number in enumerate(rng.integers(*self._range(level), size=n)):
            words, actions = self._pairs[number]
            question, answer = self.encode(f"{words} ="), self.encode(actions)
            end = len(question) + len(answer)
            tokens[row, :end] = [*question, *answer]
            weights[row, len(question) : end] = True
        return next_token_batch(tokens, weights[:, 1:])
