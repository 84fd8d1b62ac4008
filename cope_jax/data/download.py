"""Published corpora from the network, to where the readers in `cope_jax.corpora` look for them."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Iterator

import requests
import tensorflow_datasets as tfds

from cope_jax.errors import ConfigError

_SECONDS = 30
"""How long a server may take to answer at all."""

_WORK = ".download-"
"""What names of folders begin with in which downloads are at work."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a corpus is to be had, and how it is known.

    Attributes:
      url: of a zip archive, or of the only file.
      size: its bytes.
      sha256: its digest.
      files: what is wanted of it, by paths below the data directory, which are those in the archive.
    """

    url: str
    size: int
    sha256: str
    files: tuple[str, ...]

    def at(self, mirror: str) -> "Source":
        """The same from another place.

        >>> SOURCES["wikitext-2"].at("http://localhost:8000/").url
        'http://localhost:8000/wikitext-2-v1.zip'
        """
        return dataclasses.replace(self, url=f"{mirror.rstrip('/')}/{self.url.rpartition('/')[2]}")


def _wikitext(name: str, kind: str, size: int, sha256: str) -> Source:
    files = tuple(f"{name}/wiki.{split}.{kind}" for split in ("train", "valid", "test"))
    return Source(f"https://wikitext.smerity.com/{name}-v1.zip", size, sha256, files)


# Sizes and digests are those that Hugging Face's `datasets` has for WikiText, and TFDS for tiny shakespeare.
SOURCES = {
    "wikitext-2": _wikitext(
        "wikitext-2",
        "tokens",
        size=4_475_746,
        sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    "wikitext-2-raw": _wikitext(
        "wikitext-2-raw",
        "raw",
        size=4_721_645,
        sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext-103": _wikitext(
        "wikitext-103",
        "tokens",
        size=190_229_076,
        sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    "wikitext-103-raw": _wikitext(
        "wikitext-103-raw",
        "raw",
        size=191_984_949,
        sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
    "tinyshakespeare": Source(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        size=1_115_394,
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        files=("tinyshakespeare/input.txt",),
    ),
}
"""Corpora by the names that `cope_jax.corpora.raw_text` has for them."""


def missing(source: Source, data_dir: str | os.PathLike[str]) -> list[str]:
    """Which files of a source a data directory does not have, plain or with `.gz`.

    >>> missing(SOURCES["tinyshakespeare"], "nowhere")
    ['tinyshakespeare/input.txt']
    """
    root = pathlib.Path(data_dir)
    return [name for name in source.files if not any((root / f"{name}{end}").exists() for end in ("", ".gz"))]


def download(source: Source, data_dir: str | os.PathLike[str]) -> list[str]:
    """Downloads a corpus with TFDS's download manager, checks it and puts its missing files into a data directory.

    Every file appears there whole or not at all; until then all is in a folder `.download-…` of this call's own, which
    is removed at the end; one that a killed process has left, by the next call. What is there already is left as it is.

    Returns:
      The files that were missing and are there now, by their paths below `data_dir`.

    Raises:
      ConfigError: the source cannot be reached, breaks off, or sends something else.
      OSError: `data_dir` cannot be written to.
    """
    names = missing(source, data_dir)
    if not names:
        return []
    root = pathlib.Path(data_dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    with _workplace(root) as work:
        archive = _fetch(source, work, by_hand=f"put {', '.join(names)} into {data_dir} by hand")
        whole = _unzip(archive, names, work) if source.url.endswith(".zip") else [archive]
        for name, path in zip(names, whole, strict=True):
            (root / name).parent.mkdir(exist_ok=True)
            path.replace(root / name)
    return names


@contextlib.contextmanager
def _workplace(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder in `root` that is removed at the end; those whose processes are gone are removed now."""
    with contextlib.ExitStack() as stack:
        with _lock(root, wait=True):  # between a folder's birth and its own lock nobody is to take it for a dead one
            for other in root.glob(f"{_WORK}*"):
                with contextlib.suppress(FileNotFoundError), _lock(other) as free:
                    if free:
                        shutil.rmtree(other, ignore_errors=True)
            work = pathlib.Path(tempfile.mkdtemp(prefix=_WORK, dir=root))
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            stack.enter_context(_lock(work))
        yield work


@contextlib.contextmanager
def _lock(folder: pathlib.Path, *, wait: bool = False) -> Iterator[bool]:
    """Locks a folder until the end, or that of the process; False: another has it, or the file system has no locks."""
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(place)


def _fetch(source: Source, folder: pathlib.Path, by_hand: str) -> pathlib.Path:
    """What is at the URL, of the right size and digest."""
    known = tfds.download.checksums.UrlInfo(tfds.core.utils.Size(source.size), source.sha256, None)
    manager = tfds.download.DownloadManager(download_dir=folder, url_infos={source.url: known})
    try:
        # The manager tries for minutes to reach what cannot be reached.
        requests.head(source.url, timeout=_SECONDS)
        return pathlib.Path(manager.download(source.url))
    except tfds.download.download_manager.NonMatchingChecksumError as error:
        raise ConfigError(
            f"{source.url} has not sent what it should, {source.size:,} bytes with the SHA-256 {source.sha256}: "
            f"try again, or {by_hand}"
        ) from error
    except (requests.RequestException, tfds.download.DownloadError) as error:
        raise ConfigError(f"cannot download {source.url} ({_reason(error)}): try again, or {by_hand}") from error


def _unzip(archive: pathlib.Path, names: list[str], folder: pathlib.Path) -> list[pathlib.Path]:
    found = [folder / str(number) for number in range(len(names))]
    with zipfile.ZipFile(archive) as members:
        for name, path in zip(names, found, strict=True):
            with members.open(name) as packed, path.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    return found


def _reason(error: BaseException) -> str:
    """The first error of those that led to this one, in which libraries for the network wrap it."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(str(error).split())
