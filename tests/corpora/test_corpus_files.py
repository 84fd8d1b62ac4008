import gzip

import pytest
from etils import epath

from cope_jax.corpora import document_files, sms
from cope_jax.corpora.corpus_files import SAMPLES, find, matching, read_lines
from cope_jax.errors import ConfigError
from cope_jax.storage import files
from tests.corpora.data import write


def test_compressed_files_read_as_plain_ones_do(tmp_path):
    plain = write(
        tmp_path / "a", "sms-spam/SMSSpamCollection.tsv", "ham\thi there\nspam\tfree 1 £\n"
    )
    packed = tmp_path / "b" / "sms-spam" / "SMSSpamCollection.tsv.gz"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(gzip.compress((tmp_path / "a/sms-spam/SMSSpamCollection.tsv").read_bytes()))
    assert sms.read(str(tmp_path / "b")) == sms.read(plain)


def test_the_first_name_is_the_best_and_stars_go_in_order(tmp_path):
    folder = write(tmp_path, "c/x.b.txt", "")
    write(tmp_path, "c/x.a.txt", "")
    assert find(folder, "c", ["x.txt", "x.*.txt"]).name == "x.a.txt"
    write(tmp_path, "c/x.txt", "")
    assert find(folder, "c", ["x.txt", "x.*.txt"]).name == "x.txt"


def test_a_missing_file_says_what_to_put_where(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"no sms-spam/SMSSpamCollection.tsv or sms-spam/SMSSpamCollection in .*: put the corpus there",
    ) as error:
        sms.read(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_lines_end_at_newlines_alone(tmp_path):
    path = tmp_path / "x"
    path.write_bytes("\ufeffone\r\ntwo\u2028still two\x85\n\nfour".encode())
    assert read_lines(epath.Path(path)) == ["one", "two\u2028still two\x85", "", "four"]


def test_what_is_not_utf8_is_named_by_its_line(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(ConfigError, match="x, line 3 is not UTF-8"):
        read_lines(epath.Path(path))


def test_a_gzip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_ALWAYS", 1000)
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes(1000)))
    assert files.read_bytes(path) == bytes(1000)
    path.write_bytes(gzip.compress(bytes(10_000)))
    with pytest.raises(
        ConfigError, match=r"x.gz unpacks to over 100 times its size: if it is right, unpack it"
    ):
        files.read_bytes(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "it is nested too deeply"),
        (b"[]", "it must contain a JSON object, not a list"),
        (b'{"a": 1}', "it lacks b, c"),
        (b'{"a": 1.5, "b": [], "c": {}}', "a must be int, not float"),
        (b'{"a": true, "b": [], "c": {}}', "a must be int, not bool"),
        (b'{"a": 1, "b": null, "c": {}}', "b must be list, not NoneType"),
        (b'{"a": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b"", "Expecting value"),
    ],
    ids=["nested", "list", "lacks", "float", "bool", "null", "latin-1", "empty"],
)
def test_a_json_file_of_another_shape_is_one_line(content, reason, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path} is damaged \({reason}.*\): delete it$"):
        files.read_object(path, "delete it", a=int, b=list, c=dict)
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": [2], "c": {}, "d": 3}')
    assert files.read_object(path, a=int, b=list, c=dict) == {"a": 1, "b": [2], "c": {}, "d": 3}


def test_half_a_gzip_file_is_one_clear_line(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"text " * 100)[:-12])
    with pytest.raises(ConfigError, match="not a complete gzip file"):
        read_lines(epath.Path(path))


@pytest.mark.parametrize("pattern", ["", ".", "./", "/"])
def test_what_is_no_glob_is_one_line(tmp_path, pattern):
    with pytest.raises(
        ConfigError,
        match=rf"^'{pattern}' is not a glob \(the pattern names no file\): write one like",
    ) as error:
        matching(tmp_path, ["*.txt", pattern])
    assert "\n" not in str(error.value)


def test_a_path_that_exists_is_not_a_pattern(tmp_path):
    for name in ("lr[1]/a/x.txt", "lr1/a/y.txt", "b[2].txt", "b2.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a\n")
    for wanted, expected in (
        ("lr[1]/*/*.txt", "lr[1]/a/x.txt"),
        ("lr[1]/a/x.txt", "lr[1]/a/x.txt"),
        ("b[2].txt", "b[2].txt"),
        ("l[r]1/*/*.txt", "lr1/a/y.txt"),
    ):
        path = str(tmp_path / expected)
        assert [file.path for file in document_files.find([f"{tmp_path}/{wanted}"])] == [path]
        assert [str(file) for file in matching(tmp_path, [f"{tmp_path}/{wanted}"]).values()] == [
            path
        ]
    assert str(find(str(tmp_path), "lr[1]/a", ["x.txt"])) == str(tmp_path / "lr[1]/a/x.txt")


def test_the_sample_is_small():
    assert sum(path.stat().length for path in SAMPLES.glob("*/*")) < 60_000
