import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.word2vec import (
    Word2VecConfig,
    most_similar,
    normalise,
    train_word2vec,
)

CONFIG = Word2VecConfig(width=8, min_count=2, epochs=20, sample=0.0)
SCRIPT = """
import hashlib, numpy as np
from tests.evaluation.contextual.test_word2vec import CONFIG, sentences
from cope_jax.evaluation.contextual.word2vec import train_word2vec
vectors = train_word2vec(sentences(), CONFIG)
print(*vectors, hashlib.sha256(np.stack(list(vectors.values())).tobytes()).hexdigest())
"""


def sentences():
    """Two topics, whose words never meet."""
    rng = np.random.default_rng(0)
    topics = ["Cat dog mouse pet fur".split(), "stock bond price trade Bank".split()]
    return [[str(word) for word in rng.choice(topics[number % 2], 6)] for number in range(200)] + [
        ["rare"]
    ]


@pytest.fixture(scope="module")
def vectors():
    return train_word2vec(sentences(), CONFIG)


def test_words_of_one_topic_are_near(vectors):
    # No "rare".
    assert set(vectors) == set("cat dog mouse pet fur stock bond price trade bank".split())
    assert {v.shape for v in vectors.values()} == {(8,)} and {
        v.dtype for v in vectors.values()
    } == {np.dtype("f4")}
    assert {word for word, _ in most_similar(vectors, "Cat", 4)} == set("dog mouse pet fur".split())


@pytest.mark.slow
def test_another_process_with_another_hash_gives_the_same_vectors(vectors):
    import hashlib

    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True
    ).stdout.split()
    assert output[:-1] == list(vectors)
    assert output[-1] == hashlib.sha256(np.stack(list(vectors.values())).tobytes()).hexdigest()


def test_case_and_seed_are_options(vectors):
    cased = train_word2vec(
        sentences(), Word2VecConfig(width=8, min_count=2, epochs=1, lowercase=False)
    )
    assert {"Cat", "Bank"} < set(cased) and "cat" not in cased
    other = train_word2vec(
        sentences(), Word2VecConfig(width=8, min_count=2, epochs=20, sample=0.0, seed=1)
    )
    assert not np.allclose(other["cat"], vectors["cat"])


def test_most_similar_by_explicit_loops(rng):
    vectors = {word: rng.normal(size=5) for word in "abcdefgh"} | {"zero": np.zeros(5)}

    def cosine(u, v):
        length = sum(x * x for x in u) ** 0.5 * sum(x * x for x in v) ** 0.5
        return sum(x * y for x, y in zip(u, v, strict=True)) / length if length else 0.0

    expected = sorted(
        ((w, cosine(vectors["a"], v)) for w, v in vectors.items() if w != "a"),
        key=lambda pair: -pair[1],
    )
    similar = most_similar(vectors, "a", 20)
    assert [word for word, _ in similar] == [word for word, _ in expected]
    np.testing.assert_allclose([c for _, c in similar], [c for _, c in expected], atol=1e-6)
    assert most_similar(vectors, "a", 3) == similar[:3]
    assert most_similar({"a": np.ones(2)}, "a") == []


def test_normalised_vectors_have_length_one_or_zero(rng):
    units = normalise(np.concatenate([rng.normal(size=(4, 3)) * 1e-3, np.zeros((1, 3))]))
    np.testing.assert_allclose(np.linalg.norm(units, axis=1), [1, 1, 1, 1, 0], atol=1e-6)


def test_wrong_input_is_named():
    with pytest.raises(ConfigError, match="no word occurs 50 times: give more text"):
        train_word2vec([["a", "b"]], Word2VecConfig(min_count=50))
    with pytest.raises(ConfigError, match="unknown word 'plai': did you mean 'play'"):
        most_similar({"play": np.ones(2)}, "plai")
    with pytest.raises(ConfigError, match=r"word2vec.width must be at least 1, got 0"):
        Word2VecConfig(width=0)
    with pytest.raises(ConfigError, match=r"word2vec.sample must be at least 0, got -0.5"):
        Word2VecConfig(sample=-0.5)
    with pytest.raises(ConfigError, match=r"most_similar.count must be at least 1"):
        most_similar({"a": np.ones(2)}, "a", 0)
