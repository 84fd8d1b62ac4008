"""Archives of what a grid has measured: enough to show it, and to train only what is missing."""

import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from cope_jax.errors import ConfigError, first_line
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.cell import Cell, folder_name
from cope_jax.runs.grid.cell_process import FAILED
from cope_jax.storage.files import replacing
from cope_jax.training.metrics import read_curves

CELL = ("config.json", "environment.json", "metrics.jsonl", "result.json")
"""The files of a finished cell in an archive."""
TRIAL = ("config.json", "result.json")
"""Those of a trial, of which only the loss counts."""
DIVERGED = ("config.json", FAILED)
"""Those of a trial whose loss was not finite, which is a result too."""

DAMAGE = (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError)
"""The errors of a damaged archive, from the form of its files down to its compression."""


def pack(
    workdir: Path, cells: Iterable[Cell], path: Path, name: str, trials: Iterable[Cell] = ()
) -> Path:
    """Writes an archive of a folder `name` with what finished `cells`, and `trials` that have ended,
    have recorded: of metrics.jsonl the evaluations, and nothing of who recorded it. The same records
    give the same bytes.
    """
    files = [cell.folder(workdir) / file for cell in cells for file in CELL]
    for folder in (trial.folder(workdir) for trial in trials):
        ended = TRIAL if (folder / "result.json").exists() else DIVERGED
        files += [folder / file for file in ended]
    with replacing(path) as partial, tarfile.open(partial, "w:xz") as archive:
        for file in sorted(files):
            data = _content(file)
            member = tarfile.TarInfo(Path(name, file.relative_to(workdir)).as_posix())
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def _content(file: Path) -> bytes:
    if file.name == "metrics.jsonl":
        return "".join(f"{json.dumps(row)}\n" for row in read_curves(file)).encode()
    if file.name == FAILED:  # without the path of its log
        known = workdirs.read_json(file, line=str, status=int)
        return f"{json.dumps({name: known[name] for name in ('line', 'status')})}\n".encode()
    return file.read_bytes()


def unpack(path: Path, folder: Path, labels: Iterable[str] | None = None) -> None:
    """Unpacks an archive into a folder, as `tar -xJf PATH -C FOLDER` does; of cells only those with
    the given labels, if not None.

    Raises:
      ConfigError: the file is missing or damaged, or would write outside of the folder.
    """
    names = None if labels is None else {folder_name(label) for label in labels}

    def accepted(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
        *_, label, _, _ = ("", "", *Path(member.name).parts)
        return tarfile.data_filter(member, folder) if names is None or label in names else None

    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter=accepted)
    except DAMAGE as error:
        raise ConfigError(f"{path} is no archive of records: {first_line(error)}") from error
