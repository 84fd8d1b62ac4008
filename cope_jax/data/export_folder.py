"""Keeps in the folder of an export what it is, and a report of each finished chunk of documents."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from cope_jax.corpora.sentences_by_corpus import SPLITS
from cope_jax.corpora.shards import MANIFEST, Shard
from cope_jax.data.shard_writer import write_file
from cope_jax.errors import ConfigError
from cope_jax.storage.files import glob_in, in_bucket, inside, read_object
from cope_jax.storage.locks import PARTIAL
from cope_jax.tokenizers.byte_level import BPE
from cope_jax.tokenizers.word_level import Words

_IDENTITY = "export.json"
_TOKENIZER = (BPE.file, Words.file, "tokenizer_config.json")  # what `loading.files` may name


def claim(out: epath.Path, identity: Mapping[str, Any]) -> bool:
    """Writes what the export is, or compares it with what an earlier call wrote.

    Returns:
      whether this is the first call for the folder.

    Raises:
      ConfigError: the folder contains another export with shards, or other files.
    """
    file = out / _IDENTITY
    if not file.exists():
        others = (path.name for path in glob_in(out, "*"))  # a bucket has no empty folder
        if any(name != _IDENTITY and not name.startswith(PARTIAL) for name in others):
            raise ConfigError(f"{out} contains other files: choose an empty folder")
        write_file(out, _IDENTITY, json.dumps(identity, indent=1) + "\n")
        return True
    claimed = read_object(file, "choose an empty folder")
    if other := next((name for name in identity if claimed.get(name) != identity[name]), None):
        if glob_in(out / "parts", "*.json"):
            differs = _difference(other, claimed.get(other), identity[other])
            raise ConfigError(
                f"{out} contains an export with {differs}: delete the folder, or choose another"
            )
        for name in _TOKENIZER:  # learned for the earlier call, which has written no shard
            (out / name).unlink(missing_ok=True)
        write_file(out, _IDENTITY, json.dumps(identity, indent=1) + "\n")
    return False


def _difference(name: str, existing: Any, given: Any) -> str:
    """Names the first entry in which two settings differ."""
    if isinstance(existing, dict) and isinstance(given, dict):
        names = (*existing, *given)
        name = next(entry for entry in names if existing.get(entry) != given.get(entry))
        existing, given = existing.get(name), given.get(name)
    return f"another {name} ({existing}, not {given})"


def forget_missing(out: epath.Path, units: int) -> None:
    """Removes the reports of chunks with damaged shards, and of later chunks of the same unit."""
    for unit in range(units):
        reports = reports_of(out, unit)
        whole = [all(_is_whole(out, shard) for shard in report["shards"]) for report in reports]
        for chunk in range(whole.index(False) if False in whole else len(whole), len(whole)):
            (out / MANIFEST).unlink(missing_ok=True)
            (out / report_name(unit, chunk)).unlink(missing_ok=True)  # another host may do the same


def _is_whole(out: epath.Path, shard: Mapping[str, Any]) -> bool:
    path = inside(out, shard["file"], links=True)
    return path.exists() and path.stat().length == shard["size"]


def discard(out: epath.Path, identity: Mapping[str, Any], is_new: bool) -> None:
    """Removes all that was written for an export, unless the folder belongs to another one by now.

    Never raises ConfigError or OSError, because the user must see why the export ends.
    """
    with contextlib.suppress(ConfigError, OSError):
        check_claim(out, identity)
        for report in glob_in(out / "parts", "*.json"):
            with contextlib.suppress(ConfigError):  # it is damaged
                for shard in _read_report(report)["shards"]:
                    inside(out, shard["file"], links=True).unlink(missing_ok=True)
            report.unlink(missing_ok=True)
        for name in (*_TOKENIZER, _IDENTITY):
            (out / name).unlink(missing_ok=True)
    for folder in () if in_bucket(out) else (out / "parts", *([out] if is_new else [])):
        with contextlib.suppress(OSError):  # other files are there
            os.rmdir(folder)


def check_claim(out: epath.Path, identity: Mapping[str, Any]) -> None:
    """Raises ConfigError if another host has begun another export in the folder."""
    if read_object(out / _IDENTITY, "choose an empty folder") != identity:
        raise ConfigError(
            f"{out} contains another export by now: choose another folder, and the same flags on all hosts"
        )


def all_reports(out: epath.Path, unit: int) -> list[dict[str, Any]] | None:
    """The reports of the chunks of a unit, or None if the unit has not ended."""
    reports = reports_of(out, unit)
    return reports if reports and reports[-1]["last"] else None


def reports_of(out: epath.Path, unit: int) -> list[dict[str, Any]]:
    """The reports of all chunks of a unit that have ended."""
    reports: list[dict[str, Any]] = []
    while (file := out / report_name(unit, len(reports))).exists():
        reports.append(_read_report(file))
    return reports


def _read_report(file: epath.Path) -> dict[str, Any]:
    kinds: dict[str, type] = {"shards": list, "sums": dict, "pieces": int, "last": bool}
    report = read_object(file, "delete it and rerun the command", **kinds)
    fields = {field.name for field in dataclasses.fields(Shard)}
    faults = {
        "a shard has other fields": any(
            not isinstance(shard, dict) or shard.keys() != fields for shard in report["shards"]
        ),
        "a split has no sums": not all(
            isinstance(report["sums"].get(split), dict) for split in SPLITS
        ),
    }
    if fault := next((fault for fault, is_there in faults.items() if is_there), None):
        raise ConfigError(f"{file} is damaged ({fault}): delete it and rerun the command")
    return report


def report_name(unit: int, chunk: int) -> str:
    """The file of the report of a chunk, which is written last."""
    return f"parts/{unit:05}-{chunk:05}.json"
