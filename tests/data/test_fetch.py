"""Corpora from a local server: a zip of the built-in sample, whole, cut off, damaged and absent."""

import hashlib
import io
import socket
import time
import zipfile
from concurrent import futures

import numpy as np
import pytest

from cope_jax import tasks
from cope_jax.corpora.corpus_files import SAMPLES
from cope_jax.corpora.raw_text import documents
from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.data import fetch
from cope_jax.data.fetch import SOURCES, Source, download
from cope_jax.errors import ConfigError
from tests.corpora.data import write
from tests.data.serving import nowhere, serving

FILES = SOURCES["wikitext-2"].files


def sample(name: str) -> bytes:
    return (SAMPLES / name).read_bytes()


def zipped(names, method=zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name in names:
            archive.writestr(name, sample(name))
        archive.writestr("wikitext-2/README", "of no use")
    return file.getvalue()


def source(url: str, content: bytes, files=FILES) -> Source:
    return Source(url, len(content), hashlib.sha256(content).hexdigest(), files)


def files_in(folder) -> set[str]:
    """The files, and the folders that are hidden."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() or path.name[0] == "."
    }


@pytest.fixture(scope="module")
def archive():
    return zipped(FILES)


@pytest.fixture
def server(archive):
    with serving(
        {"wikitext-2-v1.zip": archive, "input.txt": sample("tinyshakespeare/input.txt")}
    ) as server:
        yield server


@pytest.fixture
def wikitext(server, archive):
    return source(f"{server.url}/wikitext-2-v1.zip", archive)


def test_the_task_reads_what_was_downloaded(server, wikitext, tmp_path):
    assert download(wikitext, tmp_path / "new" / "data") == list(FILES)
    assert files_in(tmp_path / "new" / "data") == set(FILES)
    folders = (str(tmp_path / "new" / "data"), None)
    downloaded, built_in = (
        tasks.create("text", corpus="wikitext-2", tokenizer="words", length=32, data_dir=folder)
        for folder in folders
    )
    for split in SPLITS:
        assert downloaded.counts(split) == built_in.counts(split)
        assert (
            downloaded.take(split, np.arange(2))["inputs"].tolist()
            == built_in.take(split, np.arange(2))["inputs"].tolist()
        )


def test_a_corpus_may_be_one_file(server, tmp_path):
    content = sample("tinyshakespeare/input.txt")
    files = SOURCES["tinyshakespeare"].files
    assert download(source(f"{server.url}/input.txt", content, files), tmp_path) == list(files)
    assert files_in(tmp_path) == set(files)
    assert (
        "".join(documents("tinyshakespeare", str(tmp_path), split)[0] for split in SPLITS).encode()
        == content
    )


def test_what_is_there_is_left_alone_and_asks_nobody(server, wikitext, tmp_path):
    write(tmp_path, f"{FILES[1]}.gz", "of the user")
    assert download(wikitext, tmp_path) == [FILES[0], FILES[2]]
    assert (tmp_path / f"{FILES[1]}.gz").read_text() == "of the user" and not (
        tmp_path / FILES[1]
    ).exists()
    assert server.served == ["/wikitext-2-v1.zip"]
    assert download(wikitext, tmp_path) == []
    assert server.served == ["/wikitext-2-v1.zip"]


def test_a_download_that_breaks_off_leaves_nothing_and_can_be_repeated(server, wikitext, tmp_path):
    server.cut = wikitext.size // 2
    with pytest.raises(
        ConfigError, match=rf"^cannot download {wikitext.url} \(.*{server.cut} bytes read"
    ) as error:
        download(wikitext, tmp_path)
    assert "\n" not in str(error.value)
    assert not files_in(tmp_path)
    server.cut = None
    assert download(wikitext, tmp_path) == list(FILES)


def test_downloads_side_by_side_leave_each_other_alone(server, wikitext, tmp_path):
    """One of them hangs while others come and go, and then breaks off."""
    server.cut, server.holds = 100, True
    with futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(download, wikitext, tmp_path)
        while not server.served:
            time.sleep(0.01)
        (unfinished,) = tmp_path.iterdir()
        server.cut, server.holds = None, False
        assert download(wikitext, tmp_path) == list(FILES)
        assert (
            files_in(tmp_path) > set(FILES) and unfinished.exists() and list(unfinished.iterdir())
        )
        server.released.set()
        with pytest.raises(ConfigError, match=r"^cannot download"):
            slow.result()
    assert files_in(tmp_path) == set(FILES)


def test_what_a_killed_process_left_is_removed(wikitext, tmp_path):
    folder = tmp_path / f".partial-{socket.gethostname()}-x"
    folder.mkdir()
    (folder / ".lock").touch()
    assert download(wikitext, tmp_path) == list(FILES)
    assert files_in(tmp_path) == set(FILES)


@pytest.mark.parametrize(
    "damage",
    [lambda body: body[:-1] + b"x", lambda body: body[:-1], lambda body: body + bytes(2**22)],
    ids=["byte", "size", "more"],
)
def test_what_is_not_the_published_file_is_not_kept(server, wikitext, tmp_path, damage):
    server.files["wikitext-2-v1.zip"] = damage(server.files["wikitext-2-v1.zip"])
    message = rf"^{wikitext.url} did not send the expected .* the SHA-256 {wikitext.sha256}: try again, or put wiki"
    with pytest.raises(ConfigError, match=message) as error:
        download(wikitext, tmp_path)
    assert "\n" not in str(error.value)
    assert not files_in(tmp_path)


def test_no_file_is_in_its_place_before_all_are_whole(server, tmp_path):
    end = sample(FILES[2])[-40:]
    damaged = zipped(FILES, zipfile.ZIP_STORED).replace(end, end[::-1])
    server.files["wikitext-2-v1.zip"] = damaged
    with pytest.raises(zipfile.BadZipFile, match=f"Bad CRC-32 for file '{FILES[2]}'"):
        download(source(f"{server.url}/wikitext-2-v1.zip", damaged), tmp_path)
    assert not files_in(tmp_path)


def test_a_server_that_does_not_end_or_is_too_slow_is_left(server, wikitext, tmp_path, monkeypatch):
    written = []

    class Endless:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def raise_for_status(self):
            pass

        def iter_content(self, size):
            while True:
                written.append(size)
                yield bytes(size)

    with monkeypatch.context() as patched:
        patched.setattr(fetch.requests, "get", Endless)
        with pytest.raises(ConfigError, match="did not send the expected"):
            download(wikitext, tmp_path)
    assert sum(written[:-1]) <= wikitext.size
    monkeypatch.setattr(fetch, "_PATIENCE", -1e9)
    with pytest.raises(
        ConfigError, match=r"^cannot download .* \(fewer than 1,000 bytes a second\): try again"
    ):
        download(wikitext, tmp_path)
    assert not files_in(tmp_path)


def test_a_password_is_not_shown_and_a_wrong_address_is_one_line(archive, tmp_path):
    for url in (
        f"http://user:secret@{nowhere().removeprefix('http://')}/x.zip",
        f"http://{'a' * 70}.com/x.zip",
    ):
        with pytest.raises(ConfigError, match=r"^cannot download http") as error:
            download(source(url, archive), tmp_path)
        assert "secret" not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("absent", ["server", "file"])
def test_what_cannot_be_reached_is_one_line_that_says_what_to_do(server, archive, tmp_path, absent):
    url = f"{server.url if absent == 'file' else nowhere()}/wikitext-2.zip"
    with pytest.raises(ConfigError, match=f"^cannot download {url} ") as error:
        download(source(url, archive), tmp_path)
    assert {"server": "Connection refused", "file": "404"}[absent] in str(error.value)
    assert str(error.value).endswith(
        f": try again, or put {', '.join(FILES)} into {tmp_path} by hand"
    )
    assert not files_in(tmp_path)


@pytest.mark.parametrize("corpus", SOURCES)
def test_readers_find_the_files_and_name_the_command(corpus, tmp_path):
    command = f"`cope-jax download --corpora={corpus} --out={tmp_path}` downloads it"
    with pytest.raises(
        ConfigError, match=rf"put the corpus there \(plain or .gz; {command}\), name"
    ) as error:
        documents(corpus, str(tmp_path), "train")
    assert "\n" not in str(error.value)
    for name in SOURCES[corpus].files:
        write(tmp_path, name, f"{name} {' '.join(map(str, range(100)))}")
    texts = ["".join(documents(corpus, str(tmp_path), split)) for split in SPLITS]
    assert len(set(texts)) == 3
