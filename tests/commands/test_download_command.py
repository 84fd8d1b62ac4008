"""The command that downloads corpora, from a server on this machine."""

import signal
import time

from cope_jax.data.fetch import SOURCES
from cope_jax.storage.files import read_text
from tests.corpora.data import real, write
from tests.data.serving import nowhere, serving


def test_what_is_there_is_said_without_a_network(start, tmp_path):
    for corpus in ("wikitext-2", "tinyshakespeare"):
        for name in SOURCES[corpus].files:
            write(tmp_path, name, "a")
    done = start("download", "--corpora=wikitext-2,tinyshakespeare", f"--out={tmp_path}").wait()
    lines = [
        f"{corpus}: already present, in {tmp_path}\n"
        for corpus in ("wikitext-2", "tinyshakespeare")
    ]
    assert (done.status, done.out) == (0, "".join(lines)), done.err


def test_mistakes_are_one_line(start, tmp_path):
    write(tmp_path, "file", "")
    with serving({"wikitext-2-v1.zip": b"another"}) as server:
        for corpora, mirror, folder, message in (
            (
                "wikitext-2,wikitext-13",
                nowhere(),
                "data",
                "unknown corpus to download 'wikitext-13': did you mean 'wik",
            ),
            (
                "ud-ewt",
                nowhere(),
                "data",
                "choose from tinyshakespeare, wikitext-2, wikitext-2-raw, wikitext-103, wiki",
            ),
            ("", nowhere(), "data", "--corpora is empty, as with an unset variable"),
            ("wikitext-103", nowhere(), "data", "/wikitext-103-v1.zip ([Errno "),
            (
                "wikitext-2",
                server.url,
                "data",
                "/wikitext-2-v1.zip did not send the expected 4,475,746 bytes with",
            ),
            ("wikitext-2", server.url, "file", f"cannot write to {tmp_path / 'file'} ("),
        ):
            flags = (f"--corpora={corpora}", f"--mirror={mirror}", f"--out={tmp_path / folder}")
            done = start("download", *flags).wait()
            assert (done.status, message in done.error, done.out) == (2, True, ""), done.err
    assert not list((tmp_path / "data").iterdir())


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(start, tmp_path):
    with serving({"input.txt": bytes(SOURCES["tinyshakespeare"].size)}) as server:
        server.cut, server.holds = 1000, True
        command = start(
            "download", "--corpora=tinyshakespeare", f"--mirror={server.url}", f"--out={tmp_path}"
        )
        command.signal_when(lambda: [*tmp_path.glob(".partial-*/archive")], signal.SIGINT)
        began = time.monotonic()
        done = command.wait(60)
        assert time.monotonic() - began < 20
    assert (done.status, done.out) == (130, ""), done.err
    assert done.err.startswith("interrupted; rerun the same command") and done.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_after_a_kill_the_same_command_brings_the_published_text(start, tmp_path):
    content = read_text(
        f"{real('tinyshakespeare/input.txt.gz')}/tinyshakespeare/input.txt.gz"
    ).encode()
    with serving({"input.txt": content}) as server:
        flags = ("--corpora=tinyshakespeare", f"--mirror={server.url}", f"--out={tmp_path}")
        server.cut, server.holds = len(content) // 2, True
        command = start("download", *flags)
        command.signal_when(lambda: server.served, signal.SIGKILL)
        assert command.wait(60).status == -signal.SIGKILL
        assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == [".partial"]
        server.cut, server.holds = None, False
        done = start("download", *flags).wait()
    expected = f"tinyshakespeare: wrote tinyshakespeare/input.txt, in {tmp_path}\n"
    assert (done.status, done.out, done.err) == (0, expected, "")
    assert [path.name for path in tmp_path.iterdir()] == ["tinyshakespeare"]
    assert (tmp_path / "tinyshakespeare" / "input.txt").read_bytes() == content
