import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 2905757097  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
@pytest.mark.parametrize("permuted", [False, True])
def test_the_answer_follows_from_the_text(permuted, split):
    moved = 0
    for question, answer in questions(tasks.create("lego", permuted=permuted), split):
        *written, asked = "".join(question).split(";")
        parents = {line[0]: (line[2], line[3]) for line in written}
        assert len(parents) == len(written)
        sign, name, steps = 1, asked, 0
        while name != "1":
            mark, name = parents[name]
            sign, steps = sign * (1 if mark == "+" else -1), steps + 1
        assert answer == ["+" if sign > 0 else "-"]
        assert steps > len(written) // 2  # in the second half
        in_order = [line[3] for line in written] == ["1", *(line[0] for line in written[:-1])]
        assert in_order or permuted
        moved += not in_order
    assert (moved > 0) == permuted


def test_both_answers_are_as_frequent():
    answers = [answer[0] for _, answer in questions(tasks.create("lego"), "train", 2000)]
    assert abs(answers.count("+") / 2000 - 0.5) < 0.05


def test_sizes():
    task = tasks.create("lego")
    assert sizes(task, "train", lambda question: question.count(";")) == (2, 8)
    assert sizes(task, "longer", lambda question: question.count(";"), 500) == (9, 16)


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="below 26, got 26"):
        tasks.create("lego", variables=26)
