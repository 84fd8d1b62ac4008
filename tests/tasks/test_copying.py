import pytest

from cope_jax import tasks
from cope_jax.errors import ConfigError
from tests.tasks.reading import questions, sizes

CHECKSUM = 2557391419  # of the data, see test_every_task.py


@pytest.mark.parametrize("split", ["in_distribution", "longer"])
@pytest.mark.parametrize("form", ["copy", "repeated_ngrams", "prefix_ngram", "suffix_ngram"])
def test_the_answer_follows_from_the_text(form, split):
    for question, answer in questions(tasks.create("copying", form=form, letters=20), split):
        text, answer = "".join(question), "".join(answer)
        if "|" not in text:
            assert answer == text
            continue
        word, query = sorted(text.split("|"), key=len, reverse=True)
        assert text.index("|") == (len(query) if form == "prefix_ngram" else len(word))
        assert word.count(query) == 1
        assert answer == word[word.index(query) + 3 :][:3]
        assert len(answer) == 3


@pytest.mark.parametrize("form", ["prefix_ngram", "suffix_ngram"])
def test_the_queried_letters_come_once(form):
    for question, answer in questions(
        tasks.create("copying", form=form, letters=12, ngram=1), "train"
    ):
        word, query = sorted("".join(question).split("|"), key=len, reverse=True)
        assert word.count(query) == 1
        assert word[word.index(query) + 1] == answer[0]


def test_repeated_ngrams_repeat():
    more_than_one = False
    for question, _ in questions(
        tasks.create("copying", form="repeated_ngrams", letters=60), "train"
    ):
        ngrams = ["".join(question[n : n + 3]) for n in range(0, len(question) - 2, 3)]
        assert len(set(ngrams)) <= max(2, len(question) // 12)
        more_than_one |= len(question) < 24 and len(set(ngrams)) == 2
    assert more_than_one


def test_sizes_and_letters():
    task = tasks.create("copying")
    assert sizes(task, "train", len, 2000) == (2, 64)
    assert sizes(tasks.create("copying", form="repeated_ngrams"), "train", len, 2000) == (6, 64)
    assert sizes(task, "longer", len, 2000) == (65, 128)
    letters = "".join("".join(question) for question, _ in questions(task, "longer"))
    assert abs(letters.count("q") / len(letters) - 1 / 26) < 0.01


def test_mistakes_are_loud():
    with pytest.raises(ConfigError, match="at least 6 with prefix_ngram and ngram=3, got 5"):
        tasks.create("copying", form="prefix_ngram", letters=5)
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("copying", form="prefix_ngram").level("letters=5")
    with pytest.raises(ConfigError, match="at most 39 with ngram=1, because a query comes once"):
        tasks.create("copying", form="suffix_ngram", ngram=1)
    with pytest.raises(ConfigError, match="no valid level"):
        tasks.create("copying", form="suffix_ngram", ngram=1, letters=39).level("letters=79")
