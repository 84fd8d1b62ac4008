r"""Compares word-level language models: perplexity at the end, at equal steps, and at equal time.

cope-jax language_models --models=runs/lm/rnn,runs/lm/lstm,runs/lm/transformer --workdir=runs/lm

All runs must come from cope-jax train, with the same task, words and evaluation. Word perplexity is
exp(loss), where the loss is the mean over all words of a split, including `<eos>`. Time is the time
of training and learning curves, as each run measured it. This time depends on the machine and its
load as much as on the model.

Writes table.md, curves.png and language_models.json into the workdir.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import contextual_plots
from cope_jax.evaluation.report.plot_style import save
from cope_jax.evaluation.report.table import Table, console, figure
from cope_jax.runs import workdir as workdirs
from cope_jax.storage.files import write_atomically
from cope_jax.training.metrics import read_curves

common_flags.DEFINE_encoding()
_MODELS = flags.DEFINE_list(
    "models", None, "Folders of the finished training runs to compare (required).", required=True
)
_WORKDIR = common_flags.DEFINE_workdir("Folder for the table and the plot (required).")

HEADINGS = (
    "model",
    "parameters",
    "steps",
    "minutes",
    "validation",
    "test",
    "at equal steps",
    "at equal time",
)


def main() -> None:
    """Reads the runs and shows them."""
    runs = [read(Path(text)) for text in _MODELS.value]
    if len({json.dumps(run["measured_on"], sort_keys=True) for run in runs}) > 1:
        raise ConfigError(
            "the perplexities of --models cannot be compared: choose runs with the same task and evaluation"
        )
    if len({run["model"] for run in runs}) < len(runs):
        raise ConfigError(
            "two folders of --models have the same name, which becomes the model's name: rename one"
        )
    steps, seconds = (min(run[name] for run in runs) for name in ("steps", "seconds"))
    for run in runs:
        run["equal_steps"] = at(run["curve"], "step", steps)
        run["equal_time"] = at(run["curve"], "seconds", seconds)
    workdir = Path(_WORKDIR.value)
    with workdirs.Workdir(workdir).locked():
        table = create_table(runs, steps, seconds)
        rows = [row for run in runs for row in run["curve"]]
        curves = contextual_plots.language_model_curves(rows)
        paths = [save(curves, workdir / "curves.png")]
        paths.append(write_atomically(workdir / "table.md", f"{table.markdown()}\n"))
        workdirs.write_json(workdir / "language_models.json", {"models": runs})
        console().print(table.rich())
        outputs.list_files(paths)


def read(workdir: Path) -> dict[str, Any]:
    """Reads from a finished run what the table and the plot show."""
    if not (workdir / "result.json").exists():
        raise ConfigError(f"{workdir} contains no finished run: train it first with cope-jax train")
    records = workdirs.run_records(workdir / "result.json")
    losses = {record["split"]: record["value"] for record in records if record["metric"] == "loss"}
    first = records[0]
    if first.get("task") != "words":
        raise ConfigError(
            f"{workdir} is a run on the task {first.get('task')}: choose runs on the task words"
        )
    if missing := [split for split in ("validation", "test") if split not in losses]:
        raise ConfigError(
            f"{workdir}/result.json is damaged (it has no loss on {missing[0]}): {workdirs.AGAIN}"
        )
    config = workdirs.Workdir(workdir).settings()["config"]
    pace = first["wall_seconds"] / first["step"]
    return {
        "model": workdir.name,
        "measured_on": {"task": config["task"], "evaluation": config["evaluation"]},
        "parameters": first["parameters"],
        "steps": first["step"],
        "seconds": first["wall_seconds"],
        "validation": math.exp(losses["validation"]),
        "test": math.exp(losses["test"]),
        "curve": [
            {
                "model": workdir.name,
                "seed": row["seed"],
                "step": row["step"],
                "seconds": row["step"] * pace,
                "perplexity": math.exp(row["loss"]),
            }
            for row in read_curves(workdir / "metrics.jsonl")
            if row["split"] == "validation" and row["loss"] is not None
        ],
    }


def at(curve: Sequence[dict[str, Any]], axis: str, bound: float) -> float | None:
    """The perplexity at the last point of a learning curve up to `bound`; None if all points are
    later.

    >>> curve = [{"step": 5, "perplexity": 9.0}, {"step": 10, "perplexity": 7.0}]
    >>> at(curve, "step", 9), at(curve, "step", 4)
    (9.0, None)
    """
    before = [row["perplexity"] for row in curve if row[axis] <= bound * (1 + 1e-9)]
    return before[-1] if before else None


def create_table(runs: Sequence[dict[str, Any]], steps: int, seconds: float) -> Table:
    """A row for each run."""
    rows = []
    for run in runs:
        figures = (run["validation"], run["test"], run["equal_steps"], run["equal_time"])
        sizes = (f"{run['parameters']:,}", f"{run['steps']:,}", f"{run['seconds'] / 60:.1f}")
        rows.append([run["model"], *sizes, *(figure(value, 1) for value in figures)])
    equal = f"equal: {steps:,} steps or {seconds / 60:.1f} minutes, on the validation examples of learning curves"
    return Table("word perplexity", HEADINGS, rows, caption=equal)
