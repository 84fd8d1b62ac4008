import numpy as np
import pytest

from cope_jax.corpora.baselines import FEATURES, BagOfWords, bags
from cope_jax.errors import ConfigError

VOCAB, SPECIAL = 60, (0, 1, 2)


def examples(count, seed, topics=6, shared=True):
    """Each side has pieces of a topic, and others; B has A's topic where it follows A."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((count, 16), np.int32) for name in ("inputs", "segments", "mask")}
    following = rng.integers(0, 2, count).astype(np.int32)
    for row in range(count):
        topic = rng.integers(topics)
        other = (topic + rng.integers(1, topics)) % topics if following[row] and shared else topic
        sides = [
            rng.integers(10 + 8 * t, 14 + 8 * t, 3).tolist() + rng.integers(3, 10, 3).tolist()
            for t in (topic, other)
        ]
        ids = [0, *sides[0], 1, *sides[1], 1]
        batch["inputs"][row, : len(ids)] = ids
        batch["segments"][row, : len(ids)] = [0] * 8 + [1] * 7
        batch["mask"][row, : len(ids)] = 1
    return {**batch, "next": following}


def test_a_shared_topic_is_found_and_no_topic_is_a_coin():
    classifier = BagOfWords(VOCAB, SPECIAL).fit(examples(400, 0))
    assert classifier.accuracy(examples(200, 1)) > 0.9
    assert (
        abs(
            BagOfWords(VOCAB, SPECIAL)
            .fit(examples(400, 0, shared=False))
            .accuracy(examples(400, 1, shared=False))
            - 0.5
        )
        < 0.1
    )


def test_features_are_those_of_their_definition():
    train, test = examples(50, 2), examples(7, 3)
    classifier = BagOfWords(VOCAB, SPECIAL).fit(train)
    having = np.zeros(VOCAB)
    for row in range(50):
        for side in (0, 1):
            counted = (train["segments"][row] == side) & (train["mask"][row] == 1)
            for piece in set(train["inputs"][row][counted]) - set(SPECIAL):
                having[piece] += 1
    idf = np.log(101 / (1 + having))
    np.testing.assert_allclose(classifier.idf_V, idf, rtol=1e-6)
    features = classifier.features(test)
    assert features.shape == (7, len(FEATURES))
    for row in range(7):
        a, b = (
            [
                p
                for p, s in zip(test["inputs"][row][:15], test["segments"][row], strict=False)
                if s == side and p not in SPECIAL
            ]
            for side in (0, 1)
        )
        both = sum(idf[piece] for piece in set(a) & set(b))
        either = sum(idf[piece] for piece in set(a) | set(b))
        x, y = (
            np.array([side.count(piece) * idf[piece] for piece in range(VOCAB)]) for side in (a, b)
        )
        cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        lengths = np.log1p([len(a), len(b), len(a) + len(b)])
        np.testing.assert_allclose(
            features[row], [both, cosine, both / either, *lengths], rtol=1e-5, atol=1e-6
        )


def test_padding_and_special_pieces_do_not_count():
    batch = examples(5, 4)
    padded = {
        name: np.pad(field, [(0, 0), (0, 4)], constant_values=value)
        for name, field, value in (
            ("inputs", batch["inputs"], 30),
            ("segments", batch["segments"], 1),
            ("mask", batch["mask"], 0),
        )
    }
    for ours, theirs in zip(bags(padded, VOCAB, SPECIAL), bags(batch, VOCAB, SPECIAL), strict=True):
        ours, theirs = ours.toarray(), theirs.toarray()
        np.testing.assert_array_equal(ours, theirs)
        assert not theirs[:, list(SPECIAL)].any() and (theirs.sum(axis=1) == 6).all()


def test_a_side_without_pieces_shares_nothing():
    batch = examples(20, 5)
    classifier = BagOfWords(VOCAB, SPECIAL).fit(batch)
    batch["segments"][:] = 0
    features = classifier.features(batch)
    assert not features[:, :3].any() and np.isfinite(features).all()


def test_wrong_input_is_one_line():
    batch = examples(4, 6)
    with pytest.raises(ConfigError, match="call fit first"):
        BagOfWords(VOCAB, SPECIAL).accuracy(batch)
    with pytest.raises(ConfigError, match="examples of both kinds"):
        BagOfWords(VOCAB, SPECIAL).fit({**batch, "next": np.zeros(4, np.int32)})
