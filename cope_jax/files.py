"""Files of text, plain or compressed."""

import gzip
import zlib

from etils import epath

from cope_jax.errors import ConfigError


def read_bytes(path: epath.PathLike) -> bytes:
    """The content of a file, which is unpacked if its name ends in `.gz`.

    Raises:
      ConfigError: there is no such file, or it is damaged.
    """
    file = epath.Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror or error}): give the path of a file") from error
    if file.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is no whole gzip file ({error}): fetch it again") from error


def read_text(path: epath.PathLike) -> str:
    """A UTF-8 file, read as `read_bytes` does, without a mark of byte order.

    Raises:
      ConfigError: there is no such file, it is damaged, or a line is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text; convert the file to UTF-8") from error
