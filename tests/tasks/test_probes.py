import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 52697542  # of the data, see test_every_task.py


def solve(text):
    """Reads only the text of the question."""
    kind, body = text.split(":")
    if kind == "FO":
        digits, index = body.split("#")
        return digits[len(digits) - int(index)]
    if kind == "N":
        return "".join("1" if body.find(digit) < index else "0" for index, digit in enumerate(body))
    if kind == "I":
        after, answer = {}, ""
        for before, digit in zip(" " + body, body + " ", strict=True):
            after[before] = digit
            answer += after.get(digit, "0") if digit != before else digit if digit in after else "0"
        return answer[: len(body)]
    pairs, key = body.split("?")
    return dict(zip(pairs[::2], pairs[1::2], strict=True))[key]


@pytest.mark.parametrize("split", ["in_distribution", "longer", "longest"])
@pytest.mark.parametrize(
    "probe", ["fixed_offset", "assoc_recall", "dup_key_recall", "needle", "induction"]
)
def test_the_answer_follows_from_the_text(probe, split):
    task = tasks.create("probes", probe=probe, symbols=16)
    for question, answer in questions(task, split):
        assert "".join(answer) == solve("".join(question))


def test_published_examples():
    assert solve("FO:3141592#0003") == "5"
    assert solve("DK:a3b7a9c1?a") == "9"
    assert solve("AR:a3b7c1?b") == "7"
    assert solve("N:45790189")[1:] == "0000001"
    assert solve("I:55791289") == "05000001"


@pytest.mark.parametrize(("probe", "count"), [("assoc_recall", 1), ("dup_key_recall", 2)])
def test_how_often_the_queried_letter_comes(probe, count):
    for question, _ in questions(tasks.create("probes", probe=probe, symbols=40), "longest", 50):
        pairs, key = "".join(question[3:]).split("?")
        values = [
            value for letter, value in zip(pairs[::2], pairs[1::2], strict=True) if letter == key
        ]
        assert len(values) == len(set(values)) == count


@pytest.mark.parametrize(
    "split", ["in_distribution", "longer", pytest.param("longest", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("probe", ["fixed_offset", "needle", "induction"])
def test_chance_is_the_error_of_the_best_constant_answer(probe, split):
    task = tasks.create("probes", probe=probe, symbols=16)
    answers = "".join("".join(answer) for _, answer in questions(task, split, 3000))
    best = max(answers.count(symbol) for symbol in set(answers)) / len(answers)
    assert abs(task.chance_error(split) - (1 - best)) < 0.03
    reported = task.reported_metrics(split, {"token_error": 0.1})
    assert reported == {"token_error": 0.1, "normalised_error": 0.1 / task.chance_error(split)}


def test_sizes():
    task = tasks.create("probes", symbols=16)
    digits = lambda question: question.index("#") - 3  # noqa: E731
    assert sizes(task, "train", digits) == (2, 16)
    assert sizes(task, "longer", digits, 500) == (17, 32)
    assert sizes(task, "longest", digits, 1500) == (65, 128)
    assert task.length("longest") == 128 + 9


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="probe"):
        tasks.create("probes", probe="recall")
    with pytest.raises(ConfigError, match="below 1250"):
        tasks.create("probes", symbols=1250)
