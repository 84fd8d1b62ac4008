import gzip

import pytest

from cope_jax.corpora import source_code
from cope_jax.corpora.raw_text import READERS, documents
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.errors import ConfigError
from tests.corpora.data import real, write

ARTICLES = " \n = One = \n \n Both came . \n = Played , W = \n \n = Two = \n \n It went . \n"


@pytest.mark.parametrize("corpus", [name for name in READERS.names() if name != "code"])
def test_the_sample_has_every_corpus_in_every_split(corpus):
    assert all(documents(corpus, None, split) for split in SPLITS)


@pytest.mark.parametrize("corpus", ["wikitext-2", "wikitext-103"])
def test_articles_are_the_file_cut_before_their_titles(tmp_path, corpus):
    folder = write(tmp_path, f"{corpus}/wiki.valid.tokens", ARTICLES)
    articles = documents(corpus, folder, "validation")
    assert [text.split("\n")[0] for text in articles] == [" ", " = Two = "]
    assert "".join(articles) == ARTICLES


def test_raw_text_is_in_either_folder_and_never_replaced(tmp_path):
    folder = write(tmp_path, "wikitext-2/wiki.train.tokens", "a <unk>\n")
    with pytest.raises(
        ConfigError,
        match=r"no wikitext-2/wiki.train.raw in .*cope-jax download --corpora=wikitext-2-raw ",
    ):
        documents("wikitext-2-raw", folder, "train")
    write(tmp_path, "wikitext-2/wiki.train.raw", "a b\n")
    assert documents("wikitext-2-raw", folder, "train") == ["a b\n"]
    write(tmp_path, "wikitext-2-raw/wiki.train.raw", "a b c\n")
    assert documents("wikitext-2-raw", folder, "train") == ["a b c\n"]
    assert documents("wikitext-2", folder, "train") == ["a <unk>\n"]
    write(tmp_path, "wikitext-103-raw/wiki.train.permuted.raw", "d\n")
    assert documents("wikitext-103-raw", folder, "train") == ["d\n"]


def test_a_text_is_cut_between_words_and_nothing_is_lost(tmp_path):
    text = "".join(f"word{number} and\n" for number in range(200))
    folder = write(tmp_path, "tinyshakespeare/input.txt", text)
    parts = [documents("tinyshakespeare", folder, split) for split in SPLITS]
    assert [len(texts) for texts in parts] == [1, 1, 1]
    assert "".join(texts[0] for texts in parts) == text
    shares = [len(texts[0]) / len(text) for texts in parts]
    assert shares == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
    assert all(texts[0][-1].isspace() for texts in parts)


def test_files_are_those_that_match_sorted_and_each_is_cut(tmp_path):
    for name in ("b", "a/c"):
        folder = write(tmp_path, f"files/{name}.txt", f"{name} " * 100)
    (tmp_path / "files" / "d.txt.gz").write_bytes(gzip.compress(b"d " * 100))
    write(tmp_path, "files/e.md", "e " * 100)
    assert [text.split()[0] for text in documents("files", folder, "test")] == ["a/c", "b", "d"]
    assert [text.split()[0] for text in documents("files", folder, "test", ["*.md"])] == ["e"]
    elsewhere = [str(tmp_path / "files" / "a" / "*.txt")]
    assert [text.split()[0] for text in documents("files", None, "test", elsewhere)] == ["a/c"]
    assert documents("files", None, "train", elsewhere) == ["a/c " * 90]


def test_a_packed_file_is_unpacked_and_a_mark_of_byte_order_dropped(tmp_path):
    data = gzip.compress("\ufeff".encode() + b"value = 1\n" * 20)
    for corpus, split in (("files", "train"), ("code", source_code.split_of("a.py.gz"))):
        (tmp_path / corpus).mkdir()
        (tmp_path / corpus / "a.py.gz").write_bytes(data)
        (text,) = documents(corpus, str(tmp_path), split, ["*.gz"])
        assert text.startswith("value = 1\nvalue")
    (tmp_path / "code" / "a.py.gz").write_bytes(data[:-9])
    with pytest.raises(
        ConfigError, match=r"a.py.gz is not a complete gzip file \(.*\): fetch it again$"
    ):
        documents("code", str(tmp_path), split, ["**/a.py.gz"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\nb\xff\n", r"x.txt, line 2 is not UTF-8 text: convert the file to UTF-8$"),
        (
            b"a\n\0b\n",
            r"x.txt, line 2 has a zero byte, so it is not text: remove the file or the byte$",
        ),
        (b"", r"^files has no text in its split 'train': give more or larger files$"),
    ],
)
def test_what_is_no_text_is_one_line(tmp_path, content, message):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        documents("files", str(tmp_path), "train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("corpus", "file"),
    [
        ("wikitext-2", "wiki.test.tokens"),
        ("wikitext-103-raw", "wiki.test.raw"),
        ("tinyshakespeare", "input.txt"),
    ],
)
def test_a_zero_byte_is_text_of_no_corpus(tmp_path, corpus, file):
    folder = write(tmp_path, f"{corpus}/{file}", "a b\nc\0 d\n")
    with pytest.raises(ConfigError, match=rf"{file}, line 2 has a zero byte, so it is not text"):
        documents(corpus, folder, "test")


@pytest.mark.parametrize(
    ("corpus", "split", "message"),
    [
        ("wikitext", "train", "^unknown corpus 'wikitext': did you mean 'wikitext-2'"),
        ("wikitext-2", "valid", "^unknown split of wikitext-2 'valid': did you mean 'validation'"),
        (
            "wikitext-103",
            "train",
            "^no wikitext-103/wiki.train.tokens in nowhere.*cope-jax download --corpora=wikitext-103 ",
        ),
        (
            "tinyshakespeare",
            "test",
            "^no tinyshakespeare/input.txt or .* in nowhere, which does not exist: put the corpus there",
        ),
        (
            "files",
            "test",
            "^no file in nowhere/files matches .*: put text there, or give globs with a full path$",
        ),
        (
            "code",
            "test",
            "^no text in nowhere/code matches .*py: add files, or give globs with a full path$",
        ),
    ],
)
def test_what_is_missing_is_one_line(corpus, split, message):
    with pytest.raises(ConfigError, match=message) as error:
        documents(corpus, "nowhere", split)
    assert "\n" not in str(error.value)


PUBLISHED = {
    "train": (600, 10_797_148, 2_088_628),
    "validation": (60, 1_121_681, 217_646),
    "test": (60, 1_256_449, 245_569),
}


@pytest.mark.parametrize("split", SPLITS)
def test_published_counts_of_wikitext_2(split):
    articles = documents("wikitext-2", real("wikitext-2/wiki.train"), split)
    text = "".join(articles)
    assert (len(articles), len(text.encode()), len(text.split()) + text.count("\n")) == PUBLISHED[
        split
    ]


def test_published_size_of_tiny_shakespeare():
    folder = real("tinyshakespeare/input")
    assert sum(len(documents("tinyshakespeare", folder, split)[0]) for split in SPLITS) == 1_115_394
