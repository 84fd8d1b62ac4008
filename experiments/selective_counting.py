"""Selective counting as the repository CoPE-vs-RoPE of JiaVMode has it, and with its answer hidden.

    cope-jax train --config=experiments/selective_counting.py:given --config.encoding=cope --workdir=runs/given
    python -m experiments.selective_counting

The inputs of the repository end with the answer, and the loss is that of predicting this last input
itself, as in `given`. In `asked` they end with the question. The second command prints how many
answers a model can have seen, by the sizes of the repository. experiments/RESULTS.md has what follows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cope_jax.cli.run import run
from cope_jax.evaluation.report.table import Table
from cope_jax.registry import check_at_least
from cope_jax.tasks.synthetic import SyntheticConfig, SyntheticTask
from cope_jax.tasks.task import TASKS, Batch, batch_of
from cope_jax.training.config_files import ConfigDict, adamw, every, experiment

BEGIN, COUNT, AND, COLON, EQUALS, FIRST_KIND = range(6)
NOISES = 10
LONGEST_HEAD = 6  # such as "< count k6 and k4 :"


class SelectiveCounting(SyntheticTask):
    """Names one or two kinds, lists tokens, and asks how many of them are of these kinds.

    Half of the listed tokens are of a uniform kind, the others noise. The level is L, the number of
    inputs. Only the answer counts.

    >>> task = SelectiveCounting(SelectiveCounting.Config(length=14, given=True))
    >>> task.show(task.dataset("train", 1))
    '< count k6 and k4 : k4 k0 k3 n5 n3 k7 = 1→1'
    """

    @dataclasses.dataclass(frozen=True)
    class Config(SyntheticConfig):
        """Options of selective counting.

        Attributes:
          length: L in "train" and "in_distribution"; it is twice as large in "longer".
          given: whether the last input is the answer itself; if not, it is the question.
          kinds: the number of kinds.
        """

        length: int = 64
        given: bool = False
        kinds: int = 10

        def __post_init__(self):
            least = LONGEST_HEAD + (3 if self.given else 2)  # one listed token, "=", the answer
            check_at_least(least, "selective_counting", length=self.length)
            check_at_least(2, "selective_counting", kinds=self.kinds)

    abilities = ("count",)
    axis = "length"
    sweep_label = "tokens"
    continues = False

    def __init__(self, config: Config):
        n = config.length
        names = ["<", "count", "and", ":", "=", *(f"k{kind}" for kind in range(config.kinds))]
        names += [*(f"n{noise}" for noise in range(NOISES)), *map(str, range(2 * n))]
        super().__init__(
            config,
            vocabulary=names,
            levels={"train": n, "in_distribution": n, "longer": 2 * n},
            sweep=[],
        )

    def _length(self, level: float) -> int:
        return int(level)

    def _generate(self, rng: np.random.Generator, n: int, level: float) -> Batch:
        length, kinds = int(level), self.config.kinds
        first_noise = FIRST_KIND + kinds
        first_number = first_noise + NOISES
        inputs = np.zeros((n, length), np.int32)
        targets = np.zeros((n, length), np.int32)
        for row in range(n):
            named = FIRST_KIND + rng.permutation(kinds)[: rng.integers(1, 3)]
            head = [BEGIN, COUNT, named[0], *([AND, named[1]] if len(named) > 1 else []), COLON]
            tail = 2 if self.config.given else 1
            size = length - len(head) - tail
            of_kinds = rng.integers(FIRST_KIND, first_noise, size=size)
            noises = rng.integers(first_noise, first_number, size=size)
            listed = np.where(rng.random(size) < 0.5, of_kinds, noises)
            answer = first_number + np.isin(listed, named).sum()
            inputs[row] = [*head, *listed, EQUALS, *([answer] if self.config.given else [])]
            targets[row, -1] = answer
        weights = np.broadcast_to(np.arange(length) == length - 1, inputs.shape)
        return batch_of(inputs, targets, weights)


SETTINGS = {
    # The repository trains on 3,200 sequences, 800 steps of 4, with 1,024 tokens and 12 layers.
    "given": ({"length": 256, "given": True}, adamw(3e-3, 50, weight_decay=0.01), 800, 4),
    "asked": ({"length": 32, "kinds": 4}, adamw(3e-3, 100, final_fraction=0.05), 2000, 32),
}
VARIANTS = tuple(SETTINGS)


def get_config(setting: str = "given") -> ConfigDict:
    """The config with the answer given, or asked; registers the task."""
    TASKS.register("selective_counting")(SelectiveCounting)
    options, optimizer, steps, batch_size = SETTINGS[setting]
    return experiment(
        "selective_counting",
        options,
        model={"num_layers": 2, "block": {"model_dim": 64, "num_heads": 4}},
        optimizer=optimizer,
        training={"steps": steps, "batch_size": batch_size, **every(steps // 2)},
        evaluation={"examples": 500, "curve_examples": 100, "sweep_examples": 0},
    )


def seen(length: int, trained: int, leasts: Sequence[int], draws: int = 20) -> np.ndarray:
    """Per cent of test answers that training sequences have too, by `leasts` and split.

    Row i is for answers of at least `leasts[i]` training sequences: means over `draws` sets of
    `trained` training sequences and 2,000 test sequences.
    """
    task = SelectiveCounting(SelectiveCounting.Config(length=length))
    shares = np.zeros((draws, len(leasts), len(task.evaluation_splits)))
    for draw in range(draws):
        answers = task.dataset("train", trained, draw)["targets"][:, -1]
        times = np.bincount(answers, minlength=task.vocab_size)
        for column, split in enumerate(task.evaluation_splits):
            tested = times[task.dataset(split, 2000, draw)["targets"][:, -1]]
            shares[draw, :, column] = [100 * np.mean(tested >= least) for least in leasts]
    return shares.mean(axis=0)


def main() -> None:
    """Prints how many answers training has, by the sizes of the repository."""
    leasts = (1, 5, 10, 15, 20)
    rows = [
        [str(least), *(f"{share:.1f}" for share in shares)]
        for least, shares in zip(leasts, seen(1024, 3204, leasts), strict=True)
    ]
    print(Table("seen", ["sequences at least", "1,024 tokens", "2,048 tokens"], rows).markdown())


if __name__ == "__main__":
    run(main)
