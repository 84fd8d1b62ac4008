"""MQRAR: recall the value that a key had several occurrences ago.

Multi-query repeated associative recall, N back: PaTH, arXiv:2505.16381, section 4.1.
"""

import dataclasses

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch


@TASKS.register("mqrar")
class Mqrar(SyntheticTask):
    """Keys and values in turn, uniform; the target at a key is its value N occurrences ago.

    With N = 1 this is the value of the last occurrence. A key with fewer earlier occurrences does
    not count. The value that follows is a new one, so targets are not the next inputs.

    >>> task = Mqrar(Mqrar.Config(back=2, keys=2, values=3, assignments=6))
    >>> batch = task.sample(np.random.default_rng(1), 1)
    >>> task.decode(batch["inputs"][0])
    'k0 2 k1 2 k1 0 k1 0 k0 2 k0 1'
    >>> [(place, task.vocabulary[batch["targets"][0, place]]) for place in np.flatnonzero(batch["weights"][0]).tolist()]
    [(6, '2'), (10, '2')]
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of MQRAR.

        Attributes:
          back: N, how many occurrences ago.
          keys: the number of keys.
          values: the number of values, which the paper does not say.
          assignments: the number of pairs of a key and a value in "train" and "in_distribution";
            "longer" has twice as many.
        """

        back: int = 1
        keys: int = 32
        values: int = 64
        assignments: int = 384

        def __post_init__(self):
            check_at_least(1, "mqrar", back=self.back, keys=self.keys)
            check_at_least(2, "mqrar", values=self.values)
            # Then some key occurs often enough in every sequence.
            check_at_least(self.back * self.keys + 1, "mqrar", assignments=self.assignments)

    abilities = ("occurrence", "recall")
    continues = False
    axis = "assignments"
    sweep_label = "assignments"

    def __init__(self, config: Config):
        n = config.assignments
        super().__init__(
            config,
            vocabulary=(
                *(f"k{key}" for key in range(config.keys)),
                *map(str, range(config.values)),
            ),
            levels={"train": n, "in_distribution": n, "longer": 2 * n},
            sweep=[
                (point, point) for point in sorted({n, 5 * n // 4, 3 * n // 2, 7 * n // 4, 2 * n})
            ],
        )

    def _length(self, level: float) -> int:
        return 2 * int(level)

    def _valid(self, level: float) -> bool:
        return level > self.config.back * self.config.keys and level == int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        config, count = self.config, int(level)
        keys = rng.integers(config.keys, size=(n, count))
        values = rng.integers(config.values, size=(n, count)) + config.keys
        inputs = np.stack([keys, values], axis=2).reshape(n, 2 * count).astype(np.int32)
        targets, weights = inputs.copy(), np.zeros(inputs.shape, np.float32)
        # In this order, occurrences of the same key are next to each other, the earlier first.
        order = np.argsort(keys, axis=1, kind="stable")
        sorted_keys = np.take_along_axis(keys, order, axis=1)
        same = sorted_keys[:, config.back :] == sorted_keys[:, : -config.back]
        row, rank = np.nonzero(same)
        now, before = order[row, rank + config.back], order[row, rank]
        targets[row, 2 * now] = values[row, before]
        weights[row, 2 * now] = 1
        return {"inputs": inputs, "targets": targets, "weights": weights}
