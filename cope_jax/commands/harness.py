"""Measures a trained decoder on tasks of EleutherAI's lm-evaluation-harness.

cope-jax harness --model=runs/wikitext2_small --tasks=lambada_openai,hellaswag --limit=100
cope-jax harness --model=runs/wikitext2_small --tasks=mine --task_dir=my_tasks

Prints the metrics of each task, and writes harness.json and harness.md into the run's folder or,
for a trained model of the package, into runs/trained/NAME. Needs '.[harness]'. The tasks download
their data, unless their data are local; see docs/text.md.
"""

import difflib
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.errors import ConfigError, first_line
from cope_jax.evaluation.report.table import Table, figure
from cope_jax.evaluation.report.table import console as wide_console
from cope_jax.evaluation.text import harness_model
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import load

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of a run that trained a decoder on text, folder of an exported or Hugging Face decoder with its tokenizer, "
    "or name of a trained model of the package, such as shakespeare (required)."
)
_SEED = common_flags.DEFINE_seed()
_TASKS = flags.DEFINE_list(
    "tasks", None, "Names of tasks or groups of tasks (required).", required=True
)
_TASK_DIR = flags.DEFINE_string("task_dir", None, "Folder with more tasks, as YAML files.")
_LENGTH = common_flags.DEFINE_count(
    "length",
    None,
    "Number of tokens that the model reads at once; without this flag, the length of training, or the maximum length "
    "of a published model.",
)
_BATCH_SIZE = common_flags.DEFINE_count(
    "batch_size",
    None,
    "Number of rows of --length tokens in a batch; without this flag, as many tokens as a batch of the run's "
    "evaluation.",
)
_FEWSHOT = flags.DEFINE_integer(
    "fewshot",
    None,
    "Number of worked examples before each question; without this flag, the number in the task.",
    lower_bound=0,
)
_LIMIT = common_flags.DEFINE_count(
    "limit", None, "Number of examples of each task; without this flag, all."
)


def main() -> None:
    """Measures the tasks, prints a table, and writes the results."""
    folder = load(_MODEL.value)
    model = harness_model.load(_MODEL.value, _SEED.value, _LENGTH.value, _BATCH_SIZE.value)
    lm, manager = harness_model.as_lm(model), _tasks()
    title = folder.title(_SEED.value)
    print(title, file=sys.stderr)
    # It warns of each default that a task leaves to it.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with workdirs.Workdir(folder.output).locked(workdirs.MEASURING):
        results = _measure(lm, manager)
        records, left_out = harness_model.records(results, model.lost)
        figures = ((figure(r["value"], 4), figure(r["standard_error"], 4)) for r in records)
        rows = [[r["task"], r["metric"], *both] for r, both in zip(records, figures, strict=True)]
        caption = "; ".join(f"{task}: {note}" for task, note in left_out.items())
        headings = ["task", "metric", "value", "± standard error"]
        table = Table(title, headings, rows, caption=caption, text_columns=2)
        content = {"records": records, "step": folder.step, "settings": _settings(model.length)}
        paths = outputs.write(folder.output, "harness", content, table.markdown())
    wide_console().print(table.rich())
    outputs.list_files(paths)


def _tasks() -> Any:
    """The table of all tasks. ConfigError: --task_dir or a name of --tasks is wrong."""
    from lm_eval.tasks import TaskManager

    if _TASK_DIR.value is not None and not Path(_TASK_DIR.value).is_dir():
        raise ConfigError(
            f"there is no folder {_TASK_DIR.value}: give a folder with tasks in --task_dir"
        )
    manager = TaskManager(include_path=_TASK_DIR.value)
    for name in _TASKS.value:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"unknown task {name!r} in --tasks: {hint}`lm-eval ls tasks` lists the tasks of lm_eval"
            )
    return manager


def _measure(lm: Any, manager: Any) -> Any:
    """The results of lm_eval. ConfigError: a task or its data cannot be loaded."""
    import lm_eval

    try:
        return lm_eval.simple_evaluate(
            model=lm,
            tasks=_TASKS.value,
            num_fewshot=_FEWSHOT.value,
            limit=_LIMIT.value,
            task_manager=manager,
            log_samples=False,
        )
    except Exception as error:
        if any(
            frame.filename == harness_model.__file__
            for frame in traceback.extract_tb(error.__traceback__)
        ):
            raise  # from the model, not from a task
        reason = f"{type(error).__name__}: {first_line(error)}"
        names = ",".join(_TASKS.value)
        raise ConfigError(
            f"lm_eval cannot measure --tasks={names} ({reason}): correct the task or its data, or choose another"
        ) from error


def _settings(length: int) -> dict[str, Any]:
    """Settings on which the results depend, except the model."""
    import lm_eval

    settings = {"length": length, "fewshot": _FEWSHOT.value, "limit": _LIMIT.value}
    return settings | {"lm_eval": lm_eval.__version__}
