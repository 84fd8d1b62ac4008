"""Group words: the product of all elements so far, at every place.

Merrill, Petty & Sabharwal, "The Illusion of State", arXiv:2404.08819.
"""

import dataclasses
import itertools
from typing import Literal

import numpy as np

from cope_jax.registry import check_at_least, check_fields
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, batch_of, check

Permutation = tuple[int, ...]


@TASKS.register("group_words")
class GroupWords(SyntheticTask):
    """Uniform elements x_1, x_2, … of a group; the target at place t is the product x_1 x_2 ⋯ x_t.

    An element is a permutation, written as the images of 0, 1, …; (a·b)(i) = b[a[i]], so the first
    factor acts first. S5 and A5 are not solvable: a model must follow the state step by step. S3 is
    the smallest group in which the order matters. S2 (parity), A3 and Z60 are commutative: they are
    the controls, in which the order does not matter. All places count. Targets are not the next
    inputs.

    >>> task = GroupWords(GroupWords.Config(group="A3", length=4))
    >>> batch = task.sample(np.random.default_rng(0), 1)
    >>> task.decode(batch["inputs"][0]), task.decode(batch["targets"][0])
    ('201 120 120 012', '201 012 120 120')
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of group words.

        Attributes:
          group: the group: all permutations of n things (Sn), the even ones (An), a cycle of 60
            (Z60), or pairs.
          length: the number of elements in "train" and "in_distribution"; it is twice as large in
            "longer", and four times in "longest".
          swaps_only: whether inputs are only the identity and swaps of two things, as in the easier
            published form of S5. Targets are all elements.
        """

        group: Literal["S2", "A3", "S3", "Z60", "A4xZ5", "A5", "S5"] = "A5"
        length: int = 32
        swaps_only: bool = False

        def __post_init__(self):
            check_fields(self, "group_words")
            check_at_least(1, "group_words", length=self.length)
            check(
                not self.swaps_only or self.group.startswith("S"),
                f"group_words.swaps_only needs S2, S3 or S5, because {self.group} has no swaps",
            )

    abilities = ("state",)
    continues = False
    axis = "length"
    sweep_label = "elements"

    def __init__(self, config: Config):
        n, elements = config.length, _elements(config.group)
        numbers = {element: number for number, element in enumerate(elements)}
        products = [[tuple(b[i] for i in a) for b in elements] for a in elements]
        self._product = np.array([[numbers[product] for product in row] for row in products])
        moved = np.array(
            [sum(i != image for i, image in enumerate(element)) for element in elements]
        )
        self._inputs = np.flatnonzero(moved <= 2) if config.swaps_only else np.arange(len(elements))
        separator = "." if len(elements[0]) > 10 else ""
        super().__init__(
            config,
            vocabulary=[separator.join(map(str, element)) for element in elements],
            levels={"train": n, "in_distribution": n, "longer": 2 * n, "longest": 4 * n},
            sweep=[(point, point) for point in (n, 2 * n, 3 * n, 4 * n)],
        )

    def _length(self, level: float) -> int:
        return int(level)

    def _valid(self, level: float) -> bool:
        return level >= 1 and level == int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        words = rng.choice(self._inputs, size=(n, int(level)))
        targets = words.copy()
        for position in range(1, words.shape[1]):
            targets[:, position] = self._product[targets[:, position - 1], words[:, position]]
        return batch_of(words, targets, np.ones(words.shape))


def _elements(group: str) -> list[Permutation]:
    """The elements of a group as permutations, the identity first."""
    if group == "Z60":
        return [_cycle(60, by) for by in range(60)]
    if group == "A4xZ5":
        return [
            (*a, *(4 + image for image in _cycle(5, by)))
            for a in _elements("A4")
            for by in range(5)
        ]
    everything = list(itertools.permutations(range(int(group[1]))))
    if group.startswith("S"):
        return everything
    return [element for element in everything if _is_even(element)]


def _cycle(size: int, by: int) -> Permutation:
    return tuple((element + by) % size for element in range(size))


def _is_even(element: Permutation) -> bool:
    return sum(a > b for a, b in itertools.combinations(element, 2)) % 2 == 0
