import collections
import itertools

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 738681917  # of the data, see test_every_task.py


def texts(task, split, n=200):
    """The sequences of a split as text, and the valid tokens after each of its beginnings."""
    batch = task.sample(np.random.default_rng(0), n, split)
    assert batch["weights"].all()
    for inputs, targets, valid_LV in zip(
        batch["inputs"], batch["targets"], batch["valid"], strict=True
    ):
        yield (
            task.decode([inputs[0], *targets]).replace(" ", ""),
            ["".join(task.vocabulary[token] for token in np.flatnonzero(row)) for row in valid_LV],
        )


@pytest.mark.parametrize(
    ("split", "length", "depth"), [("train", 32, 4), ("longer", 64, 8), ("longest", 128, 16)]
)
def test_all_brackets_are_closed_and_the_depth_is_reached(split, length, depth):
    for text, _ in texts(tasks.create("dyck"), split):
        assert len(text) == length
        assert max(itertools.accumulate(1 if bracket in "([" else -1 for bracket in text)) == depth
        while "()" in text or "[]" in text:
            text = text.replace("()", "").replace("[]", "")
        assert text == ""


def test_long_sequences_are_well_formed():
    """The number of paths of 4,000 brackets is beyond float64."""
    inputs = tasks.create("dyck", length=4000, depth=40).sample(np.random.default_rng(0), 2)[
        "inputs"
    ]
    depths = np.cumsum(np.where(inputs < 2, 1, -1), axis=1)
    assert (depths.min(), depths.max(1).tolist(), depths[:, -1].tolist()) == (0, [40, 40], [1, 1])


def test_valid_brackets_are_those_that_open_and_the_one_that_closes_the_last():
    for text, valid in texts(tasks.create("dyck"), "longer"):
        for end, brackets in enumerate(valid, start=1):
            rest = text[:end]
            while "()" in rest or "[]" in rest:
                rest = rest.replace("()", "").replace("[]", "")
            assert brackets == "([" + {"(": ")", "[": "]", "": ""}[rest[-1:]]


def test_shapes_and_kinds_are_uniform():
    """All paths of eight brackets that reach depth 3 are as frequent, and so are both kinds."""
    task, n = tasks.create("dyck", length=8, depth=3), 8000
    sequences = [text for text, _ in texts(task, "train", n)]
    shapes = collections.Counter(text.replace("[", "(").replace("]", ")") for text in sequences)
    possible = [
        "".join(path)
        for path in itertools.product("()", repeat=8)
        if (heights := list(itertools.accumulate(1 if bracket == "(" else -1 for bracket in path)))[
            -1
        ]
        == 0
        and min(heights) == 0
        and max(heights) == 3
    ]
    assert sorted(shapes) == sorted(possible)
    expected = n / len(possible)
    assert max(abs(count - expected) for count in shapes.values()) < 4 * expected**0.5
    assert abs("".join(sequences).count("[") / (4 * n) - 0.5) < 0.02


def test_f1():
    """0.8 of the probability is valid, half of the valid brackets are likely: 2·0.8·0.5/1.3."""
    reported = tasks.create("dyck").reported_metrics(
        "longer", {"invalid_error": 0.2, "valid_error": 0.5, "loss": 1.0}
    )
    assert reported == {
        "invalid_error": 0.2,
        "valid_error": 0.5,
        "loss": 1.0,
        "f1_error": pytest.approx(1 - 0.8 / 1.3),
    }
    nothing = tasks.create("dyck").reported_metrics(
        "longer", {"invalid_error": 1.0, "valid_error": 1.0}
    )
    assert nothing["f1_error"] == 1.0


@pytest.mark.parametrize("options", [{"length": 6}, {"length": 33}])
def test_mistakes_are_loud(options):
    with pytest.raises(
        ConfigError, match=f"even and at least 8, twice the depth, got {options['length']}"
    ):
        tasks.create("dyck", **options)
