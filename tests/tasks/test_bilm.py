import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import sentences_by_corpus
from cope_jax.errors import ConfigError
from cope_jax.tokenizers.characters import characters, sentence_mark
from tests.corpora.data import write

LENGTH, CHARACTERS = 6, 12


@pytest.fixture(scope="module")
def task():
    return tasks.create("bilm", length=LENGTH, max_characters=CHARACTERS, corpus="both")


def joined(batches, field, weights="weights"):
    kept = np.concatenate([batch[weights] for batch in batches], axis=1) > 0
    return np.concatenate([batch[field] for batch in batches], axis=1)[kept]


def spelled(words):
    marks = {"<S>": 257, "</S>": 258}
    return np.stack(
        [
            sentence_mark(marks[word], CHARACTERS)
            if word in marks
            else characters([word], CHARACTERS)[0]
            for word in words
        ]
    )


@pytest.mark.newest
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("split", ["train", "test"])
def test_both_streams_read_and_predict_what_they_should(task, split, batch_size):
    read, predicted, backward_read, backward_predicted = [], [], [], []
    for document in sentences_by_corpus.documents("both", None, split):
        for sentence in document:
            read += ["<S>", *sentence]
            predicted += [*sentence, "</S>"]
            backward_read += ["</S>", *reversed(sentence)]
            backward_predicted += [*reversed(sentence), "<S>"]
    batches = list(task.stream(split, batch_size))
    known = [
        [word if word in task.vocabulary else "<unk>" for word in side]
        for side in (predicted, backward_predicted)
    ]
    assert task.vocabulary.decode(joined(batches, "targets")).split(" ") == known[0]
    assert (
        task.vocabulary.decode(joined(batches, "backward_targets", "backward_weights")).split(" ")
        == known[1]
    )
    np.testing.assert_array_equal(joined(batches, "inputs"), spelled(read))
    np.testing.assert_array_equal(
        joined(batches, "backward_inputs", "backward_weights"), spelled(backward_read)
    )


def test_fields_and_what_fills_them_up(task):
    batches = list(task.stream("validation", 4))
    first, last = batches[0], batches[-1]
    assert {key: (value.shape[2:], value.dtype) for key, value in first.items()} == {
        "inputs": ((CHARACTERS,), np.int32),
        "targets": ((), np.int32),
        "weights": ((), np.float32),
        "backward_inputs": ((CHARACTERS,), np.int32),
        "backward_targets": ((), np.int32),
        "backward_weights": ((), np.float32),
        "reset": ((), np.float32),
    }
    assert first["reset"].tolist() == [1] * 4
    assert (last["weights"] == 0).any()
    assert not last["inputs"][last["weights"] == 0].any()
    assert not last["backward_inputs"][last["backward_weights"] == 0].any()


def test_words_outside_the_vocabulary_are_read_and_not_predicted():
    task = tasks.create("bilm", vocab_size=10, max_characters=CHARACTERS)
    batch = task.stream("train", 1)[0]
    words = sentences_by_corpus.documents("wikitext-2", None, "train")[0][0]
    np.testing.assert_array_equal(
        batch["inputs"][0, 1 : len(words) + 1], characters(words, CHARACTERS)
    )
    assert task.vocab_size == 10
    assert task.vocabulary.words[:3] == ("<unk>", "<S>", "</S>")
    assert batch["targets"].max() < 10
    assert task.saved_files()["words.txt"].startswith("<unk>\n<S>\n</S>\n.\nthe\n")


def test_examples_are_windows(task, rng):
    whole = task.dataset("test", task.size("test"))
    np.testing.assert_array_equal(
        whole["backward_targets"][whole["weights"] > 0],
        joined(task.stream("test", 1), "backward_targets"),
    )
    assert task.sample(rng, 3)["inputs"].shape == (3, LENGTH, CHARACTERS)
    with pytest.raises(ConfigError, match="of bilm has"):
        task.dataset("test", 10_000)


def test_blank_lines_and_empty_articles(tmp_path):
    for split in ("train", "valid", "test"):
        folder = write(
            tmp_path, f"wikitext-2/wiki.{split}.tokens", "\n = A = \n\n = B = \n\n x y . \n\n\n"
        )
    batches = list(tasks.create("bilm", data_dir=folder).stream("train", 1))
    assert sum(batch["weights"].sum() for batch in batches) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"bilm.length must be at least 1"),
        ({"vocab_size": 3}, r"bilm.vocab_size must be at least 4"),
        ({"max_characters": 2}, r"bilm.max_characters must be at least 3"),
        ({"corpus": "ud"}, r"unknown bilm.corpus 'ud'"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message):
        tasks.create("bilm", **options)
