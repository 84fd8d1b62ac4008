import re

import pytest

from cope_jax.corpora import source_code
from cope_jax.corpora.corpus_files import matching
from cope_jax.corpora.raw_text import documents
from cope_jax.errors import ConfigError
from tests.corpora.data import write

FUNCTION = """
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError(width)
    return width * height
"""


def numbered(number):
    return "".join(f"value_{number}_{line} = compute_{number}({line})\n" for line in range(20))


def test_files_below_the_root_by_their_names(tmp_path):
    root = tmp_path / "code"
    for name in (
        "b.py",
        "a/c.py",
        "a/d.txt",
        "tests/e.py",
        "site-packages/f.py",
        "a/__pycache__/g.py",
    ):
        folder = write(tmp_path, f"code/{name}", numbered(name[-4]))
    write(tmp_path, "code/empty.py", " \n")
    assert list(source_code.read(root).files) == ["a/c.py", "b.py"]
    assert list(source_code.read(root, ["**/*.txt", "*.py"]).files) == ["a/d.txt", "b.py"]
    elsewhere = source_code.read("nowhere", [f"{root}/a/**/*.*", f"{root}/**/*.py"])
    assert list(elsewhere.files) == ["a/c.py", "a/d.txt", "code/b.py"]
    assert elsewhere.duplicates == {}  # each is read once, whatever globs match it
    texts = [
        text
        for split in ("train", "validation", "test")
        for text in source_code.read(root).documents(split)
    ]
    assert sorted(texts) == sorted([numbered("c"), numbered("b")])
    with pytest.raises(ConfigError, match="code has no text in its split"):
        [documents("code", folder, split) for split in ("train", "validation", "test")]


def test_splits_depend_on_the_path_alone_and_have_their_shares():
    names = [f"package/module_{number}.py" for number in range(2000)]
    splits = [source_code.split_of(name) for name in names]
    assert [
        splits.count(split) / 2000 for split in ("train", "validation", "test")
    ] == pytest.approx([0.9, 0.05, 0.05], abs=0.015)
    assert [source_code.split_of(name) for name in ("ast.py", "json/tool.py", "tokenize.py")] == [
        "train",
        "validation",
        "train",
    ]


def test_what_is_no_text_is_skipped_and_named(tmp_path):
    write(tmp_path, "good.py", FUNCTION)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "zero.py").write_bytes(b"x = 1\0\n")
    tree = source_code.read(tmp_path)
    assert (list(tree.files), tree.skipped) == (["good.py"], ("latin.py", "zero.py"))


def test_near_duplicates_are_left_out_whichever_split_they_are_of():
    other = numbered(1)
    texts = {
        "a.py": numbered(3) + other,
        "b.py": numbered(3) + other.replace("value_1_3", "renamed"),  # one word of many
        "c.py": other,
        "d.py": FUNCTION,
        "e.py": other.replace(" = ", "="),  # spaces do not count
        "f.py": "\n".join(reversed(FUNCTION.split("\n"))) + numbered(2),
    }
    assert source_code.near_duplicates(texts) == {"b.py": "a.py", "e.py": "c.py"}


@pytest.mark.parametrize(("shared", "similar"), [(60, False), (95, True)])
def test_similarity_is_the_share_of_common_runs(shared, similar):
    common = [f"word{number}" for number in range(shared)]
    first = " ".join([*common, *(f"one{number}" for number in range(100 - shared))])
    second = " ".join([*common, *(f"two{number}" for number in range(100 - shared))])
    assert bool(source_code.near_duplicates({"a": first, "b": second})) == similar


@pytest.mark.parametrize("root", ["nowhere", "."])
def test_nothing_there_is_one_line(root):
    message = rf"^no text in {re.escape(root)} matches \*\.nothing: add files, or give globs with a full path$"
    with pytest.raises(ConfigError, match=message):
        source_code.read(root, ["*.nothing"])


def test_two_files_of_one_name_are_two(tmp_path):
    for folder in ("a/x", "b/x"):
        write(tmp_path, f"{folder}/y.txt", folder)
    files = matching(
        tmp_path, [f"{tmp_path}/a/x/*.txt", f"{tmp_path}/b/x/*.txt", f"{tmp_path}/a/x/y*"]
    )
    assert list(files) == sorted(["x/y.txt", (tmp_path / "b/x/y.txt").as_posix()])


def test_the_standard_library_is_there():
    assert (source_code.standard_library() / "ast.py").is_file()
