import collections

import numpy as np
import pytest
from flax import nnx

from cope_jax import models, tasks
from cope_jax.corpora import conllu, wikitext
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE
from cope_jax.models.rnn_lm import RNNLMOptions
from tests.corpora.data import real, write


@pytest.fixture(scope="module")
def task():
    return tasks.create("words", length=7)


def rows(batches, field):
    """The entries that count, row after row."""
    joined, weights = (
        np.concatenate([batch[name] for batch in batches], axis=1) for name in (field, "weights")
    )
    return joined[weights > 0]


@pytest.mark.newest
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_stream_predicts_every_word_once_from_the_one_before(task, split, batch_size):
    text = wikitext.words(None, split)
    batches = list(task.stream(split, batch_size))
    expected = [word if word in task.vocabulary else "<unk>" for word in text]
    assert task.vocabulary.decode(rows(batches, "targets")).split(" ") == expected
    assert task.vocabulary.decode(rows(batches, "inputs")).split(" ") == ["<eos>", *expected[:-1]]
    assert {batch["inputs"].shape for batch in batches} == {(batch_size, 7)}
    assert {key: value.dtype for key, value in batches[0].items()} == {
        "inputs": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "reset": np.float32,
    }


def test_the_vocabulary_is_that_of_training_by_falling_count(task):
    counts = collections.Counter(wikitext.words(None, "train"))
    assert task.vocab_size == len(counts) + 1  # the sample has no <unk> of its own
    order = [counts[word] for word in task.vocabulary.words[1:]]
    assert order == sorted(order, reverse=True)
    assert task.saved_files() == {"words.txt": "\n".join(task.vocabulary.words) + "\n"}


def test_a_small_vocabulary_leaves_the_rest_unknown():
    task = tasks.create("words", vocab_size=20)
    targets = rows(task.stream("train", 2), "targets")
    assert task.vocab_size == 20
    assert set(targets) == set(range(20))
    assert (targets == 0).sum() > 100


def test_examples_are_windows_in_order(task):
    size = task.size("test")
    batch = task.dataset("test", size)
    np.testing.assert_array_equal(
        batch["targets"][batch["weights"] > 0], rows(task.stream("test", 1), "targets")
    )
    np.testing.assert_array_equal(task.dataset("test", 2, seed=5)["inputs"], batch["inputs"][:2])
    with pytest.raises(ConfigError, match=f"the split 'test' of words has {size} examples"):
        task.dataset("test", size + 1)


def test_drawn_windows_are_parts_of_the_text(task, rng):
    text = rows(task.stream("train", 1), "targets").tolist()
    windows = {tuple(text[i : i + 7]) for i in range(len(text) - 6)}
    batch = task.sample(rng, 50)
    assert all(tuple(row) in windows for row in batch["targets"].tolist())
    assert batch["weights"].all()
    assert len(np.unique(batch["inputs"], axis=0)) > 30


def test_a_text_shorter_than_a_window(rng, tmp_path):
    for split in ("train", "valid", "test"):
        folder = write(tmp_path, f"wikitext-2/wiki.{split}.tokens", "a b\n")
    task = tasks.create("words", data_dir=folder, length=5)
    for batch in (task.sample(rng, 2), task.stream("train", 2)[0]):
        assert batch["inputs"].shape == (2, 5)
        assert batch["weights"].sum() in (3, 6)


def test_the_text_of_the_treebank(task):
    task = tasks.create("words", corpus="ud-ewt")
    text = [word for sentence in conllu.read(None, "train") for word in (*sentence.words, "<eos>")]
    assert task.vocabulary.decode(rows(task.stream("train", 3), "targets")) == " ".join(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, r"words.length must be at least 1"),
        ({"vocab_size": 1}, r"words.vocab_size must be at least 2"),
        ({"corpus": "wikitext"}, r"unknown words.corpus 'wikitext': did you mean 'wikitext-2'"),
        ({"data_dir": "nowhere"}, r"no wikitext-2/wiki.train.tokens in nowhere"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        tasks.create("words", **options)
    assert "\n" not in str(error.value)


def test_an_empty_split_is_one_line(tmp_path):
    for split in ("train", "valid", "test"):
        folder = write(
            tmp_path, f"wikitext-2/wiki.{split}.tokens", "a b\n" if split != "test" else ""
        )
    with pytest.raises(ConfigError, match="a split has no words"):
        tasks.create("words", data_dir=folder).stream("test", 2)


def test_published_counts():
    task = tasks.create("words", data_dir=real("wikitext-2/wiki.train"))
    assert task.vocab_size == 33_278
    assert sum(batch["weights"].sum() for batch in task.stream("test", 20)) == 245_569


@pytest.mark.parametrize("name", ["words", "bilm", "masked_lm", "tagging", "spam"])
def test_numbers_and_splits_are_checked_in_every_task_on_text(name, rng):
    task = tasks.create(name, **({"vocab_size": 512} if name in ("masked_lm", "spam") else {}))
    for draw in (task.sample(rng, 0), task.dataset("test", 0)):
        assert {len(field) for field in draw.values()} == {0}
    for bad in (
        lambda: task.sample(rng, -1),
        lambda: task.dataset("test", -1),
        lambda: task.sample(rng, 1, "dev"),
        lambda: task.dataset("dev", 1),
        lambda: task.stream("dev", 1),
        lambda: task.size("dev"),
    ):
        with pytest.raises(ConfigError):
            bad()


def test_the_reversed_text_is_read_from_its_end(task):
    both = tasks.create("words", length=7, backward=True)
    text = wikitext.words(None, "validation")
    batches = list(both.stream("validation", 1))
    read = np.concatenate(
        [batch["backward_inputs"][batch["backward_weights"] > 0] for batch in batches]
    )
    said = np.concatenate(
        [batch["backward_targets"][batch["backward_weights"] > 0] for batch in batches]
    )
    expected = [word if word in task.vocabulary else "<unk>" for word in text][::-1]
    assert task.vocabulary.decode(read).split(" ") == expected
    assert task.vocabulary.decode(said).split(" ") == [*expected[1:], "<eos>"]
    for batch, forward in zip(batches, task.stream("validation", 1), strict=True):
        assert batch.keys() - forward.keys() == {
            "backward_inputs",
            "backward_targets",
            "backward_weights",
        }
        for name in forward:
            np.testing.assert_array_equal(batch[name], forward[name])


def test_a_model_of_both_directions_trains_on_both():
    task = tasks.create("words", length=7, backward=True)
    options = RNNLMOptions(embed_dim=4, hidden_dim=4, bidirectional=True)
    model = models.create("rnn_lm", options.complete(task, None, 7, WHOLE), rngs=nnx.Rngs(0))
    measured, _ = model.metrics(task.stream("train", 2)[0], model.initial_carry(2))
    assert measured.keys() >= {"loss", "forward_loss", "backward_loss"}
