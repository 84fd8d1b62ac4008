import gzip
import json
import random

import pytest

from cope_jax.corpora import document_files
from cope_jax.errors import ConfigError
from cope_jax.tokenizers import loading


def texts(path, field="text", division="file"):
    """The documents of a file, whole."""
    documents = []
    (file,) = document_files.find([str(path)])
    for piece, share in document_files.pieces(file, field, division):
        assert 0 < share <= 1
        documents = (
            [*documents, piece.text] if piece.key else [*documents[:-1], documents[-1] + piece.text]
        )
    return documents


DOCUMENTS = ["One line.\n", "Zwei Zeilen:\n é 日本\n", " ", "x" * 5000]


def zstd(*frames):
    """A file of several frames, as zstd -T writes them."""
    pyarrow = pytest.importorskip("pyarrow")
    return b"".join(pyarrow.compress(frame, "zstd", asbytes=True) for frame in frames)


def compressed(path, content):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        half = len(content) // 2
        path.write_bytes(zstd(content[:half], content[half:]))
    else:
        path.write_bytes(content)


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_json_lines(tmp_path, end):
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate([*DOCUMENTS, ""])]
    path = tmp_path / f"web.jsonl{end}"
    compressed(path, "\n\n".join(lines).encode())
    assert texts(path) == DOCUMENTS


@pytest.mark.parametrize("end", ["", ".gz", ".zst"])
def test_a_file_of_text_is_one_document(tmp_path, monkeypatch, end):
    monkeypatch.setattr(document_files, "PIECE", 64)
    text = "\ufeffFirst line é\r\n\n  indented\nlast 日本" * 50
    path = tmp_path / f"book.txt{end}"
    compressed(path, text.encode())
    assert texts(path) == [text.removeprefix("\ufeff").replace("\r\n", "\n")]


def test_parquet_in_row_groups(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "000.parquet"
    parquet.write_table(
        pyarrow.table({"id": [1, 2, 3, 4], "text": DOCUMENTS}), path, row_group_size=3
    )
    assert texts(path) == DOCUMENTS
    with pytest.raises(
        ConfigError, match=r"000.parquet has no column 'body': set --text_field to one of id, text$"
    ):
        texts(path, "body")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        ConfigError, match=r"000.parquet is not a complete Parquet file .*: fetch it again$"
    ):
        texts(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "row 2 has null in 'text', not text: remove the record, or write a text$"),
        (b"x", "row 1 has bytes in 'text', not text: store the column as strings$"),
        (
            ["x"],
            "row 1 has a list in 'text', not text: store one text there, or set --text_field to the text's field$",
        ),
    ],
)
def test_a_column_without_text_is_one_line(tmp_path, value, message):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": ["a" if value is None else value, value]}), tmp_path / "0.parquet"
    )
    with pytest.raises(ConfigError, match=message):
        texts(tmp_path / "0.parquet")


@pytest.mark.parametrize("end", ["", ".gz"])
def test_lines_and_paragraphs_of_a_text_are_documents(tmp_path, monkeypatch, end):
    monkeypatch.setattr(document_files, "PIECE", 8)
    path = tmp_path / f"book.txt{end}"
    compressed(path, "\ufeff\nOne line é,\r\n  another \n \t\n\nThe last, of many words".encode())
    assert texts(path, division="line") == ["One line é,", "  another ", "The last, of many words"]
    assert texts(path, division="paragraph") == [
        "One line é,\n  another ",
        "The last, of many words",
    ]
    monkeypatch.setattr(document_files, "_LONGEST", 12)
    with pytest.raises(
        ConfigError, match=r"book.txt.*, line 2 ends a paragraph of \d+ bytes or more: shorten it$"
    ):
        texts(path, division="paragraph")


def test_a_document_is_cut_only_where_its_tokens_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "PIECE", 8)
    monkeypatch.setattr(document_files, "_AFTER", 4)
    (tmp_path / "a.txt").write_text("some words\r\n" * 9, newline="")
    (file,) = document_files.find([str(tmp_path / "a.txt")])
    pieces = [
        piece.text
        for piece, _ in document_files.pieces(file, joins=lambda left, right: right[0] != " ")
    ]
    assert len(pieces) > 3 and all(piece.endswith("words\n") for piece in pieces)
    assert "".join(pieces) == "some words\n" * 9
    monkeypatch.setattr(document_files, "_WHOLE", 40)
    with pytest.raises(
        ConfigError,
        match=r"has 40 characters that this tokenizer reads at once, which fills the memor",
    ):
        list(document_files.pieces(file, joins=lambda left, right: False))


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_the_pieces_of_a_text_have_its_tokens(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(document_files, "PIECE", 97)
    rng = random.Random(0)
    text = "".join(
        rng.choice(["a", "word", " ", "  ", "\n", "\n\n", "\t", "\r\n", "12", "é", "'s"])
        for _ in range(3000)
    )
    (tmp_path / "noise.txt").write_bytes(text.encode())
    (file,) = document_files.find([str(tmp_path / "*.txt")])
    pieces = [piece.text for piece, _ in document_files.pieces(file)]
    assert len(pieces) > 20
    whole = text.replace("\r\n", "\n")
    tokenizer = loading.train(kind, [whole], 300)
    parts = [token for encoded in tokenizer.encode(pieces) for token in encoded.tolist()]
    assert parts == tokenizer.encode([whole])[0].tolist()


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(document_files, "PIECE", 64)
    monkeypatch.setattr(document_files, "_LONGEST", 256)
    (tmp_path / "a.txt").write_text("é" * 2000)
    (file,) = document_files.find([str(tmp_path / "a.txt")])
    assert max(len(piece.text) for piece, _ in document_files.pieces(file)) < 400
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 2000}))
    with pytest.raises(ConfigError, match=r"a.jsonl, line 1 has at least"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": ',
            r"a.jsonl, line 2 is not a JSON record \(.*\): repair the file$",
        ),
        (
            "a.jsonl",
            b'[{"text": "x"}]',
            r"a.jsonl, line 1 is a list, not a JSON object: write one object in each line",
        ),
        (
            "a.json",
            b'[\n{"text": "x"}\n]',
            r"a.json, line 1 begins a JSON value of several lines: write one object in",
        ),
        (
            "a.jsonl",
            b'{"text": 3}',
            r"line 1 has a number \(3\) in 'text', not text: store one text there, or set --text_f",
        ),
        (
            "a.jsonl",
            b'{"text": ["x"]}',
            r"line 1 has a list in 'text', not text: store one text there, or set --text_",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": null}',
            r"line 2 has null in 'text', not text: remove the record, or wri",
        ),
        (
            "a.jsonl",
            b'{"id": 1, "body": "x"}',
            r"no field 'text': set --text_field to one of its fields \(id, body\)$",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}',
            r"a.jsonl, line 2 is not UTF-8 text: convert the file",
        ),
        (
            "a.txt",
            b"fine\nnot \xff",
            r"a.txt, line 2 is not UTF-8 text: convert the file to UTF-8$",
        ),
        ("a.txt", b"cut \xc3", r"a.txt, line 1 is not UTF-8 text: convert the file to UTF-8$"),
        ("a.txt.gz", b"not gzip", r"cannot read .*a.txt.gz \(.*\): fetch it again$"),
        (
            "a.txt.gz",
            gzip.compress(b"x" * 1000, mtime=0)[:-9],
            r"cannot read .*a.txt.gz \(.*\): fetch it again$",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize("bucket", [False, True])
def test_a_cut_file_of_zstandard_is_one_line(tmp_path, monkeypatch, bucket):
    """In a bucket too: a bucket that cannot be read now would be tried again."""
    monkeypatch.setattr(document_files, "in_bucket", lambda path: bucket)
    lines = "".join(f"line {number}\n" for number in range(9999)).encode()
    whole = zstd(lines[:50_000], lines[50_000:])
    (tmp_path / "a.txt.zst").write_bytes(whole)
    assert "".join(texts(tmp_path / "a.txt.zst")) == lines.decode()
    for size in (len(whole) - 1, len(whole) // 2, 3):
        (tmp_path / "a.txt.zst").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"zst \(Truncated compressed .*\): fetch it again"):
            texts(tmp_path / "a.txt.zst")
    (tmp_path / "a.txt.zst").write_bytes(b"not zstd")
    with pytest.raises(ConfigError, match=r"zst \(ZSTD .*\): fetch it again"):
        texts(tmp_path / "a.txt.zst")


def test_a_text_of_parquet_that_is_not_utf8_is_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([b"fine", b"not \xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet, row 2, is not UTF-8 text: convert the col"):
        texts(tmp_path / "a.parquet")


def test_files_are_found_once_and_sorted(tmp_path):
    for name in ("b/2.jsonl", "a/1.jsonl", "a/3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files = document_files.find(
        [f"{tmp_path}/**/*.jsonl", f"{tmp_path}/a/*", f"{tmp_path}/a/1.jsonl"]
    )
    assert [file.path.removeprefix(f"{tmp_path}/") for file in files] == [
        "a/1.jsonl",
        "a/3.txt",
        "b/2.jsonl",
    ]
    with pytest.raises(ConfigError, match=r"no file matches '.*none': correct the pattern"):
        document_files.find([f"{tmp_path}/none"])
    (tmp_path / "a/4.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"4.bin has no known format: give files of \.txt"):
        document_files.find([f"{tmp_path}/a/*"])


def test_shares_are_uniform():
    shares = sorted(document_files.share_of(str(n)) for n in range(4000))
    # Kolmogorov-Smirnov, p = 0.01.
    assert max(abs(share - n / 4000) for n, share in enumerate(shares)) < 0.025
