import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 619092317  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer", "letters=30"])
def test_the_answer_is_the_letter_at_that_distance(split):
    task = tasks.create("indirect_indexing")
    for question, answer in questions(task, split):
        text, letter, shift = "".join(question).split(",")
        assert len(set(text)) == len(text) <= task.level(split)
        assert abs(int(shift)) <= 15
        index = text.index(letter) + int(shift)
        assert 0 <= index < len(text)
        assert answer == [text[index]]


def test_shifts_are_uniform_among_those_that_stay_inside():
    task = tasks.create("indirect_indexing", longest=4, shortest=4, shift=1)
    shifts = ["".join(question).split(",")[2] for question, _ in questions(task, "train", 4000)]
    # Each end has two of the three shifts: (1/2 + 1/3 + 1/3)/4 for +1, and as much for -1.
    expected = {"+1": 7 / 24, "-1": 7 / 24, "+0": 10 / 24}
    assert {shift: shifts.count(shift) / 4000 for shift in expected} == pytest.approx(
        expected, abs=0.03
    )


def test_sizes():
    task = tasks.create("indirect_indexing")
    assert sizes(task, "train", lambda question: question.index(","), 1000) == (20, 40)
    assert sizes(task, "longer", lambda question: question.index(","), 1000) == (41, 52)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 52}, "between shortest and 51"),
        ({"shift": 0}, "at least 1"),
        ({"shortest": 50}, "got 40"),
    ],
)
def test_mistakes_are_loud(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("indirect_indexing", **options)
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("indirect_indexing").level("letters=53")
