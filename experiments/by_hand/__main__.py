"""Prints what encodings can do on the abilities of the benchmark, by weights written by hand.

    python -m experiments.by_hand --encodings=none,cope --abilities=count --examples=1000 --times=1,64

A cell has the verdict, and the errors in % that the grid `abilities` learned, mean and best seed, if
both versions of the ability have one setting. "can ×64" means that no error was measured at any of
--times, of which 64 is the largest; a number after "can" is the largest error in %. The verdict
"limit" means that each model's margin vanishes as sequences grow. Nothing is written.
"""

import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from absl import flags

from cope_jax import tasks
from cope_jax.cli.common_flags import DEFINE_count, check_names
from cope_jax.cli.flag_values import read_numbers
from cope_jax.cli.run import run
from cope_jax.configs.abilities import CHANGED, SETTINGS
from cope_jax.evaluation.report.table import Table
from experiments.by_hand import limits, measure

ARCHIVE = Path(__file__).parents[1] / "results" / "abilities.tar.xz"

_ENCODINGS = flags.DEFINE_list("encodings", [*measure.GADGETS], "Encodings, the rows.")
_ABILITIES = flags.DEFINE_list("abilities", [*SETTINGS], "Abilities, the columns.")
_EXAMPLES = DEFINE_count("examples", 1000, "Number of sequences of each length.")
_TIMES = flags.DEFINE_list("times", ["1", "64"], "Lengths, as multiples of the trained one.")


def main() -> None:
    """Measures each cell that has a recipe, and prints the table."""
    encodings, abilities = _ENCODINGS.value, _ABILITIES.value
    check_names("encoding", encodings, measure.GADGETS)
    check_names("ability", abilities, SETTINGS)
    times = read_numbers("times", _TIMES.value)
    learned = errors_learned()
    rows = []
    for encoding in encodings:
        row = [f"`{encoding}`"]
        for ability in abilities:
            shown = verdict(encoding, ability, times, _EXAMPLES.value)
            print(f"{ability}, {encoding}: {shown}", file=sys.stderr, flush=True)
            row.append(shown + bracket(learned, ability, encoding))
        rows.append(row)
    print(Table("", ["encoding", *abilities], rows, text_columns=1 + len(abilities)).markdown())


def bracket(learned: Mapping[tuple[str, str], list[float]], ability: str, encoding: str) -> str:
    """The mean and the least learned error in %, in brackets; "" if they are of another setting."""
    seeds = learned[ability, encoding]
    return "" if ability in CHANGED else f" ({100 * fmean(seeds):.1f}, {100 * min(seeds):.1f})"


def verdict(encoding: str, ability: str, times: list[int], examples: int) -> str:
    """The verdict on a cell, measured if there are weights."""
    if encoding not in limits.CAN.get(ability, ()):
        cell = ability, encoding
        return "cannot" if cell in limits.CANNOT else "limit" if cell in limits.LIMIT else "open"
    worst = max(measure.error(encoding, ability, number, examples) for number in times)
    most = min(max(times), measure.MOST_TIMES.get(ability, max(times)))
    return f"can ×{most}" if worst == 0 else f"can {100 * worst:.2g}"


def errors_learned() -> Mapping[tuple[str, str], list[float]]:
    """The errors of all seeds in distribution, by ability and encoding, of the archived grid."""
    errors: dict[tuple[str, str], list[float]] = {}
    metrics = {
        name: tasks.create(task, **options).metric for name, (task, options) in SETTINGS.items()
    }
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            path = Path(member.name)
            if path.name != "result.json":
                continue
            ability, encoding = path.parts[1], path.parts[3]
            content = archive.extractfile(member)
            for record in json.load(content)["records"] if content else ():
                if (record["split"], record["metric"]) == ("in_distribution", metrics[ability]):
                    errors.setdefault((ability, encoding), []).append(record["value"])
    return errors


if __name__ == "__main__":
    run(main)
