"""Counting: print the value of a variable that was set to zero and then incremented.

Golovneva et al., arXiv:2405.18719, section 5.3, by the rules of its released generator.
"""

import dataclasses
import string

import numpy as np

from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, check

# Programs generated at a time: limits memory to tens of MB for any size of the batch.
MAX_ROWS = 1024
ABSENT = -1
PASS, INCREMENT, SET = range(3)


@TASKS.register("counting")
class Counting(SyntheticTask):
    """A program of set, increment and pass operations, then a question about one variable.

    The number of operations is uniform in [min_operations, max_operations]. Each operation is
    sampled by weight:

    - *set* makes any of the variables 0, with the 4 tokens `a = 0 ;`
    - *increment* adds 1 to a variable that was set before, with the 2 tokens `a ++;`
    - *pass* does nothing, with the token `pass;`

    If no variable was set before an increment, or the variable to increment is at max_value, the
    operation is sampled again. A program that sets no variable is sampled again. The question
    `print a` is about a variable that was set. The answer, the value of this variable, is the only
    token that counts in loss and metric.

    Inputs longer than block_length are trimmed from the left, which may cut the *set* of the
    variable; shorter ones are padded on the right with `<pad>`.

    The level is the weight of *pass*.

    >>> options = {"max_operations": 5, "set_weight": 2.0, "increment_weight": 3.0, "pass_weight": 1.0}
    >>> task = Counting(Counting.Config(block_length=16, **options))
    >>> batch = task.sample(np.random.default_rng(5), 1)
    >>> task.decode(batch["inputs"][0])
    'a = 0 ; pass; a = 0 ; a ++; a ++; print a <pad>'
    >>> task.decode(batch["targets"][0][batch["weights"][0] == 1])
    '2'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of counting.

        Attributes:
          num_variables: number of variables, named a, b, c, …
          max_value: maximum value of a variable.
          min_operations: minimum number of operations of a program.
          max_operations: maximum number of operations of a program.
          block_length: maximum number of tokens of an input.
          set_weight: weight of *set*.
          increment_weight: weight of *increment*.
          pass_weight: weight of *pass* in "train" and "in_distribution".
          ood_pass_weights: weights of *pass* in further splits, each named `pass_<weight>`.
        """

        num_variables: int = 1
        max_value: int = 10
        min_operations: int = 3
        max_operations: int = 512
        block_length: int = 512
        set_weight: float = 1.0
        increment_weight: float = 7.0
        pass_weight: float = 50.0
        ood_pass_weights: tuple[float, ...] = (100.0, 10.0)

        def __post_init__(self):
            variables, least, most = self.num_variables, self.min_operations, self.max_operations
            check(
                1 <= variables <= 26,
                f"counting.num_variables must be between 1 and 26, got {variables}",
            )
            check_at_least(1, "counting", max_value=self.max_value)
            bounds = "counting needs 1 <= min_operations <= max_operations"
            check(1 <= least <= most, f"{bounds}, got {least} and {most}")
            check_at_least(2, "counting", block_length=self.block_length)
            check(
                self.set_weight > 0, f"counting.set_weight must be positive, got {self.set_weight}"
            )
            for weight in (self.increment_weight, self.pass_weight, *self.ood_pass_weights):
                check(weight >= 0, f"weights of counting must be at least 0, got {weight}")

    abilities = ("count",)
    axis = "pass"
    sweep_label = "weight of pass"

    def __init__(self, config: Config):
        c = config
        variables = string.ascii_lowercase[: c.num_variables]
        numbers = map(str, range(c.max_value + 1))
        levels = {"train": c.pass_weight, "in_distribution": c.pass_weight}
        levels |= {f"pass_{weight:g}": weight for weight in c.ood_pass_weights}
        points = sorted({max(1, round(c.pass_weight * factor)) for factor in (0.2, 0.5, 1, 1.5, 2)})
        vocabulary = ("<pad>", "=", ";", "++;", "pass;", "print", *variables, *numbers)
        sweep = [(point, point) for point in points]
        super().__init__(config, vocabulary=vocabulary, levels=levels, sweep=sweep)

    def _length(self, level: float) -> int:
        return min(self.config.block_length, 4 * self.config.max_operations + 2)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        chunks: list[Batch] = []
        missing = n
        while missing > 0 or not chunks:
            # A quarter more than needed, because programs that set no variable are left out.
            chunks.append(self._programs(rng, min(missing + missing // 4 + 8, MAX_ROWS), level))
            missing -= len(chunks[-1]["inputs"])
        return {key: np.concatenate([chunk[key] for chunk in chunks])[:n] for key in chunks[0]}

    def _programs(self, rng: np.random.Generator, n: int, pass_weight: float) -> Batch:
        """Samples n programs, and leaves out those that set no variable."""
        c = self.config
        lengths = rng.integers(c.min_operations, c.max_operations + 1, size=n)
        draws = rng.random((2, c.max_operations, n))
        operations, targets, values = _run(c, pass_weight, lengths, *draws)
        is_set = values != ABSENT
        asked = _nth_true(is_set, rng.random(n) * is_set.sum(1))
        answer = np.take_along_axis(values, asked[:, None], axis=1)[:, 0]

        word = self._numbers
        # The tokens of each operation; a variable's name replaces "a".
        forms = np.full((3, 4), ABSENT)
        forms[PASS, :1] = word["pass;"]
        forms[INCREMENT, :2] = word["a"], word["++;"]
        forms[SET] = word["a"], word["="], word["0"], word[";"]
        tokens = np.full((n, c.max_operations + 1, 4), ABSENT)
        happens = np.arange(c.max_operations) < lengths[:, None]
        tokens[:, :-1] = np.where(happens[:, :, None], forms[operations], ABSENT)
        tokens[:, :-1, 0] += np.where(tokens[:, :-1, 0] == word["a"], targets, 0)
        question = [np.full(n, word["print"]), word["a"] + asked, word["0"] + answer]
        tokens[:, -1, :3] = np.stack(question, axis=1)
        return self._batch(tokens[is_set.any(1)].reshape(-1, 4 * (c.max_operations + 1)))

    def _batch(self, tokens: np.ndarray) -> Batch:
        """Removes gaps (ABSENT) in each row, trims rows on the left, pads them on the right."""
        present = tokens != ABSENT
        flat = np.append(tokens[present], self._numbers["<pad>"])
        count = present.sum(1, keepdims=True)
        end = count.cumsum(0)
        start = end - count
        length = self._length(0)
        index = np.maximum(start, end - 1 - length) + np.arange(length)
        pad = len(flat) - 1
        # The answer is a target only: past it, inputs and targets are both <pad>.
        inside = index < end - 1
        return {
            "inputs": flat[np.where(inside, index, pad)].astype(np.int32),
            "targets": flat[np.where(inside, index + 1, pad)].astype(np.int32),
            "weights": (index == end - 2).astype(np.float32),
        }


def _run(
    config: Counting.Config,
    pass_weight: float,
    lengths: np.ndarray,
    which: np.ndarray,
    where: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs n programs together. `lengths` `[n]` gives the number of operations of each program.

    `which` and `where` have uniform random numbers `[operations, n]`, which choose operations and
    variables.

    Returns the operations and their variables, each `[n, operations]`, and the final values
    `[n, variables]`.
    """
    n, rows = len(lengths), np.arange(len(lengths))
    values = np.full((n, config.num_variables), ABSENT)
    operations, targets = np.zeros((2, config.max_operations, n), int)
    for step in range(max(lengths, default=0)):
        is_set = values != ABSENT
        can_grow = is_set & (values < config.max_value)
        num_growing = can_grow.sum(1)
        # Sampling again until possible is the same as weighting increments by the chance that they
        # are possible.
        increment_weight = config.increment_weight * num_growing / np.maximum(is_set.sum(1), 1)
        u = which[step] * (config.set_weight + increment_weight + pass_weight)
        sets = u < config.set_weight
        increments = u < config.set_weight + increment_weight
        operation = np.where(sets, SET, np.where(increments, INCREMENT, PASS))
        any_variable = (where[step] * config.num_variables).astype(int)
        target = np.where(sets, any_variable, _nth_true(can_grow, where[step] * num_growing))
        changed = np.where(sets, 0, values[rows, target] + (operation == INCREMENT))
        values[rows, target] = np.where(step < lengths, changed, values[rows, target])
        operations[step], targets[step] = operation, target
    return operations.T, targets.T, values


def _nth_true(mask: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The index of True entry number floor(n) of each row, from 0; 0 if a row has too few."""
    return np.argmax(mask.cumsum(1) > n[:, None], axis=1)
