"""Keeps in the folder of an export what it is, and a report of each finished chunk of documents."""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from cope_jax.corpora.shards import MANIFEST
from cope_jax.data.shard_writer import write_file
from cope_jax.errors import ConfigError, first_line
from cope_jax.files import PARTIAL, glob_in, inside, parse_json, read_text
from cope_jax.tokenizers.byte_level import BPE
from cope_jax.tokenizers.word_level import Words

_IDENTITY = "export.json"


def claim(out: epath.Path, identity: Mapping[str, Any]) -> None:
    """Writes what the export is, or compares it with what an earlier call wrote.

    Raises:
      ConfigError: the folder contains another export with shards, or other files.
    """
    file = out / _IDENTITY
    if not file.exists():
        others = (path.name for path in glob_in(out, "*"))  # a bucket has no empty folder
        if any(name != _IDENTITY and not name.startswith(PARTIAL) for name in others):
            raise ConfigError(f"{out} contains other files: choose an empty folder")
        write_file(file, json.dumps(identity, indent=1) + "\n")
        return
    try:
        held = dict(parse_json(read_text(file)))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({first_line(error)}): choose an empty folder") from error
    if other := next((name for name in identity if held.get(name) != identity[name]), None):
        if glob_in(out / "parts", "*.json"):
            differs = _difference(other, held.get(other), identity[other])
            raise ConfigError(f"{out} contains an export with {differs}: delete the folder, or choose another")
        for name in (BPE.file, Words.file):  # learned for the earlier call, which has written no shard
            (out / name).unlink(missing_ok=True)
        write_file(file, json.dumps(identity, indent=1) + "\n")


def _difference(name: str, held: Any, given: Any) -> str:
    """Names the first entry in which two settings differ."""
    if isinstance(held, dict) and isinstance(given, dict):
        name = next(entry for entry in {**held, **given} if held.get(entry) != given.get(entry))
        held, given = held.get(name), given.get(name)
    return f"another {name} ({held}, not {given})"


def forget_missing(out: epath.Path, units: int) -> None:
    """Removes the reports of chunks whose shards are missing or too short, and of those after them in their unit."""
    for unit in range(units):
        reports = reports_of(out, unit)
        whole = [all(_is_whole(out, shard) for shard in report["shards"]) for report in reports]
        for chunk in range(whole.index(False) if False in whole else len(whole), len(whole)):
            (out / MANIFEST).unlink(missing_ok=True)
            report_file(out, unit, chunk).unlink(missing_ok=True)  # another host may do the same


def _is_whole(out: epath.Path, shard: Mapping[str, Any]) -> bool:
    path = inside(out, shard["file"], links=True)
    return path.exists() and path.stat().length == shard["size"]


def discard(out: epath.Path, identity: Mapping[str, Any], is_new: bool) -> None:
    """Removes all that was written for an export, unless the folder belongs to another one by now."""
    try:
        check_claim(out, identity)
    except ValueError:
        return
    for report in glob_in(out / "parts", "*.json"):
        for shard in parse_json(read_text(report))["shards"]:
            inside(out, shard["file"], links=True).unlink(missing_ok=True)
        report.unlink(missing_ok=True)
    for name in (BPE.file, Words.file, _IDENTITY):
        (out / name).unlink(missing_ok=True)
    for folder in (out / "parts", *([out] if is_new else [])):
        with contextlib.suppress(OSError):  # other files are there, or it is a bucket, which has no folders
            folder.rmdir()


def check_claim(out: epath.Path, identity: Mapping[str, Any]) -> None:
    """Raises ConfigError if another host has begun another export in the folder."""
    if parse_json(read_text(out / _IDENTITY)) != identity:
        raise ConfigError(
            f"{out} contains another export by now: choose another folder, and the same flags on all hosts"
        )


def all_reports(out: epath.Path, unit: int) -> list[dict[str, Any]] | None:
    """The reports of the chunks of a unit, or None if the unit has not ended."""
    found = reports_of(out, unit)
    return found if found and found[-1]["last"] else None


def reports_of(out: epath.Path, unit: int) -> list[dict[str, Any]]:
    """The reports of all chunks of a unit that have ended."""
    found: list[dict[str, Any]] = []
    while (file := report_file(out, unit, len(found))).exists():
        try:
            found.append(dict(parse_json(read_text(file))))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged ({first_line(error)}): delete it and rerun the command") from error
    return found


def report_file(out: epath.Path, unit: int, chunk: int) -> epath.Path:
    """The file of the report of a chunk, which is written last."""
    return out / "parts" / f"{unit:05}-{chunk:05}.json"
