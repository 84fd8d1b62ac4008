import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError

CHECKSUM = 1799020815  # of the data, see test_every_task.py


def rows(positions, split, n=64, **options):
    """For each sequence its words, the positions of these words, and the weighted targets."""
    task = tasks.create("addition", digits=4, positions=positions, **options)
    batch = task.sample(np.random.default_rng(0), n, split)
    places = batch.get("positions", np.tile(np.arange(task.length(split)), (n, 1)))
    for inputs, targets, weights, row_places in zip(
        batch["inputs"], batch["targets"], batch["weights"], places, strict=True
    ):
        words = task.decode(inputs).split()
        yield words, row_places.tolist(), task.decode(targets[weights == 1]).split()


def numbers(words, positions):
    """The two operands and their sum as text, the most significant digit first."""
    text = " ".join(word for word in words if word != "<pad>")
    operands, _, total = text.removesuffix(" $").partition(" = ")
    parts = [digits.split() for digits in (*operands.split(" + "), total)]
    backward = [positions != "coupled", positions != "coupled", True]
    return [
        "".join(digits[::-1] if turned else digits)
        for digits, turned in zip(parts, backward, strict=True)
    ]


@pytest.mark.parametrize("positions", ["consecutive", "abacus", "coupled"])
@pytest.mark.parametrize(
    ("split", "most"), [("train", 4), ("in_distribution", 4), ("longer", 8), ("digits=5", 5)]
)
def test_the_target_is_the_sum(positions, split, most):
    sizes = set()
    for words, _, targets in rows(positions, split):
        first, second, total = numbers([*words[: words.index("=") + 1], *targets[:-1]], positions)
        assert int(first) + int(second) == int(total)
        assert targets[-1] == "$"
        sizes |= {len(first), len(second)}
        if positions == "coupled":
            assert len(first) == len(second) == len(total) - 1
        else:
            assert all(number == str(int(number)) for number in (first, second, total))
    assert sizes == set(range(most // 2 + 1, most + 1))


def test_a_place_of_an_abacus_is_the_place_in_the_run_of_digits():
    for words, positions, _ in rows("abacus", "longer"):
        expected = 0
        for word, position in zip(words, positions, strict=True):
            expected = expected + 1 if word.isdigit() else 0
            assert position == expected


def test_coupled_digits_are_those_that_are_added():
    for words, positions, _ in rows("coupled", "longer"):
        size = words.index("+")
        falling = list(range(size, 0, -1))
        text = [*falling, 0, *falling, 0, *range(1, size + 2)]
        assert positions[: len(text)] == text
        assert not any(positions[len(text) :])


@pytest.mark.parametrize(
    ("positions", "moved"), [("abacus", str.isdigit), ("coupled", lambda word: word != "<pad>")]
)
def test_training_moves_positions_by_one_number_for_each_sequence(positions, moved):
    seen = set()
    for (words, trained, _), (_, plain, _) in zip(
        rows(positions, "train", 500, offsets=7),
        rows(positions, "in_distribution", 500),
        strict=True,
    ):
        difference = {
            now - before
            for word, now, before in zip(words, trained, plain, strict=True)
            if moved(word)
        }
        assert len(difference) == 1
        seen |= difference
        assert all(now == 0 for word, now in zip(words, trained, strict=True) if not moved(word))
    assert seen == set(range(7))
    assert [positions_of_row for _, positions_of_row, _ in rows(positions, "train", offsets=1)] == [
        positions_of_row for _, positions_of_row, _ in rows(positions, "in_distribution")
    ]


def test_offsets_move_no_consecutive_positions():
    seven, none = (rows("consecutive", "train", offsets=offsets) for offsets in (7, 1))
    assert list(seven) == list(none)
    task = tasks.create("addition", offsets=7)
    assert "positions" not in task.sample(np.random.default_rng(0), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"digits": 0}, "digits"), ({"offsets": 0}, "offsets"), ({"positions": "abacuss"}, "abacus")],
)
def test_mistakes_are_loud(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("addition", **options)
