r"""Measures the perplexity of a trained decoder on every token of a text, in sliding windows.

cope-jax perplexity --model=runs/wikitext2_small
cope-jax perplexity --model=runs/wikitext2_small --lengths=128,256,512,1024 --stride=64

Prints the loss per token, the perplexity per word and per token, bits per byte, and the loss by the
number of preceding tokens in the window. Writes perplexity.json and plots into the run's folder or,
for a trained model of the package, into runs/trained/NAME.

The default stride is half a window. Every token then has at least half a window of context, except
at the beginning of a text. A stride of a full window gives the same result as the run's own
evaluation. `--lengths` shows how the model generalises to lengths other than the training length.

Finished measurements are kept: after an interruption, the same command resumes. A newer checkpoint
is measured again.
"""

from collections.abc import Sequence

from absl import flags

from cope_jax.cli import common_flags
from cope_jax.cli.flag_values import read_numbers
from cope_jax.errors import ConfigError
from cope_jax.evaluation.report.plot_style import save
from cope_jax.evaluation.report.table import console as wide_console
from cope_jax.evaluation.text import perplexity_report
from cope_jax.models import Model
from cope_jax.registry import unknown
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.load import LoadedRun, load_run
from cope_jax.runs.records import Record, select
from cope_jax.storage.mirror import shown
from cope_jax.tasks.stored import TextTask

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of a run that trained a decoder on text, or name of a trained model of the package, such as shakespeare "
    "(required)."
)
_SPLIT = flags.DEFINE_string("split", "test", "Split to measure: train, validation or test.")
_LENGTH = common_flags.DEFINE_count(
    "length",
    None,
    "Number of tokens per window; without this flag, the same number as in training.",
)
_STRIDE = common_flags.DEFINE_count(
    "stride",
    None,
    "Number of tokens from the start of one window to the start of the next; without this flag, half a window.",
)
_LENGTHS = flags.DEFINE_list(
    "lengths",
    [],
    "More window lengths to measure, such as 128,256,512; without this flag, only --length.",
)


def main() -> None:
    """Measures the results that perplexity.json does not have yet, then shows all of them."""
    plan = read_numbers("lengths", _LENGTHS.value)
    run = load_run(_MODEL.value)
    task = run.task
    models = [run.model(seed) for seed in run.seeds]
    if not isinstance(task, TextTask) or "score" not in models[0].abilities:
        raise ConfigError(
            f"{run.folder} is a run of {run.name} on {task.name}: choose a decoder trained on text"
        )
    if _SPLIT.value not in task.splits:
        raise unknown("--split", _SPLIT.value, task.splits)
    workdirs.Workdir(run.folder).check_sources(task, [_SPLIT.value])
    first = _LENGTH.value or task.window_length
    plan = sorted({first, *plan})
    strides = [_STRIDE.value or -(-length // 2) for length in plan]
    if strides[0] > plan[0]:
        raise ConfigError(
            f"--stride={strides[0]} skips tokens between windows of {plan[0]} tokens: give a smaller stride"
        )
    perplexity_report.check_length(models[0], task, _SPLIT.value, plan[-1])
    with workdirs.Workdir(run.output).locked(workdirs.MEASURING):
        show(run, task, measure(run, task, models, plan, strides), first)


def measure(
    run: LoadedRun, task: TextTask, models: Sequence[Model], plan: list[int], strides: list[int]
) -> list[Record]:
    """Adds the results that perplexity.json does not have yet. Returns all requested results.

    `plan` has the lengths of the windows, and `strides` the stride for each length.
    """
    path = run.output / "perplexity.json"
    # A batch has about as many tokens as an evaluation batch of the run, so it fits into memory.
    rows = max(1, run.experiment.evaluation.batch_size * task.max_length // plan[-1])
    shown = []
    for length, stride in zip(plan, strides, strict=True):
        for seed, model in zip(run.seeds, models, strict=True):
            key = {"seed": seed, "split": _SPLIT.value, "length": length, "stride": stride}
            text = {"step": run.restored.step, **vars(task.counts(_SPLIT.value))}
            results = select(workdirs.read_records(path), **key, **text)
            if not results:
                label = f"seed {seed}, windows of {length}"
                losses = perplexity_report.read(
                    model, task, _SPLIT.value, length, stride, plan[-1], rows, label
                )
                figures = perplexity_report.record(task, _SPLIT.value, length, stride, losses)
                results = [{"seed": seed, "step": run.restored.step, **figures}]
                workdirs.replace_records(path, key, results)
            shown += results
    return shown


def show(run: LoadedRun, task: TextTask, records: Sequence[Record], first: int) -> None:
    """Prints tables and draws plots.

    The table by position in the window is for windows of length `first`.
    """
    console, workdir = wide_console(), run.output
    console.print(perplexity_report.figures_table(records).rich())
    rows = [row for row in records if row["length"] == first]
    console.print(perplexity_report.positions_table(rows).rich())
    paths = [workdir / "perplexity.json"]
    model = f"{run.name} with {run.experiment.encoding}, trained on {task.name}"
    figure = perplexity_report.loss_by_position(records, model)
    paths.append(save(figure, workdir / "loss_by_position.png"))
    if len(perplexity_report.lengths(records)) > 1:
        figure = perplexity_report.by_length(records, task.metric, task.window_length, model)
        paths.append(save(figure, workdir / f"{task.metric}_by_length.png"))
    console.print(*map(shown, paths), sep="\n", soft_wrap=True)
