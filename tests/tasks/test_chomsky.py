import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.tasks.chomsky_problems import PROBLEMS
from tests.tasks.reading import questions

CHECKSUM = 2278242302  # of the data, see test_every_task.py


def number(bits):
    return int("".join(reversed(bits)), 2)


def little(value):
    return f"{value:b}"[::-1] + "2"


def stack(text):
    symbols = [symbol for symbol in text if symbol in "01"]
    for symbol in text[len(symbols) :]:
        if symbol != "2":
            symbols.append({"3": "0", "4": "1"}[symbol])
        elif symbols:
            del symbols[-1]
    return "".join(symbols[::-1]) + "2"


def hidden(text):
    text = text.rstrip("3")
    index = text.index("2")
    return text[(index + len(text) // 2) % len(text)]


def binary(operation):
    def solve(text):
        a, b = (number(operand) for operand in text.split("2"))
        assert a > 0
        assert b > 0
        return little(operation(a, b))

    return solve


def root(text):
    value = int(text, 2)
    return f"{max(n for n in range(2 ** ((len(text) + 1) // 2)) if n * n <= value):0{(len(text) + 1) // 2}b}"


SOLVERS = {
    "even_pairs": lambda text: str(int(text[0] != text[-1])),
    "parity_check": lambda text: str(sum(map(int, text)) % 2),
    "cycle_navigation": lambda text: str((text.count("2") - text.count("0")) % 5),
    "modular_arithmetic": lambda text: str(eval(text) % 5),
    "modular_arithmetic_brackets": lambda text: str(eval(text) % 5),
    "solve_equation": lambda text: [
        str(x)
        for x in range(5)
        if eval(text.split(":")[0].replace("x", str(x))) % 5 == int(text.split(":")[1])
    ],
    "stack_manipulation": stack,
    "reverse_string": lambda text: "".join(reversed(text)),
    "duplicate_string": lambda text: text * 2,
    "missing_duplicate_string": hidden,
    "odds_first": lambda text: "".join(
        text[n] for parity in (0, 1) for n in range(parity, len(text), 2)
    ),
    "binary_addition": binary(lambda a, b: a + b),
    "binary_multiplication": binary(lambda a, b: a * b),
    "compute_sqrt": root,
    "bucket_sort": lambda text: "".join(symbol * text.count(symbol) for symbol in "01234"),
}


def test_all_fifteen():
    assert SOLVERS.keys() == PROBLEMS.keys()
    assert len(SOLVERS) == 15


@pytest.mark.parametrize("problem", SOLVERS)
def test_the_answer_follows_from_the_text(problem):
    task = tasks.create("chomsky", problem=problem, length=8)
    for split in ("in_distribution", "longer"):
        largest = 0
        for question, answer in questions(task, split, 100):
            text, answer = "".join(question), "".join(answer)
            solved = SOLVERS[problem](text)
            assert answer == solved or solved == [answer]
            largest = max(largest, len(text) + (problem == "modular_arithmetic" and len(text) % 2))
            assert len(text) <= task.level(split)
        assert largest >= task.level(split) - 1


def test_a_stack_that_is_empty_stays_empty():
    assert stack("1222") == "2"
    assert stack("10234") == "1012"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problem": "parity"}, "did you mean 'parity_check'"),
        ({"problem": "solve_equation", "length": 2}, "at least 3"),
        ({"problem": "modular_arithmetic", "length": 39}, "must be even"),
    ],
)
def test_mistakes_are_loud(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("chomsky", **options)
