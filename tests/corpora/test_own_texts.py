"""Tables of labelled texts, and text of one's own for ELMo and BERT."""

import json
import shutil

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora import conllu, document_files, sentences_by_corpus, sms, tables
from cope_jax.corpora.corpus_files import SAMPLES
from cope_jax.corpora.document_files import share_of
from cope_jax.errors import ConfigError
from tests.corpora.data import write

NEWDOC = ("# newdoc", "#")


def table(folder, text):
    write(folder, "a.csv", text)
    return str(folder / "a.csv")


def test_a_table_has_quoted_values_in_any_columns(tmp_path):
    path = table(
        tmp_path, '\ufefflabel, id,text\r\nspam,1,"Win, ""now""\nor never"\r\n\r\n ham ,2, hé \r\n'
    )
    assert tables.read(path, ("text", "label"), ("split",)) == [
        (f"{path}, line 2", {"text": 'Win, "now"\nor never', "label": "spam"}),
        (f"{path}, line 5", {"text": "hé", "label": "ham"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "line 1 must name the columns text and label once each, but it is empty: write a header$",
        ),
        (
            "Text,label\na,b\n",
            "the columns text and label once each, but it has Text, label: rename the columns$",
        ),
        (
            "text,text,label\n",
            "text and label once each, but it has text, text, label: rename the columns$",
        ),
        ("text,label\n", "has a header but no row: add rows$"),
        (
            "text,label\na,b\na, b,c\n",
            "line 3 has 3 values for 2 columns: quote texts with commas$",
        ),
        ("text,label\na,\n", "line 2 has an empty label: fill it in, or remove the row$"),
        (
            'text,label\na,b\n"a,b\n',
            r"line 3 is no row of a CSV file \(unexpected end of data\): repair it$",
        ),
        ("text,label\na,b\0\n", "line 2 has a zero byte, so it is not text"),
    ],
)
def test_a_wrong_table_is_one_line(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        tables.read(table(tmp_path, text), ("text", "label"))
    assert "\n" not in str(error.value)


def test_a_value_may_be_as_long_as_the_table(tmp_path):
    text = "word " * 60_000 + "end"
    path = table(tmp_path, f'text,label\n"{text}",A\n')
    assert tables.read(path, ("text", "label")) == [
        (f"{path}, line 2", {"text": text, "label": "A"})
    ]


def test_texts_of_two_classes_take_the_place_of_messages(tmp_path):
    rows = [f"good film {number},yes\nbad film {number},No\n" for number in range(6)]
    path = table(tmp_path, "text,label\n" + "".join([*rows, rows[0]]))
    assert len(sms.read_table(path)[1]) == 12
    task = tasks.create("spam", file=path, folds=3, vocab_size=100)
    assert task.classes == ("No", "yes")
    for text, label in zip(task.texts("test"), task.labels("test"), strict=True):
        assert label == text.startswith("good")
    with pytest.raises(
        ConfigError,
        match=r"a.csv has 3 different labels \(A, b, C\), not 2: give texts of two classes",
    ):
        sms.read_table(table(tmp_path, "text,label\nx,b\nx,A\nx,C\n"))
    with pytest.raises(
        ConfigError, match=r"a.csv, line 4 has the text of an earlier row with the other label: rem"
    ):
        sms.read_table(table(tmp_path, "text,label\nx,b\ny,A\nx,A\n"))
    with pytest.raises(ConfigError, match="spam accepts data_dir or file, not both"):
        tasks.create("spam", file=path, data_dir=str(tmp_path))


def test_sentences_with_tags_take_the_place_of_a_treebank(tmp_path):
    path = table(
        tmp_path, "text,label\n" + "".join(f"the dog {n} runs,D N M V\n" for n in range(60))
    )
    task = tasks.create("tagging", file=path, length=8)
    assert task.tags == ("D", "M", "N", "V") and task.origin() == path
    before = task.data_digest()
    write(tmp_path, "a.csv", (tmp_path / "a.csv").read_text() + "a,D\n")
    assert (
        before.keys() == task.data_digest().keys() == {"own_files.json"}
        and before != task.data_digest()
    )
    for split in ("train", "validation", "test"):
        sentences = [" ".join(words) for words in task.sentences(split)]
        low, high = {"validation": (0, 0.1), "test": (0.1, 0.2), "train": (0.2, 1)}[split]
        assert sentences and all(low <= share_of(text) < high for text in sentences)
        batch = task.dataset(split, 1)
        assert [task.tags[tag] for tag in batch["targets"][0][:4]] == ["D", "N", "M", "V"]
    splits = "text,label,split\na b,X Y,test\nc,X,train\nd,Z,validation\n"
    sentences_of = conllu.read_table(table(tmp_path, splits))
    assert [sentence.words for sentences in sentences_of.values() for sentence in sentences] == [
        ("c",),
        ("d",),
        ("a", "b"),
    ]
    for text, message in (
        (splits.replace("X Y", "X"), "line 2 has 2 words and 1 tags: give each word one tag$"),
        (
            splits.replace("test", "dev"),
            "line 2 has the split 'dev': choose from train, validation, test$",
        ),
        (
            splits.replace("test", "train"),
            "has no sentence for test: give more, or name splits in a column 'split'$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            conllu.read_table(table(tmp_path, text))


def test_own_text_has_documents_and_sentences_in_one_split_each(tmp_path, monkeypatch):
    write(
        tmp_path,
        "a.txt",
        "".join(f"The dog {n} runs . It barks .\nIt sleeps\n\n \n" for n in range(100)),
    )
    records = [json.dumps({"text": f"A record {n} ."}) for n in range(100)]
    write(tmp_path, "b.jsonl", "\n".join(records))
    files, seen = (f"{tmp_path}/a.txt", f"{tmp_path}/*.jsonl"), []
    for documents in sentences_by_corpus.by_split("wikitext-2", None, files).values():
        assert documents[0][1:] == [("It", "barks", "."), ("It", "sleeps")] and documents[-1][0][
            :2
        ] == ("A", "record")
        seen += [document[0] for document in documents]
    assert len(seen) == len(set(seen)) == 200
    read, pieces = [], document_files.pieces
    monkeypatch.setattr(
        document_files, "pieces", lambda *file, **how: read.append(file) or pieces(*file, **how)
    )
    bilm = tasks.create("bilm", files=files, length=8)
    assert len(read) == len(files)
    assert {"barks", "record"} <= set(bilm.vocabulary.words)
    masked = tasks.create("masked_lm", files=files, length=16, vocab_size=300)
    batch = masked.sample(np.random.default_rng(0), 4, "test")
    assert (
        "wikitext" not in masked.wordpiece.decode(batch["targets"][0])
        and masked.wordpiece.pieces.count("barks") == 1
    )
    assert bilm.origin() == ", ".join(files)
    for task in (bilm, masked):
        write(tmp_path, "run/own_files.json", task.data_digest()["own_files.json"])
        assert task.same_data(tmp_path / "run", ["train"]) is True
    write(tmp_path, "b.jsonl", "\n".join(records[1:]))
    assert bilm.same_data(tmp_path / "run", ["train"]) is False
    assert tasks.create("bilm").data_digest() == {}
    with pytest.raises(
        ConfigError, match=r"c.txt has no document for train: give more, with blank lines between"
    ):
        write(tmp_path, "c.txt", "\n")
        tasks.create("bilm", files=(f"{tmp_path}/c.txt",))


@pytest.mark.parametrize(
    ("name", "options", "file", "change"),
    [
        ("spam", {}, "sms-spam/SMSSpamCollection.tsv", ("the", "those")),
        ("spam", {}, "sms-spam/SMSSpamCollection.tsv", ("ham\tOn", "spam\tOn")),
        ("tagging", {}, "ud-ewt/en_ewt-ud-train.conllu", ("\tADJ\t", "\tADV\t")),
        ("bilm", {"corpus": "ud-ewt"}, "ud-ewt/en_ewt-ud-train.conllu", ("\tthe\t", "\tthose\t")),
        ("masked_lm", {"vocab_size": 300}, "wikitext-2/wiki.train.tokens", ("the", "those")),
        (
            "masked_lm",
            {"corpus": "ud-ewt", "vocab_size": 300},
            "ud-ewt/en_ewt-ud-train.conllu",
            NEWDOC,
        ),
        ("words", {}, "wikitext-2/wiki.train.tokens", ("the", "those")),
    ],
)
def test_a_run_knows_the_corpus_of_a_data_dir_by_its_digest(name, options, file, change, tmp_path):
    data, run = shutil.copytree(SAMPLES, tmp_path / "data"), tmp_path / "run"
    options = options | {"data_dir": str(data), "length": 8}
    for content in tasks.create(name, **options).data_digest().items():
        write(run, *content)
    assert tasks.create(name, **options).same_data(run, ["train"]) is True
    text = (data / file).read_text()
    assert text.count(change[0]) > 0
    head, _, tail = text.rpartition(change[0])
    (data / file).write_text(head + change[1] + tail)
    changed = tasks.create(name, **options)
    assert changed.same_data(run, ["train", "test"]) is False
    # Where splits have digests of their own, a test does not need the data of training.
    assert changed.same_data(run, ["test"]) is (name != "spam")
    assert (run / "corpus.json").exists() and not tasks.create(name).data_digest()


@pytest.mark.parametrize("name", ["bilm", "masked_lm"])
def test_of_files_and_a_corpus_the_files_are_known(name, tmp_path):
    text = "".join(f"word {n} stands here . and so on .\n\n" for n in range(200))
    write(tmp_path, "a.txt", text)
    task = tasks.create(name, files=(str(tmp_path / "a.txt"),), data_dir=str(SAMPLES), length=8)
    assert task.data_digest().keys() == {"own_files.json"}
