from collections import Counter

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from cope_jax.corpora.word_sense_corpora import Occurrence
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual.word2vec import ContextFree
from cope_jax.evaluation.contextual.word_senses import (
    SenseScore,
    cap,
    disambiguate,
    k_nearest,
    most_frequent,
    nearest_mean,
    score,
    senses_by_frequency,
)

LEMMAS = ("bank", "play", "rock")


def occurrences(count, seed, split="train"):
    """The sentence's first word shows the sense; senses are of unequal frequency."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        lemma, sense = str(rng.choice(LEMMAS)), int(rng.choice(3, p=[0.2, 0.5, 0.3]))
        result.append(
            Occurrence(
                (f"cue{sense}", f"x{rng.integers(99)}", lemma), 2, lemma, f"{lemma}_{sense}", split
            )
        )
    return result


TRAIN, TEST = occurrences(150, 0), occurrences(70, 1, "test")


class Cues:
    """Layer 0 is the word alone, layer 1 adds its sentence's cue and noise."""

    name, layers = "cues", ("words", "context")

    def __call__(self, sentences):
        arrays = []
        for sentence in sentences:
            rng = np.random.default_rng([ord(character) for character in "".join(sentence)])
            vector = np.concatenate(
                [np.ones(2), 1.2 * np.eye(3)[int(sentence[0][3:])] + rng.normal(size=3)]
            )
            arrays.append(
                np.broadcast_to(np.stack([np.ones(5), vector])[:, None], (2, len(sentence), 5))
            )
        return arrays


def vectors(occurrences):
    return np.concatenate([Cues()([o.words])[0][1, o.index][None] for o in occurrences]).astype(
        np.float32
    )


def test_the_floor_is_the_most_frequent_sense_of_each_lemma():
    counts = {lemma: Counter(o.sense for o in TRAIN if o.lemma == lemma) for lemma in LEMMAS}
    expected = [max(counts[o.lemma], key=counts[o.lemma].__getitem__) for o in TEST]
    assert most_frequent(TRAIN, TEST) == expected
    for lemma, senses in senses_by_frequency(TRAIN).items():
        assert [counts[lemma][sense] for sense in senses] == sorted(
            counts[lemma].values(), reverse=True
        )


def test_nearest_mean_by_explicit_loops():
    train, test = vectors(TRAIN), vectors(TEST)
    predicted = nearest_mean(TRAIN, train, TEST, test)
    for query, occurrence, sense in zip(test.astype(np.float64), TEST, predicted, strict=True):
        best, highest = None, -2.0
        for candidate in sorted({o.sense for o in TRAIN if o.lemma == occurrence.lemma}):
            rows = [
                row
                for row, o in zip(train.astype(np.float64), TRAIN, strict=True)
                if o.sense == candidate
            ]
            mean = sum(rows) / len(rows)
            cosine = query @ mean / (np.linalg.norm(query) * np.linalg.norm(mean))
            if cosine > highest:
                best, highest = candidate, cosine
        assert sense == best
    # More than the floor says.
    assert len(set(zip((o.lemma for o in TEST), predicted, strict=True))) > 6


@pytest.mark.parametrize("k", [1, 5, 9])
def test_k_nearest_by_scikit_learn(k):
    train, test = vectors(TRAIN), vectors(TEST)
    predicted = k_nearest(TRAIN, train, TEST, test, k)
    compared = 0
    for lemma in LEMMAS:
        known = [row for row, o in enumerate(TRAIN) if o.lemma == lemma]
        asked = [row for row, o in enumerate(TEST) if o.lemma == lemma]
        classifier = KNeighborsClassifier(k, metric="cosine", algorithm="brute")
        shares = classifier.fit(train[known], [TRAIN[row].sense for row in known]).predict_proba(
            test[asked]
        )
        for row, share in zip(asked, shares, strict=True):
            tops = classifier.classes_[share > share.max() - 1e-9]
            frequent = [sense for sense in senses_by_frequency(TRAIN)[lemma] if sense in tops]
            assert predicted[row] == frequent[0]
            compared += 1
    assert compared == len(TEST)


def test_context_free_vectors_are_the_floor_exactly():
    embedder = ContextFree(
        {lemma: np.random.default_rng(3).normal(size=50) for lemma in LEMMAS} | {"x1": np.ones(50)}
    )
    floor, mean, nearest = disambiguate(embedder, TRAIN, TEST)
    assert (mean.method, mean.layer, nearest.method) == ("nearest mean", "static", "k nearest")
    assert mean.right == floor.right and nearest.right == floor.right and floor.layer == ""


@pytest.mark.parametrize("method", [nearest_mean, k_nearest])
def test_of_senses_in_one_direction_the_more_frequent_is_taken(method, rng):
    """Cosines with multiples of a vector differ by rounding, which must not choose."""
    train, rows, test = [], [], []
    for number in range(60):
        vector = rng.normal(size=50)
        train += [
            Occurrence((), 0, str(number), sense, "train")
            for sense in ("rare", "frequent", "frequent")
        ]
        rows += [vector * scale for scale in rng.uniform(0.1, 10, 3)]
        test.append((Occurrence((), 0, str(number), "frequent", "test"), vector))
    queries = np.array([vector for _, vector in test], np.float32)
    predicted = method(
        train,
        np.array(rows, np.float32),
        [o for o, _ in test],
        queries,
        *([1] if method is k_nearest else []),
    )
    assert set(predicted) == {"frequent"}


def test_layers_are_measured_on_their_own():
    scores = {(s.method, s.layer): s for s in disambiguate(Cues(), TRAIN, TEST)}
    assert list(scores) == [("most frequent", "")] + [
        (method, layer)
        for layer in ("words", "context")
        for method in ("nearest mean", "k nearest")
    ]
    floor = scores["most frequent", ""].micro
    for method, number in (("nearest mean", nearest_mean), ("k nearest", k_nearest)):
        assert scores[method, "words"].micro == floor < scores[method, "context"].micro - 0.1
        direct = score("", "", TEST, number(TRAIN, vectors(TRAIN), TEST, vectors(TEST)))
        assert scores[method, "context"].right == direct.right


def test_an_unknown_lemma_and_an_unknown_sense_are_wrong():
    test = [
        Occurrence(("new",), 0, "new", "new_0", "test"),
        Occurrence(("bank",), 0, "bank", "bank_9", "test"),
    ]
    queries = np.ones((2, 5), np.float32)
    for predicted in (
        most_frequent(TRAIN, test),
        nearest_mean(TRAIN, vectors(TRAIN), test, queries),
        k_nearest(TRAIN, vectors(TRAIN), test, queries, 1000),
    ):
        assert predicted[0] is None and predicted[1].startswith("bank_")
        assert score("m", "l", test, predicted).right == {"bank": 0, "new": 0}


def test_micro_and_macro_averages():
    senses = SenseScore("m", "l", {"a": 9, "b": 1}, {"a": 10, "b": 2})
    assert senses.by_word == {"a": 0.9, "b": 0.5}
    assert senses.micro == pytest.approx(10 / 12) and senses.macro == pytest.approx(0.7)


@pytest.mark.parametrize("macro", [False, True])
def test_interval_is_that_of_an_explicit_bootstrap(macro):
    senses = SenseScore("m", "l", {"a": 30, "b": 8}, {"a": 40, "b": 20})
    rng = np.random.default_rng(5)
    right = [
        np.repeat([1.0, 0.0], [senses.right[w], senses.total[w] - senses.right[w]])
        for w in senses.total
    ]
    drawn = []
    for _ in range(4000):
        samples = [rng.choice(outcomes, len(outcomes)) for outcomes in right]
        drawn.append(
            np.mean([s.mean() for s in samples]) if macro else np.concatenate(samples).mean()
        )
    # quantiles of 4,000 draws of deviation 0.06 have a standard error of 0.0026
    np.testing.assert_allclose(
        senses.interval(macro=macro), np.quantile(drawn, [0.025, 0.975]), atol=0.012
    )
    narrow, wide = senses.interval(confidence=0.5), senses.interval(confidence=0.99)
    assert wide[0] < narrow[0] < senses.micro < narrow[1] < wide[1]
    assert senses.interval() == senses.interval()


def test_an_interval_has_a_width_where_all_predictions_are_right():
    low, high = SenseScore("m", "l", {"a": 8}, {"a": 8}).interval()
    assert high == 1 and low == pytest.approx(0.676, abs=0.02), "about Wilson's"
    many = {f"lemma {n}": 4 for n in range(40)}
    for macro in (False, True):
        low, high = SenseScore("m", "l", many, many).interval(macro=macro)
        assert 0.9 < low < 0.96 and high == 1


@pytest.mark.parametrize("macro", [False, True])
def test_an_interval_hardly_changes_with_one_prediction(macro):
    totals = {"a": 100, "b": 100}
    widths = [
        np.ptp(SenseScore("m", "l", {"a": right, "b": 0}, totals).interval(macro=macro))
        for right in (100, 99, 98)
    ]
    assert 0.01 < min(widths) and max(widths) < 0.05


def test_a_cap_keeps_order_and_counts():
    kept = cap(TRAIN, 12)
    assert Counter(o.lemma for o in kept) == dict.fromkeys(LEMMAS, 12)
    places = [next(i for i, o in enumerate(TRAIN) if o is chosen) for chosen in kept]
    assert places == sorted(places) and kept == cap(TRAIN, 12) != cap(TRAIN, 12, seed=1)
    assert cap(TRAIN, 1000) == TRAIN


def test_wrong_input_is_named():
    with pytest.raises(ConfigError, match="senses need occurrences"):
        disambiguate(Cues(), TRAIN, [])
    with pytest.raises(ConfigError, match=r"senses.k must be at least 1"):
        k_nearest(TRAIN, vectors(TRAIN), TEST, vectors(TEST), 0)
    with pytest.raises(ConfigError, match=r"senses.cap must be at least 1"):
        cap(TRAIN, 0)
