"""Downloads published corpora to where the readers in `cope_jax.corpora` look for them."""

import dataclasses
import hashlib
import os
import pathlib
import re
import time
import zipfile

import requests

from cope_jax.errors import ConfigError
from cope_jax.progress import Progress
from cope_jax.storage.locks import unfinished

_SECONDS = 30  # how long to wait for a server to answer, or to send more
# A download takes at most these seconds, and one for each of these bytes.
_PATIENCE, _SLOWEST = 60, 1000


@dataclasses.dataclass(frozen=True)
class Source:
    """The download URL of a corpus, with size and checksum.

    Attributes:
      url: URL of a zip archive, or of the only file.
      size: size of this archive or file in bytes.
      sha256: SHA-256 digest of this archive or file.
      files: paths of the files to keep, relative to the data directory; the same paths are in the
        archive.
    """

    url: str
    size: int
    sha256: str
    files: tuple[str, ...]

    def at(self, mirror: str) -> "Source":
        """Returns the source of the same corpus on a mirror, with the files directly under the URL.

        >>> SOURCES["wikitext-2"].at("http://localhost:8000/").url
        'http://localhost:8000/wikitext-2-v1.zip'
        """
        return dataclasses.replace(self, url=f"{mirror.rstrip('/')}/{self.url.rpartition('/')[2]}")


def _wikitext(name: str, size: int, sha256: str) -> Source:
    kind = "raw" if name.endswith("-raw") else "tokens"
    files = tuple(f"{name}/wiki.{split}.{kind}" for split in ("train", "valid", "test"))
    return Source(f"https://wikitext.smerity.com/{name}-v1.zip", size, sha256, files)


# Sizes and digests come from Hugging Face's `datasets` for WikiText, and from TFDS for tiny
# shakespeare.
_WIKITEXT = {
    "wikitext-2": (4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "wikitext-2-raw": (
        4_721_645,
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    "wikitext-103": (
        190_229_076,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    "wikitext-103-raw": (
        191_984_949,
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
}
SOURCES = {
    **{name: _wikitext(name, size, sha256) for name, (size, sha256) in _WIKITEXT.items()},
    "tinyshakespeare": Source(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        size=1_115_394,
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        files=("tinyshakespeare/input.txt",),
    ),
}
"""The source of each corpus, by its name in `cope_jax.corpora.raw_text`."""


def missing(source: Source, data_dir: str | os.PathLike[str]) -> list[str]:
    """Returns the files of a source that a data directory lacks, plain and with `.gz`.

    >>> missing(SOURCES["tinyshakespeare"], "nowhere")
    ['tinyshakespeare/input.txt']
    """
    root = pathlib.Path(data_dir)
    paths = {name: (root / name, root / f"{name}.gz") for name in source.files}
    return [name for name, both in paths.items() if not any(path.exists() for path in both)]


def download(source: Source, data_dir: str | os.PathLike[str]) -> list[str]:
    """Downloads the files of a corpus that a data directory lacks; returns their paths.

    The paths are relative to `data_dir`. The download is checked by size and digest. `data_dir`
    never has an incomplete file: until a file is complete, it is in a temporary folder, which this
    call removes at the end. If the process is killed, the next call removes this folder. Files that
    `data_dir` already has stay unchanged.

    Raises:
      ConfigError: the server cannot be reached, the download breaks off, or its size or digest is
        wrong.
      OSError: `data_dir` cannot be written to.
    """
    names = missing(source, data_dir)
    if not names:
        return []
    root = pathlib.Path(data_dir).absolute()
    with unfinished(root) as folder:
        archive = folder / "archive"
        _fetch(source, archive, by_hand=f"put {', '.join(names)} into {data_dir} by hand")
        whole = [archive]
        if source.url.endswith(".zip"):
            with zipfile.ZipFile(archive) as members:
                whole = [pathlib.Path(members.extract(name, folder)) for name in names]
        for name, path in zip(names, whole, strict=True):
            (root / name).parent.mkdir(exist_ok=True)
            path.replace(root / name)
    return names


def _fetch(source: Source, path: pathlib.Path, by_hand: str) -> None:
    """Downloads the URL to `path` and checks the size and the digest."""
    digest, received, began = hashlib.sha256(), 0, time.monotonic()
    shown = re.sub(r"//[^/@]*@", "//", source.url)  # without a password
    try:
        with (
            requests.get(source.url, stream=True, timeout=_SECONDS) as answer,
            path.open("wb") as file,
        ):
            answer.raise_for_status()
            with Progress(source.size, "byte") as progress:
                for chunk in answer.iter_content(2**16):
                    file.write(chunk)
                    digest.update(chunk)
                    progress.advance(len(chunk))
                    received += len(chunk)
                    if received > source.size:
                        break
                    if time.monotonic() - began > _PATIENCE + received / _SLOWEST:
                        raise requests.Timeout(f"fewer than {_SLOWEST:,} bytes a second")
    except (requests.RequestException, ValueError) as error:  # ValueError: the address is not valid
        raise ConfigError(
            f"cannot download {shown} ({_reason(error)}): try again, or {by_hand}"
        ) from error
    if (received, digest.hexdigest()) != (source.size, source.sha256):
        raise ConfigError(
            f"{shown} did not send the expected {source.size:,} bytes with the SHA-256 {source.sha256}: "
            f"try again, or {by_hand}"
        )


def _reason(error: BaseException) -> str:
    """Returns the text of the original error, which network libraries wrap in other errors."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(str(error).split())
