"""Objects in a bucket of Google Cloud Storage (`gs://`) or S3 (`s3://`)."""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

from cope_jax.errors import ConfigError, StorageError, first_line, without_stderr

_DRIVERS = {"gs": "gcs", "s3": "s3"}
# Errors of reading a damaged array.
_DAMAGED = "DATA_LOSS|FAILED_PRECONDITION|NOT_FOUND: Error opening"
_RETRIES = {"max_retries": 5, "initial_delay": "0.5s", "max_delay": "4s"}


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The objects whose names begin with a path, such as `gs://bucket/runs/cope`.

    The credentials are those of the machine: Google's application default credentials, or the usual
    variables, files and roles of AWS. `AWS_ENDPOINT_URL` names another server with the interface of
    S3.

    Raises:
      ConfigError: the URL is not valid, or there is no such bucket.
      StorageError: the server cannot be reached, or refuses a request. All methods raise these
        errors.
    """

    url: str

    def __post_init__(self):
        scheme, _, path = self.url.partition("://")
        if scheme not in _DRIVERS or not {"", ".", ".."}.isdisjoint(
            path.removesuffix("/").split("/")
        ):
            raise ConfigError(
                f"{self.url} is no path in a bucket: write one like gs://BUCKET/runs/NAME or s3://…"
            )

    @property
    def _path(self) -> str:
        """The path of the folder in its bucket, with a slash at the end."""
        path = self.url.partition("://")[2].strip("/").partition("/")[2]
        return f"{path}/" if path else ""

    @property
    def _objects(self) -> Any:
        """All objects of the bucket."""
        scheme, _, path = self.url.partition("://")
        with self.clear_errors():
            return _opened(_DRIVERS[scheme], path.strip("/").partition("/")[0])

    def above(self, levels: int) -> "Bucket":
        """The objects of a folder above this one."""
        return Bucket(self.url.rsplit("/", levels)[0])

    def read(self, name: str) -> tuple[bytes | None, bytes]:
        """(content, generation for `write`) of an object; the content of a missing one is None."""
        with self.clear_errors():
            result = self._objects.read(self._path + name).result()
        return (result.value if result.state == "value" else None), result.stamp.generation

    def write(self, name: str, data: bytes | None, expected: bytes | None = None) -> bytes | None:
        """Writes an object whole, or removes it if `data` is None.

        With `expected`, writes only if the object still has this generation. Returns the new
        generation, or None if nothing was written.
        """
        options = {} if expected is None else {"if_equal": expected}
        with self.clear_errors():
            result = self._objects.write(self._path + name, data, **options).result()
            written = result.generation or None
        if written is None and data is not None:
            # It may be written, and only the server's answer was lost.
            content, generation = self.read(name)
            written = generation if content == data else None
        return written

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with `prefix`, sorted."""
        import tensorstore

        with self.clear_errors():
            first = self._path + prefix
            span = tensorstore.KvStore.KeyRange(first, _after(first))
            names = (name.decode() for name in self._objects.list(span).result())
            return sorted(name.removeprefix(self._path) for name in names)

    def remove(self, prefix: str) -> None:
        """Removes all objects that begin with `prefix`."""
        import tensorstore

        with self.clear_errors():
            first = self._path + prefix
            self._objects.delete_range(tensorstore.KvStore.KeyRange(first, _after(first))).result()

    def array(self, name: str, **options: Any) -> Any:
        """Starts to open the Zarr array below `name`: a future, see `tensorstore.open`.

        Use the future, and what is read or written, inside `clear_errors`.
        """
        import tensorstore

        store = self._objects / f"{self._path}{name}/"
        return tensorstore.open({"driver": "zarr3"}, kvstore=store, **options)

    @contextlib.contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Turns errors of TensorStore into those of this class, except ValueError: damage."""
        try:
            yield
        except (ConfigError, StorageError):
            raise
        except (ValueError, RuntimeError, OSError) as error:
            reason = first_line(error).partition(" [")[0]
            if re.match(_DAMAGED, reason):
                raise
            if "NoSuchBucket" in str(error) or reason.startswith("NOT_FOUND"):
                raise ConfigError(
                    f"{self.url}: there is no such bucket ({reason}): create it"
                ) from error
            raise StorageError(
                f"{self.url} cannot be used now ({reason}): what is stored is intact; check the network and the "
                "credentials, and rerun the command"
            ) from error


@functools.lru_cache
def _opened(driver: str, bucket: str) -> Any:
    import tensorstore

    spec = {"driver": driver, "bucket": bucket}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if driver == "s3" and endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region}
    context = tensorstore.Context({"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES})
    with without_stderr():  # the library for S3 prints which files with credentials do not exist
        opened = tensorstore.KvStore.open(spec, context=context).result()
        opened.read("?").result()
    return opened


def _after(prefix: str) -> str:
    """The first name after all names that begin with `prefix`, or "" for no limit."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
