import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import sms
from cope_jax.errors import ConfigError
from cope_jax.tokenizers.wordpiece import WordPiece
from tests.corpora.data import real, write


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text(
        WordPiece.train((message.text for message in sms.read(None)), 300).text, encoding="utf-8"
    )
    return str(path)


def create(vocab, **options):
    return tasks.create("spam", vocab=vocab, **{"folds": 5, **options})


@pytest.mark.newest
def test_folds_are_disjoint_whole_and_alike(vocab):
    every = [(message.text, message.label) for message in sms.read(None)]
    tests = []
    for fold in range(5):
        task = create(vocab, fold=fold)
        pairs = {
            split: list(zip(task.texts(split), task.labels(split).tolist(), strict=True))
            for split in task.splits
        }
        assert sorted(pairs["train"] + pairs["test"]) == sorted(every)
        # In the order of the file.
        assert [pair for pair in every if pair in set(pairs["test"])] == pairs["test"]
        assert 4 <= task.labels("test").sum() <= 5
        tests += pairs["test"]
    assert sorted(tests) == sorted(every)


def test_repeats_divide_otherwise_and_again_the_same(vocab):
    first, second = create(vocab), create(vocab, repeat=1)
    assert first.texts("test") != second.texts("test")
    assert first.texts("test") == create(vocab).texts("test")


@pytest.mark.parametrize("length", [8, 64])
def test_batches_are_the_messages(vocab, length):
    task, wordpiece = create(vocab, length=length), WordPiece.load(vocab)
    batch = task.dataset("test", task.size("test"))
    assert {key: (value.shape[1:], value.dtype) for key, value in batch.items()} == {
        "inputs": ((length,), np.int32),
        "mask": ((length,), np.int32),
        "segments": ((length,), np.int32),
        "targets": ((), np.int32),
        "weights": ((), np.float32),
    }
    for text, ids, mask in zip(task.texts("test"), batch["inputs"], batch["mask"], strict=True):
        assert ids[mask == 1].tolist() == [
            wordpiece.cls,
            *wordpiece.encode(text)[: length - 2],
            wordpiece.sep,
        ]
        assert (ids[mask == 0] == wordpiece.pad).all()
    np.testing.assert_array_equal(batch["targets"], task.labels("test"))
    assert batch["weights"].all()
    assert not batch["segments"].any()


def test_training_messages_may_be_few(vocab, rng):
    task, whole = create(vocab, train=12), create(vocab)
    assert task.size("train") == 12
    assert 4 <= task.labels("train").sum() <= 5
    assert set(task.texts("train")) < set(whole.texts("train"))
    assert task.texts("test") == whole.texts("test")
    assert task.sample(rng, 7)["inputs"].shape == (7, 64)


def test_a_vocabulary_is_learned_from_training_alone():
    task = tasks.create("spam", folds=5)
    texts = " ".join(task.texts("train")).lower()
    assert all(piece.removeprefix("##") in texts for piece in task.wordpiece.pieces[5:])
    assert task.vocab_size == len(task.wordpiece)
    assert task.saved_files() == {"vocab.txt": task.wordpiece.text}
    assert (task.num_classes, task.classes, task.evaluation_splits) == (
        2,
        ("ham", "spam"),
        ("test",),
    )


def test_special_pieces_in_a_message_are_text(vocab, tmp_path):
    lines = "".join(f"{label}\t[SEP] [MASK] {i}\n" for i in range(4) for label in ("ham", "spam"))
    task = create(vocab, folds=2, data_dir=write(tmp_path, "sms-spam/SMSSpamCollection.tsv", lines))
    inputs = task.dataset("train", 4)["inputs"]
    assert (inputs == task.wordpiece.sep).sum() == 4
    assert not (inputs == task.wordpiece.mask).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 2}, r"spam.length must be at least 3"),
        ({"folds": 1}, r"spam.folds must be at least 2"),
        ({"fold": 5}, r"spam.fold must be 0 to 4, got 5"),
        ({"folds": 30}, r"spam.folds must be at most 22"),
        ({"train": 1}, r"spam.train must be at least 2"),
        ({"train": 46}, r"spam.train must be at most 44"),
        ({"vocab": "nowhere.txt"}, r"cannot read nowhere.txt"),
    ],
)
def test_wrong_options_are_one_line(vocab, options, message):
    with pytest.raises(ConfigError, match=message):
        create(**{"vocab": vocab, **options})


def test_on_the_collection():
    folder = real("sms-spam/SMSSpamCollection.tsv", "tokenizers/bert-base-uncased-vocab.txt")
    task = tasks.create(
        "spam", data_dir=folder, vocab=f"{folder}/tokenizers/bert-base-uncased-vocab.txt"
    )
    assert (task.size("train"), task.size("test"), int(task.labels("test").sum())) == (
        4_653,
        518,
        66,
    )
