"""One function decides which names stay in a folder; no path is a pattern; no pipe blocks."""

import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_jax.corpora import document_files
from cope_jax.errors import ConfigError
from cope_jax.exchange import elmo_files
from cope_jax.runs.grid.cell import folder_name
from cope_jax.storage import files

PIECES = st.sampled_from(
    [
        *(
            "..",
            ".",
            "",
            "/",
            "//",
            "a",
            "b.json",
            "link",
            "dangling",
            "round",
            "..a",
            "a..",
            "~",
            " ",
            "-",
            "*",
            "\n",
        ),
        *(
            "\\",
            "C:",
            "s3:",
            "\0",
            "\udc80",
            "/etc/passwd",
            "%2e%2e",
            "．．",
            "\u2024\u2024",
            "n" * 256,
            "é" * 128,
        ),
    ]
)
NAMES = st.lists(PIECES | st.text(max_size=3), max_size=5).flatmap(
    lambda s: st.sampled_from(["/".join(s), "".join(s)])
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with links that lead out of it, to a missing file, to itself, and within it."""
    root = tmp_path_factory.mktemp("tree")
    folder = root / "folder"
    (folder / "a").mkdir(parents=True)
    (root / "outside").mkdir()
    for name, target in {
        "link": root / "outside",
        "dangling": root / "new",
        "round": "round",
        "within": "a",
    }.items():
        (folder / name).symlink_to(target)
    return folder


def outside(tree):
    return [*os.listdir(tree.parent), *os.listdir(tree.parent / "outside")]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(NAMES)
def test_nothing_is_written_or_read_outside(tree, name):
    before = outside(tree)
    try:
        path = files.inside(tree, name)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert path.relative_to(tree).as_posix() == name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    except OSError:  # a name in the way of another, or a link to itself
        return
    assert Path(os.path.realpath(path)).is_relative_to(tree)
    assert before == outside(tree)


@given(st.lists(PIECES, max_size=4).map("/".join) | st.text(max_size=9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_names_one_folder_or_none(text):
    name = folder_name(text)
    assert not name or files.inside(Path("grid"), name, links=True) == Path("grid") / name


@pytest.mark.parametrize("name", [None, 3, ["a"], {"a": 1}, b"a"])
def test_a_name_is_text(name):
    with pytest.raises(ConfigError, match="cannot name a file in run: rename it"):
        files.inside(Path("run"), name)


def test_links_may_lead_out_only_where_it_is_said(tree):
    assert files.inside(tree, "within/x") == tree / "within/x"
    for name in ("link/x", "dangling"):
        with pytest.raises(ConfigError, match="cannot name a file"):
            files.inside(tree, name)
        assert files.inside(tree, name, links=True) == tree / name
    with pytest.raises(ConfigError, match="cannot name a file"):
        files.inside(tree, "link/../../x", links=True)
    assert files.inside(epath.Path("gs://bucket/shards"), "a/b", links=True) == epath.Path(
        "gs://bucket/shards/a/b"
    )


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "a?b", "**", "[!x]", "a\\b", "~", "plain"])
def test_the_path_of_a_folder_is_not_a_pattern(name, tmp_path):
    for other in ("lr1", "axb", "plain2", "y"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "1.json").touch()
    folder = tmp_path / name
    folder.mkdir()
    (folder / "2.json").touch()
    assert files.glob_in(folder, "*.json") == [epath.Path(folder / "2.json")]
    assert files.glob_in(folder / "none", "*") == []


def test_a_folder_is_exposed_if_another_user_could_change_it(tmp_path, monkeypatch):
    monkeypatch.setattr("grp.getgrgid", lambda number: SimpleNamespace(gr_name="staff", gr_mem=[]))
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    paths = [folder, folder / "file", tmp_path / "link", tmp_path / "link/file"]
    assert [files.exposed(path) for path in paths] == [""] * 4
    for mode in (0o720, 0o702, 0o777):
        (tmp_path / "a").chmod(mode)
        assert {files.exposed(path) for path in paths} == {
            f"other users may write to {tmp_path / 'a'}"
        }
    (tmp_path / "a").chmod(0o777 | stat.S_ISVTX)
    assert [files.exposed(path) for path in paths] == [""] * 4
    folder.chmod(0o777 | stat.S_ISVTX)
    assert (
        files.exposed(folder)
        == files.exposed(tmp_path / "link")
        == f"other users may write to {folder}"
    )
    folder.chmod(0o700)
    (folder / "file").chmod(0o622)
    assert (
        files.exposed(tmp_path / "link/file")
        == f"other users may write to {tmp_path / 'link/file'}"
    )
    assert files.exposed(folder / "none").endswith("No such file or directory")
    (tmp_path / "round").symlink_to("round")
    assert files.exposed(tmp_path / "round").endswith("Too many levels of symbolic links")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert files.exposed(folder) == f"{folder} belongs to another user"


def test_the_group_of_this_user_alone_may_write(tmp_path, monkeypatch):
    user = SimpleNamespace(pw_name="ada", pw_gid=os.getgid())
    group = SimpleNamespace(gr_name="ada", gr_mem=["ada"])
    monkeypatch.setattr("pwd.getpwuid", lambda number: user)
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    tmp_path.chmod(0o770)
    assert files.exposed(tmp_path) == ""
    tmp_path.chmod(0o772)
    assert files.exposed(tmp_path) == f"other users may write to {tmp_path}"
    tmp_path.chmod(0o770)
    for name, value in (
        ("gr_mem", ["ada", "bob"]),
        ("gr_name", "staff"),
        ("pw_gid", os.getgid() + 1),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(user if name == "pw_gid" else group, name, value)
            assert files.exposed(tmp_path) == f"other users may write to {tmp_path}", name


def test_a_pipe_without_a_writer_is_empty_and_one_with_a_writer_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    contents = []
    reading = threading.Thread(
        target=lambda: contents.append(files.read_bytes(tmp_path / "pipe")), daemon=True
    )
    reading.start()
    reading.join(5)
    assert contents == [b""]
    read, write = os.pipe()  # as in a shell's <(...)
    os.write(write, b"text")
    os.close(write)
    assert files.read_bytes(f"/dev/fd/{read}") == b"text"
    os.close(read)


def test_each_writer_of_a_file_has_a_path_of_its_own(tmp_path):
    (tmp_path / "a.json.link.partial").symlink_to(tmp_path / "victim")
    (tmp_path / "a.json.killed.partial").touch()
    with files.replacing(tmp_path / "a.json") as first:
        first.write_text("1")
        files.write_atomically(tmp_path / "a.json", "2")  # of another process
        # So that it is not copied to a bucket.
        assert first.read_text() == "1" and first.suffix == ".partial"
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "a.json") as failed:
        failed.write_text("3")
        raise KeyboardInterrupt
    assert (tmp_path / "a.json").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.json.link.partial"]


def test_pipes_are_no_files_of_weights_or_documents(tmp_path):
    os.mkfifo(tmp_path / "weights.hdf5")
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="cannot read the weights"):
        elmo_files._open(tmp_path / "weights.hdf5")
    with pytest.raises(ConfigError, match="no file matches"):
        document_files.find([f"{tmp_path}/*.jsonl"])
