"""Measurements as plain records: summaries over seeds, and the files `results.json` and
`results.csv`.

A record is a dict with at least `task`, `encoding`, `seed`, `split`, `metric`, `value`, `step`,
`parameters` and `wall_seconds`. Records of a run also have `kind` ("split" or "sweep"; a sweep's
have `level`, the value to plot), `examples` (the number of examples of the split), `learning_rate`
and, if such options of the model are set, `variant`, such as "qk_norm". Records from training have
`memory_gib`: the peak of a device, or of the process on a CPU; None if the process had trained
before. With `job.blocks`, those of losses have `blocks`, a pair (mean, weight) for each batch of the
evaluation. `encoding` is the text that the user gave. Errors are fractions in [0, 1].
"""

import csv
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cope_jax
from cope_jax.runs.checkout import commit
from cope_jax.storage.files import write_atomically

Record = dict[str, Any]

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")


_NUMBER = (int, float)
FIELDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("seed", "step", "parameters"), (int,)),
    **dict.fromkeys(("encoding", "split", "metric"), (str,)),
    **dict.fromkeys(("value", "wall_seconds"), _NUMBER),
}
"""The types of fields that every record of a run has."""
OPTIONAL: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "examples": (int,),
    "memory_gib": (*_NUMBER, type(None)),
    "blocks": (list,),
}
"""The types of fields that some have."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics over seeds; `std` is √(Σ(x − mean)²/(count − 1)), or None for a single seed."""

    count: int
    mean: float
    std: float | None
    median: float
    minimum: float
    maximum: float


def summarise(values: Iterable[float]) -> Summary | None:
    """The summary of some values; None if there are none.

    >>> summarise([1.0, 2.0, 6.0])
    Summary(count=3, mean=3.0, std=2.6457513110645907, median=2.0, minimum=1.0, maximum=6.0)
    """
    x = np.array(list(values), np.float64)
    if not x.size:
        return None
    std = float(np.std(x, ddof=1)) if x.size > 1 else None
    mean, *others = (float(f(x)) for f in (np.mean, np.median, np.min, np.max))
    return Summary(x.size, mean, std, *others)


def select(rows: Iterable[Record], **fields: Any) -> list[Record]:
    """The rows that have these values in these fields.

    >>> select([{"seed": 0, "value": 0.5}, {"seed": 1, "value": 0.25}], seed=1)
    [{'seed': 1, 'value': 0.25}]
    """
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


def damage(record: Record) -> str:
    """The fault of a record of a run, in a few words; "" if it has none.

    >>> damage({"seed": 0, "step": 9, "parameters": 5, "encoding": "rope", "split": "dense"})
    'a record lacks metric'
    """
    for name, types in (FIELDS | OPTIONAL).items():
        if name not in record and name in FIELDS:
            return f"a record lacks {name}"
        if name in record and type(record[name]) not in types:
            return f"{name} of a record is {json.dumps(record[name])[:50]}"
    if record.get("examples", 1) < 1:
        return f"examples of a record are {record['examples']}"
    for block in record.get("blocks", ()):
        numbers = block if isinstance(block, list) and len(block) == 2 else [""]
        if not all(type(number) in (*_NUMBER, type(None)) for number in numbers):
            return f"a block of a record is {json.dumps(block)[:50]}"
    return ""


def environment() -> Record:
    """The versions, devices and commit, on which results depend; the commit may be None."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "cope_jax": cope_jax.__version__,
        "commit": commit(),
        "backend": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
    }


def finite(content: Any) -> Any:
    """Replaces each NaN and infinity by None, JSON's null, because JSON cannot represent these
    numbers.

    >>> finite({"values": [1.0, float("nan")]})
    {'values': [1.0, None]}
    """
    if isinstance(content, Mapping):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def write_results(workdir: Path, records: Sequence[Record], environment: Record) -> list[Path]:
    """Writes `results.json` and `results.csv`, and returns their paths.

    `results.json` is `{"records": [...], "environment": {...}}`; `results.csv` has no blocks. Each
    file is replaced atomically. JSON does not have NaN: a value that is not finite is null.
    """
    plain = finite(list(records))
    first = ("setting", "task", "encoding", "seed", "split", "metric", "value")
    names = list(dict.fromkeys(name for record in records for name in record))
    names = [name for name in names if name != "blocks"]
    names.sort(key=lambda name: first.index(name) if name in first else len(first))
    table = io.StringIO()
    writer = csv.DictWriter(table, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    content = {"records": plain, "environment": environment}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    files = {"results.json": text, "results.csv": table.getvalue()}
    return [write_atomically(workdir / name, content) for name, content in files.items()]
