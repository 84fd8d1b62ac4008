import collections
import json
import shutil

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora.corpus_files import SAMPLES
from cope_jax.corpora.raw_text import documents
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write

KINDS = ("bpe", "words", "bytes")


@pytest.fixture
def task():
    return tasks.create("text", vocab_size=400, length=16)


def everything(task, split):
    return task.dataset(split, task.size(split))


def said(batch):
    return batch["targets"][batch["weights"] == 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("split", ["validation", "test", "length=50", "validation/length=40"])
def test_every_token_of_a_split_is_predicted_once(kind, packing, split):
    task = tasks.create(
        "text",
        tokenizer=kind,
        packing=packing,
        length=16,
        vocab_size=400 if kind == "bpe" else None,
    )
    name = split.split("/")[0] if split in ("validation", "validation/length=40") else "test"
    texts = documents("wikitext-2", None, name)
    batch = everything(task, split)
    assert batch["inputs"].shape == (task.size(split), task.length(split))
    wanted = [task.encode(text) for text in texts]
    assert collections.Counter(said(batch).tolist()) == collections.Counter(
        np.concatenate(wanted).tolist()
    )
    if packing == "stream":
        assert said(batch).tolist() == np.concatenate(wanted).tolist()
        assert batch.keys() == {"inputs", "targets", "weights"}
    else:
        assert batch.keys() == {"inputs", "targets", "weights", "segments", "positions"}
    counts = task.counts(split)
    assert counts.tokens == batch["weights"].sum()
    assert counts.words == sum(len(text.split()) + text.count("\n") for text in texts)
    assert counts.bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_stand_for_words_and_bytes_whatever_the_tokens(kind):
    task = tasks.create("text", tokenizer=kind)
    other = tasks.create("text", tokenizer="words")
    assert (task.counts("test").words, task.counts("test").bytes) == (
        other.counts("test").tokens,
        other.counts("test").bytes,
    )
    assert kind != "bytes" or task.counts("test").tokens == task.counts("test").bytes


def test_the_whole_text_is_there_for_windows_of_other_kinds(task):
    (entries,) = task.token_streams("test")
    assert task.decode(entries.tokens[1:][entries.counted]) == "".join(
        documents("wikitext-2", None, "test")
    )
    ends = entries.tokens[entries.bounds]
    assert ends.tolist() == [task.tokenizer.end] * (len(documents("wikitext-2", None, "test")) + 1)


def test_the_end_of_a_document_is_learned_but_not_measured(task):
    ends = {
        split: int(np.sum(said(everything(task, split)) == task.tokenizer.end)) for split in SPLITS
    }
    assert ends == {
        "train": len(documents("wikitext-2", None, "train")),
        "validation": 0,
        "test": 0,
    }
    for split in SPLITS:
        assert task.counts(split).tokens == everything(task, split)["weights"].sum() - ends[split]
        assert task.counts(split).tokens == sum(
            len(task.encode(text)) for text in documents("wikitext-2", None, split)
        )


def test_a_longer_length_is_the_same_text(task):
    short, long = everything(task, "test"), everything(task, "length=64")
    np.testing.assert_array_equal(said(short), said(long))
    assert long["inputs"].shape[1] == 64
    assert task.length("length=64") == 64
    np.testing.assert_array_equal(everything(task, "length=16")["inputs"], short["inputs"])


def test_the_sweep_grows_and_its_longest_is_the_longest_of_the_task():
    task = tasks.create("text", vocab_size=400, length=16, sweep=(64, 16, 32))
    assert task.sweep == ((16, "length=16"), (32, "length=32"), (64, "length=64"))
    assert task.max_length == 64
    assert [task.as_trained(split) for _, split in task.sweep] == [True, False, False]
    # The same text.
    assert task.sweep_examples(2) == {"length=16": 8, "length=32": 4, "length=64": 2}
    assert tasks.create("text", vocab_size=400, length=16).max_length == 16


def test_text_comes_back(task):
    text = "The keeper of the light\n\tsaw 12 ships – and counted."
    assert task.decode(task.encode(text)) == text
    assert task.encode(text).dtype == np.int32
    with pytest.raises(ConfigError, match=r"^token 400 is not in the vocabulary of 400 tokens"):
        task.decode([3, 400])


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_a_run_is_taken_from_its_folder(kind, tmp_path):
    options = {"tokenizer": kind, "vocab_size": None if kind == "bytes" else 300, "length": 16}
    task = tasks.create("text", **options)
    for name, content in task.saved_files().items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    elsewhere = tasks.TASKS.get("text").with_saved_files(
        {**options, "data_dir": "nowhere"}, tmp_path
    )
    again = tasks.create("text", **elsewhere)  # reads no corpus
    assert again.saved_files() == task.saved_files()
    assert again.vocab_size == task.vocab_size
    with pytest.raises(ConfigError, match=r"no wikitext-2/wiki.test.tokens in nowhere"):
        again.size("test")
    assert tasks.TASKS.get("text").with_saved_files(options, tmp_path / "none") == options


def test_a_text_that_has_changed_is_learned_anew(tmp_path):
    def words():
        task = tasks.create("text", data_dir=str(tmp_path), corpus="files", tokenizer="words")
        return task.tokenizer.vocabulary.words

    (tmp_path / "files").mkdir()
    for word in ("lantern", "harbour"):
        (tmp_path / "files" / "a.txt").write_text(f"the {word} is old\n" * 50)
        assert word in words()


def test_a_corpus_is_known_by_its_texts_and_not_by_its_place(tmp_path):
    def data_digest():
        return tasks.create(
            "text", data_dir=str(tmp_path), corpus="files", tokenizer="bytes"
        ).data_digest()["corpus.json"]

    shutil.copytree(SAMPLES / "files", tmp_path / "files")
    before = data_digest()
    assert (
        before
        == tasks.create("text", corpus="files", tokenizer="bytes").data_digest()["corpus.json"]
    )
    for split, described in json.loads(before).items():
        assert described["bytes"] == sum(
            len(text.encode()) for text in documents("files", None, split)
        )
    first = min((tmp_path / "files").glob("*.txt"))
    first.write_text("T" + first.read_text()[1:].swapcase())
    train, changed = (json.loads(text)["train"] for text in (before, data_digest()))
    assert (train["documents"], train["bytes"]) == (changed["documents"], changed["bytes"])
    assert train["sha256"] != changed["sha256"]


def test_a_split_is_the_same_whatever_became_of_others(tmp_path):
    data = shutil.copytree(SAMPLES / "wikitext-2", tmp_path / "data" / "wikitext-2")
    task = tasks.create("text", data_dir=str(tmp_path / "data"), tokenizer="bytes")
    assert task.same_data(tmp_path, ["test"]) is None
    (tmp_path / "corpus.json").write_text(task.data_digest()["corpus.json"])
    (data / "wiki.valid.tokens").write_text("Another text .\n")
    (data / "wiki.train.tokens").unlink()
    again = tasks.create("text", data_dir=str(tmp_path / "data"), tokenizer="bytes")
    assert again.same_data(tmp_path, ["test", "length=8"]) is True
    assert again.same_data(tmp_path, ["test", "validation/length=8"]) is False
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"corpus.json is damaged \(.*\): delete it to skip this check$"
    ):
        again.same_data(tmp_path, ["test"])


def write_tokenizer(folder, task, form):
    """A tokenizer in one of the forms in which it is published."""
    text = next(iter(task.saved_files().values()))
    if form == "pairs":
        model = json.loads(text)["model"]
        (folder / "encoder.json").write_text(json.dumps(model["vocab"]))
        (folder / "vocab.bpe").write_text(
            "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
        )
    elif form == "indented":
        offsets = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        }
        content = json.loads(text) | {"post_processor": offsets}
        (folder / "tokenizer.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    else:
        (folder / form).write_text(text)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("bpe", "indented"), ("bpe", "pairs"), ("bytes", "indented"), ("words", "words.txt")],
)
def test_a_published_tokenizer_is_the_same_by_its_meaning(kind, form, tmp_path):
    options = {"tokenizer": kind, "vocab_size": None if kind == "bytes" else 300, "length": 16}
    task = tasks.create("text", **options)
    assert task.same_saved_files(tmp_path) is None
    write_tokenizer(tmp_path, task, form)
    assert task.same_saved_files(tmp_path) is True
    others = [
        {"tokenizer": "words" if kind == "bpe" else "bpe"},
        {"corpus": "files"} if kind != "bytes" else {},
    ]
    for other in others:
        if other:
            assert (
                tasks.create("text", **options | {"vocab_size": 300} | other).same_saved_files(
                    tmp_path
                )
                is False
            )
    if form == "pairs":
        first, *pairs = (tmp_path / "vocab.bpe").read_text().splitlines()
        (tmp_path / "vocab.bpe").write_text("\n".join([first, *pairs[::-1]]))
        assert task.same_saved_files(tmp_path) is False


def test_a_mixture_is_of_all_its_corpora():
    task = tasks.create("text", corpus="3*wikitext-2+files", vocab_size=400, length=16)
    alone = {
        name: tasks.create("text", corpus=name, vocab_size=400, length=16)
        for name in ("wikitext-2", "files")
    }
    (first, indices), (second, others) = task.mixture("train")
    assert (first, second) == (3, 1)
    assert (indices.start, indices.stop, others.stop) == (0, others.start, task.size("train"))
    assert task.counts("test").bytes == sum(
        corpus.counts("test").bytes for corpus in alone.values()
    )
    assert alone["files"].mixture("train") == ()


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("split", ["validation", "test", "length=24"])
def test_the_first_examples_of_a_mixture_are_of_each_corpus_by_its_size(packing, split):
    options = {"tokenizer": "bytes", "length": 8, "packing": packing}
    task = tasks.create("text", corpus="wikitext-2+files", **options)
    rows = [row.tobytes() for row in everything(task, split)["targets"]]
    batches = {
        name: everything(tasks.create("text", corpus=name, **options), split)
        for name in ("wikitext-2", "files")
    }
    rows_of = {name: [row.tobytes() for row in batch["targets"]] for name, batch in batches.items()}
    for name, expected in rows_of.items():
        assert [row for row in rows if row in set(expected)] == expected  # whole, each in its order
        share = np.cumsum([row in set(expected) for row in rows]) - np.arange(
            1, len(rows) + 1
        ) * len(expected) / len(rows)
        assert np.abs(share).max() <= 1.5, name
    assert len(rows) == task.size(split) == sum(map(len, rows_of.values()))
    assert task.counts(split).tokens == sum(batch["weights"].sum() for batch in batches.values())
    assert task.mixture(split) == ()


def test_drawn_examples_of_a_mixture_have_its_shares(rng):
    task = tasks.create("text", corpus="3*wikitext-2+files", vocab_size=400, length=16)
    indices = task.mixture("train")[1][1]
    rows = {row.tobytes() for row in task.take("train", np.array(indices))["inputs"]}
    drawn = task.sample(rng, 400)["inputs"]
    assert np.mean([row.tobytes() in rows for row in drawn]) == pytest.approx(0.25, abs=0.07)


@pytest.mark.parametrize(
    ("kind", "text", "left_out", "metrics"),
    [
        ("bpe", "the caf\u00e9 is open \n", "", {"perplexity", "bits_per_byte"}),
        (
            "bpe",
            "the cafe\u0301 is open \n",
            "no perplexity per word, no bits per byte: the tokenizer loses words (1)",
            set(),
        ),
        (
            "bpe",
            " the cafe is open \n",
            "no bits per byte: the tokenizer changes bytes of texts (1)",
            {"perplexity"},
        ),
        ("words", "the cafe is open\n", "", {"perplexity", "bits_per_byte"}),
        (
            "words",
            "the  cafe is open\n",
            "no bits per byte: the tokenizer changes bytes of texts (1)",
            {"perplexity"},
        ),
    ],
)
def test_a_text_that_does_not_come_back_has_no_bits_per_byte(
    kind, text, left_out, metrics, tmp_path
):
    from tokenizers import Tokenizer, normalizers

    write(tmp_path, "files/a.txt", text * 60)
    options = {
        "corpus": "files",
        "data_dir": str(tmp_path),
        "tokenizer": kind,
        "vocab_size": None,
        "length": 8,
    }
    if kind == "bpe":
        library = Tokenizer.from_str(
            tasks.create("text", **options).saved_files()["tokenizer.json"]
        )
        library.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Strip(right=False)]
        )
        library.save(str(tmp_path / "tokenizer.json"))
        options["vocab"] = str(tmp_path / "tokenizer.json")
    task = tasks.create("text", **options)
    assert task.counts("test").left_out.startswith(left_out) and left_out in task.origin()
    assert bool(left_out) == bool(task.left_out()) == ("; no " in task.origin())
    assert set(task.reported_metrics("test", {"loss": 2.0})) == metrics | {
        "loss",
        "token_perplexity",
    }
    assert task.metric == ("perplexity" if "perplexity" in metrics else "token_perplexity")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "^text.length must be at least 1, got 0"),
        ({"sweep": (16, 0)}, "^text.sweep must be at least 1, got 0"),
        (
            {"tokenizer": "word"},
            "^unknown option of text|^unknown text.tokenizer 'word': did you mean 'words'",
        ),
        ({"packing": "streams"}, "^unknown text.packing 'streams': did you mean 'stream'"),
        ({"corpus": "wikitext"}, "^unknown corpus 'wikitext': did you mean 'wikitext-2'"),
        ({"corpus": "files+"}, "^unknown corpus ''"),
        (
            {"corpus": "x*files"},
            r"^text.corpus='x\*files' has the weight 'x': give a positive number",
        ),
        ({"corpus": "0*files+code"}, "has the weight '0': give a positive number"),
        ({"corpus": "nan*files"}, "has the weight 'nan': give a positive number"),
        ({"corpus": "files+2*files"}, "names a corpus twice: name each corpus once"),
        (
            {"globs": ("*.md",)},
            "^text.globs needs exactly one of code and files in text.corpus, but 'wikitext-2' has neither",
        ),
        (
            {"corpus": "files+code", "globs": ("*.txt",)},
            r"^text.globs needs exactly one .* in text.corpus, but 'files\+code' has files and code: leave globs out",
        ),
        (
            {"tokenizer": "bytes", "vocab": "x"},
            "^text.tokenizer='bytes' always has the same 256 tokens: leave vocab out",
        ),
        (
            {"corpus": "wikitext-103+2*files+wikitext-2-raw"},
            " has wikitext-103 and wikitext-2-raw, which have the same validation",
        ),
        ({"vocab_size": 200}, "a byte-level vocabulary of 200 has no room"),
        (
            {"data_dir": "nowhere"},
            "^no wikitext-2/wiki.train.tokens in nowhere, which does not exist: put the corpus there",
        ),
        (
            {"data_dir": "http://nowhere"},
            "^http://nowhere is not a folder or file: give a path on disk, or one that",
        ),
        (
            {"data_dir": "http://nowhere", "corpus": "files"},
            "^http://nowhere is not a folder or file: give a path on",
        ),
        (
            {"vocab": "http://nowhere"},
            "^http://nowhere is not a folder or file: give a path on disk, or one that begins",
        ),
        ({"vocab": "nowhere"}, "^there is no tokenizer at nowhere: give a tokenizer.json"),
        ({"vocab": "nowhere", "tokenizer": "words"}, "cannot read nowhere"),
    ],
)
def test_wrong_options_are_one_line(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        tasks.create("text", **options)
    assert "\n" not in str(error.value)


def test_what_is_not_learned_has_the_size_that_it_has(task, tmp_path):
    """Recipes name the size of the vocabulary that they learn, and a flag may ask for another."""
    (tmp_path / "tokenizer.json").write_text(task.saved_files()["tokenizer.json"], encoding="utf-8")
    assert tasks.create("text", vocab=str(tmp_path), vocab_size=300).vocab_size == 400
    assert tasks.create("text", tokenizer="bytes", vocab_size=300).vocab_size == 257


def test_a_damaged_tokenizer_is_one_line(task, tmp_path):
    damaged = json.loads(task.saved_files()["tokenizer.json"])
    del damaged["model"]["merges"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is not a valid tokenizer.json \(.*: fetch it again$"):
        tasks.create("text", vocab=str(tmp_path))


@pytest.mark.parametrize("corpus", ["wikitext-2", "wikitext-2+files"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_place_without_an_example_is_one_line(corpus, split):
    task = tasks.create("text", corpus=corpus, tokenizer="bytes", length=16)
    size = task.size(split)
    for index in (-1, size):
        with pytest.raises(
            ConfigError,
            match=rf"^there is no example {index}: give an index of at least 0 and less than {size}$",
        ):
            task.take(split, np.array([0, index]))
    assert len(task.take(split, np.array([size - 1, 0]))["inputs"]) == 2
    assert len(task.take(split, np.array([], np.int64))["inputs"]) == 0


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            "dev",
            "^unknown split of text 'dev': choose from length=<number>, test, train, validation, ",
        ),
        ("length=", "^split 'length=' of text has no valid length: use one like 'length=512'$"),
        ("length=0", "has no valid length"),
        ("length=1.5", "has no valid length"),
        ("dev/length=3", "^unknown split of text"),
        ("test/4", "^unknown split of text"),
    ],
)
def test_unknown_splits_are_one_line(task, split, message):
    for call in (task.length, task.size, task.counts, task.mixture):
        with pytest.raises(ConfigError, match=message):
            call(split)


def test_an_empty_split_is_one_line(tmp_path):
    for name in ("train", "valid", "test"):
        folder = write(
            tmp_path, f"wikitext-2/wiki.{name}.tokens", "a b\n" if name != "test" else ""
        )
    task = tasks.create("text", data_dir=folder, tokenizer="words", length=4)
    with pytest.raises(ConfigError, match=r"^wikitext-2 has no text in its split 'test'"):
        task.size("test")


def test_published_counts_of_wikitext_2():
    task = tasks.create(
        "text", data_dir=real("wikitext-2/wiki.train"), tokenizer="words", length=35
    )
    assert task.vocab_size == 33_278
    assert [task.counts(split).tokens for split in SPLITS] == [2_088_628, 217_646, 245_569]
    assert [task.counts(split).words for split in SPLITS] == [2_088_628, 217_646, 245_569]
    assert sum(everything(task, "test")["weights"].sum(axis=1).astype(int)) == 245_569
