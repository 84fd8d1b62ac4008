import zlib
from collections import Counter

import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import nearest_words
from cope_jax.evaluation.contextual.nearest_words import (
    Neighbour,
    OccurrenceIndex,
    choose_sentences,
    compare,
    table,
)
from tests.evaluation.results import printed

WORDS = "play Play a the it goes bank well".split()


class Drawn:
    """Random vectors for each word of each sentence, the same whenever it is asked."""

    name, layers = "drawn", ("low", "high")

    def __call__(self, sentences):
        return [
            np.random.default_rng(zlib.crc32(" ".join(s).encode()))
            .normal(size=(2, len(s), 6))
            .astype(np.float32)
            for s in sentences
        ]


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(1)
    return [tuple(map(str, rng.choice(WORDS, rng.integers(2, 9)))) for _ in range(60)]


@pytest.fixture(scope="module")
def index(corpus):
    return OccurrenceIndex(Drawn(), corpus)


def expected(corpus, sentence, index, layer, allowed=lambda word: True):
    """All occurrences but the word itself, by falling cosine, with explicit loops in float64."""

    def cosine(u, v):
        return sum(x * y for x, y in zip(u, v, strict=True)) / np.sqrt(
            sum(x * x for x in u) * sum(y * y for y in v)
        )

    query = Drawn()([sentence])[0][layer, index].astype(np.float64)
    others = []
    for other, vectors in zip(corpus, Drawn()(corpus), strict=True):
        for i, word in enumerate(other):
            if (other, i) != (sentence, index) and allowed(word):
                others.append((cosine(query, vectors[layer, i].astype(np.float64)), other, i))
    return sorted(others, key=lambda entry: -entry[0])


@pytest.mark.parametrize("words", ["any", "same", "other"])
def test_neighbours_by_explicit_loops(corpus, index, monkeypatch, words):
    monkeypatch.setattr(nearest_words, "BLOCK", 50)  # several blocks
    allowed = {
        "any": lambda w: True,
        "same": lambda w: w.lower() == "play",
        "other": lambda w: w.lower() != "play",
    }
    sentence = next(s for s in corpus if "play" in s)
    at = sentence.index("play")
    nearest = index.nearest(sentence, at, count=10, words=words)
    assert list(nearest) == ["low", "high"]
    for layer, name in enumerate(nearest):
        best = expected(corpus, sentence, at, layer, allowed[words])
        # half floats round cosines by up to 2**-11 each of 6 products: 1e-3
        np.testing.assert_allclose(
            [n.cosine for n in nearest[name]], [c for c, _, _ in best[:10]], atol=1e-3
        )
        cosines = {(s, i): c for c, s, i in best}
        for neighbour in nearest[name]:
            assert abs(cosines[neighbour.sentence, neighbour.place] - neighbour.cosine) < 1e-3


def test_a_word_is_not_its_own_neighbour_but_one_that_occurs_twice_is_the_others(corpus):
    index = OccurrenceIndex(Drawn(), [*corpus, ("play", "the", "play"), ("play", "the", "play")])
    nearest = index.nearest(("play", "the", "play"), 0, count=500)["low"]
    copies = [n for n in nearest if n.sentence == ("play", "the", "play")]
    assert [n.place for n in copies if n.word == "play"] == [2, 2]
    outside = index.nearest(("never", "seen"), 0, count=10_000)["high"]
    assert len(outside) == len(index)


def test_so_many_of_each_word(index, corpus):
    nearest = index.nearest(corpus[0], 0, count=100, per_word=2)["high"]
    counts = Counter(n.word.lower() for n in nearest)
    assert max(counts.values()) == 2 and set(counts) == {word.lower() for word in WORDS}
    assert [n.cosine for n in nearest] == sorted((n.cosine for n in nearest), reverse=True)
    free = index.nearest(corpus[0], 0, count=1000)["high"]
    assert nearest[0] == free[0]


def test_memory_is_bounded(corpus):
    index = OccurrenceIndex(Drawn(), corpus, max_words=50)
    assert len(index) <= 50 < len(index) + 8 and index._units_JND.dtype == np.float16
    assert (
        len(index) == sum(map(len, index.sentences))
        and index.sentences == corpus[: len(index.sentences)]
    )
    with pytest.raises(ConfigError, match=r"max_words must be at least 1"):
        OccurrenceIndex(Drawn(), corpus, max_words=0)


def test_comparison_shows_static_neighbours_and_each_sentence(index, corpus):
    vectors = {
        "play": np.array([1.0, 0.0]),
        "game": np.array([1.0, 0.1]),
        "tree": np.array([0.0, 1.0]),
    }
    queries = [
        (s, [w.lower() for w in s].index("play"))
        for s in corpus
        if "play" in [w.lower() for w in s]
    ][:2]
    comparison = compare(index, vectors, queries, count=3)
    assert [word for word, _ in comparison.static] == ["game", "tree"]
    assert [list(layers) for layers in comparison.contextual] == [["low", "high"]] * 2
    assert comparison.contextual[0] == index.nearest(*queries[0], count=3, per_word=1)
    shown = table(comparison)
    for text in (printed(shown), shown.markdown()):
        assert "game 1.00" in text or "game 0.99" in text
        for layers in comparison.contextual:
            for near in layers.values():
                for neighbour in near:
                    assert neighbour.context().replace("|", "\\|") in text.replace("\n", " ")
    assert len(shown.markdown().splitlines()) == 4 + 1 + 4


def test_sentences_with_the_word_come_first():
    text = [(f"w{n}", "Play" if n % 10 == 0 else "x") for n in range(100)]
    chosen = choose_sentences(text, "play", 8)
    assert len(set(chosen)) == 8 and sum("Play" in sentence for sentence in chosen) == 4
    assert sorted(choose_sentences(text, "play", 1000)) == sorted(text)
    assert chosen == choose_sentences(text, "play", 8)
    with pytest.raises(ConfigError, match="the corpus has no word 'pla'"):
        choose_sentences(text, "pla", 8)


def test_context_is_cut_and_marked():
    neighbour = Neighbour(tuple("abcdefg"), 3, 1.0)
    assert neighbour.context(2) == "… b c *d* e f …" and neighbour.context(9) == "a b c *d* e f g"


def test_wrong_input_is_named(index, corpus):
    with pytest.raises(ConfigError, match="for one word, got bank, play"):
        compare(index, {}, [(("play",), 0), (("bank",), 0)])
    with pytest.raises(ConfigError, match="must be 'any', 'same' or 'other', got 'some'"):
        index.nearest(corpus[0], 0, words="some")
    with pytest.raises(ConfigError, match="no sentence"):
        OccurrenceIndex(Drawn(), [])
    with pytest.raises(
        ConfigError, match="refers to word number 9, but its sentence has only 1 words"
    ):
        index.nearest(("play",), 9)
