"""With `held_out`, no test example is in training; without it, docs/tasks.md says how many are."""

import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.configs.abilities import SETTINGS, VERSION_2
from cope_jax.errors import ConfigError
from cope_jax.tasks import held_out
from cope_jax.tasks.synthetic import SyntheticTask

SYNTHETIC = [name for name in tasks.names() if issubclass(tasks.TASKS.get(name), SyntheticTask)]
TABLE = re.findall(
    r"^\| `(\w+)`(?:: `(\w+)`)? \| (.*) \|$",
    (Path(__file__).parents[2] / "docs" / "tasks.md").read_text().split("\n## ")[1],
    re.MULTILINE,
)
"""(setting or task, task of a setting, cells) of each row of the documented shares."""
CHEAP = {"index", "state"}


def questions(batch):
    """The inputs of each row up to the last target that counts, read one by one."""
    for inputs, weights in zip(batch["inputs"].tolist(), batch["weights"].tolist(), strict=True):
        counted = [index for index, weight in enumerate(weights) if weight]
        yield tuple(inputs[: counted[-1] + 1] if counted else inputs)


@pytest.mark.parametrize("name", [*SYNTHETIC, *VERSION_2])
def test_training_and_every_other_split_are_on_different_sides(name):
    name, options = VERSION_2.get(name, (name, {"held_out": 0.25}))
    task = tasks.create(name, **options)
    for split in (*task.splits, *(split for _, split in task.sweep)):
        # What training counts is not always what evaluation counts; the same targets decide in
        # both.
        batch = SyntheticTask.sample(task, np.random.default_rng(0), 4, split)
        assert len(batch["inputs"]) == 4 and task.length(split) == batch["inputs"].shape[1]
        sides = held_out.is_held_out(batch, options["held_out"])
        assert sides.all() if split != "train" else not sides.any(), split


@pytest.mark.parametrize(
    ("name", "options", "splits"),
    [
        ("addition", {"digits": 1}, ["in_distribution", "digits=1"]),
        ("addition", {"digits": 2, "positions": "abacus"}, ["in_distribution", "digits=1"]),
        ("chomsky", {"length": 8}, ["in_distribution", "length=7", "longer"]),
        (
            "counting",
            {"max_operations": 12, "block_length": 14},
            ["in_distribution", "pass_100", "pass_10"],
        ),
        ("copying", {"letters": 2}, ["in_distribution"]),
        ("dyck", {"length": 8, "depth": 2}, ["in_distribution"]),
        ("flip_flop", {"length": 16}, ["in_distribution", "dense", "sparse"]),
        ("group_words", {"group": "S2", "length": 6}, ["in_distribution"]),
        ("scan", {}, ["in_distribution", "longer"]),
        (
            "selective_copy",
            {"num_symbols": 2, "num_tokens": 3, "num_blanks": 4},
            ["in_distribution", "dense"],
        ),
    ],
)
def test_no_question_of_a_test_is_one_of_training(name, options, splits):
    """With so few sequences training has nearly all that it may have, whatever the seeds."""
    apart, mixed = (tasks.create(name, **options, held_out=share) for share in (0.2, 0.0))
    trained = {q for seed in (0, 1) for q in questions(apart.dataset("train", 3000, seed))}
    for split in splits:
        tested = list(questions(apart.dataset(split, 200, seed=5)))
        assert len(tested) == 200 and not trained & set(tested), split
    assert trained & set(questions(mixed.dataset("in_distribution", 200, seed=5)))


def test_the_share_is_that_of_all_sequences_and_more_hold_out_more():
    inputs = np.array(list(itertools.product(range(2), repeat=14)), np.int32)
    batch = {"inputs": inputs, "weights": np.ones(inputs.shape, np.float32)}
    sides = {share: held_out.is_held_out(batch, share) for share in (0.05, 0.1, 0.5, 0.9)}
    for share, side in sides.items():
        assert abs(side.mean() - share) < 4 * np.sqrt(share * (1 - share) / len(inputs))
        halves = [side[inputs[:, column] == 1].mean() for column in range(14)]
        assert np.abs(np.array(halves) - share).max() < 5 * np.sqrt(
            share * (1 - share) / len(inputs) * 2
        )
    assert not (sides[0.1] & ~sides[0.5]).any()


def test_held_out_examples_are_the_same_everywhere_and_for_ever():
    """A change lets new runs train on what runs of earlier versions were tested on."""
    task = tasks.create("chomsky", length=8, held_out=0.1)
    shown = [
        "".join(task.decode(row).split(" =")[0].split())
        for row in task.dataset("in_distribution", 5)["inputs"]
    ]
    assert shown == ["1001", "01101111", "1001", "11100", "00000110"]


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_is_a_share(share):
    with pytest.raises(
        ConfigError, match=rf"flip_flop.held_out must be at least 0 and below 1, got {share}"
    ):
        tasks.create("flip_flop", held_out=share)


def test_a_space_without_held_out_sequences_is_refused():
    task = tasks.create("addition", digits=1, held_out=1e-9)
    with pytest.raises(
        ConfigError, match=r"^none of 2\d,\d{3} sequences can be held out: change held_out"
    ):
        task.dataset("in_distribution", 5000)
    assert len(task.dataset("in_distribution", 0)["inputs"]) == 0


def test_a_space_with_few_held_out_sequences_is_refused(monkeypatch):
    """The first sequence alone is held out."""
    drawn = []

    def generate(rows):
        assert sum(drawn) < 100_000, "draws on"
        drawn.append(rows)
        return {"inputs": np.arange(rows) + sum(drawn[:-1])}

    monkeypatch.setattr(held_out, "is_held_out", lambda batch, share: batch["inputs"] == 0)
    with pytest.raises(
        ConfigError, match=r"^1 of 4\d,\d{3} sequences can be held out: change held_out=0\.001"
    ):
        held_out.draw(generate, 1000, 0.001, held_out=True)


def test_a_test_of_few_questions_is_refused():
    few, enough = (tasks.create("addition", digits=1, held_out=share) for share in (0.05, 0.3))
    count = len(set(questions(few.dataset("in_distribution", 99))))
    message = rf"^only {count} of 100 test questions differ: raise held_out=0\.05 or the size$"
    with pytest.raises(ConfigError, match=message):
        few.dataset("in_distribution", 100)
    assert len(set(questions(enough.dataset("in_distribution", 100)))) >= 10


@pytest.mark.parametrize("name", VERSION_2)
def test_documented_questions_are_those_of_the_data(name):
    task = tasks.create(VERSION_2[name][0], **VERSION_2[name][1])
    number = len(set(questions(task.dataset("in_distribution", 500))))
    page = " ".join((Path(__file__).parents[2] / "docs" / "tasks.md").read_text().split())
    assert number >= 498 or f"{number} in `{name}`" in page


def test_every_question_of_version_2_can_be_answered():
    """In version 1, programs may lose their `set`, and tori have other sizes than in training."""
    task, walk = (
        tasks.create(VERSION_2[name][0], **VERSION_2[name][1]) for name in ("count_v2", "steps_v2")
    )
    for split in task.evaluation_splits:
        for row in task.dataset(split, 200)["inputs"]:
            words = task.decode(row).split()
            assert words[: words.index("print") + 2].count("=") >= 1, split
    for split in walk.evaluation_splits:
        batch = walk.dataset(split, 50)
        for inputs, weights in zip(batch["inputs"], batch["weights"], strict=True):
            places = np.cumsum(
                [{"+": 1, "-": -1}[word[0]] for word in walk.decode(inputs[::2]).split()]
            ).tolist()
            for step in np.flatnonzero(weights[::2]):
                assert places[step] in places[:step], split


def test_every_task_and_setting_has_documented_shares():
    names = [*SETTINGS, *SYNTHETIC]
    missing = [name for name in names if name not in {row[0] for row in TABLE}]
    assert [name for name, _, _ in TABLE] == names, (
        "docs/tasks.md must have these rows in this order; "
        f"python -m tests.tasks.test_held_out {' '.join(missing)} prints those that are missing"
    )
    assert all(task == SETTINGS[name][0] for name, task, _ in TABLE[: len(SETTINGS)])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row[0] in CHEAP else pytest.mark.slow, id=row[0])
        for row in TABLE
    ],
)
def test_documented_shares_are_those_of_the_data(row):
    name, _, cells = row
    task, options = SETTINGS.get(name, (name, {}))
    assert cells == described(held_out.seen(tasks.create(task, **options)))


def described(shares):
    """The cells of a row: the shares of examples, then those of predictions, in per cent."""
    examples, predictions = (
        ", ".join(
            f"{split} {100 * seen[i]:.1f}".replace(" 0.0", " 0") for split, seen in shares.items()
        )
        for i in (0, 1)
    )
    return f"{examples} | {'the same' if predictions == examples else predictions}"


def rows(names):
    """The rows of the documented table, computed again."""
    for name in names:
        task, options = SETTINGS.get(name, (name, {}))
        label = f"`{name}`: `{task}`" if name in SETTINGS else f"`{name}`"
        yield f"| {label} | {described(held_out.seen(tasks.create(task, **options)))} |"


if __name__ == "__main__":
    for line in rows(sys.argv[1:] or (*SETTINGS, *SYNTHETIC)):
        print(line, flush=True)
