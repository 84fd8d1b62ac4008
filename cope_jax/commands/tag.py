r"""Compares part-of-speech taggers that use words, characters, a frozen ELMo, or a frozen or
fine-tuned BERT.

cope-jax tag --corpora_dir=DATA --models=runs/elmo_small,runs/bert_small --seeds=3 \
    --workdir=runs/tag
cope-jax tag --input=sentences.csv --workdir=runs/own_tags

ELMo and BERT are runs of cope-jax train, or folders of published models; systems without their
model are left out. Without --corpora_dir, a built-in sample replaces the treebank. A file of
--input has a header and the columns `text` (words between spaces), `label` (as many tags) and
perhaps `split` (train, validation or test).

Every finished cell (a system with a seed) is kept: after an interruption, the same command resumes.

Writes results.json, results.csv, a table of accuracies as table.md, and plots of how systems weight
the model's layers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from cope_jax.cli import common_flags, config_flags, jobs, outputs
from cope_jax.cli.flag_values import by_kind, with_options
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import contextual_plots, pretrained
from cope_jax.evaluation.report.plot_style import save
from cope_jax.evaluation.report.table import Table, console, mean_std
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.grid.cell import plan
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.records import select
from cope_jax.storage.files import write_atomically
from cope_jax.training.experiment_config import ExperimentConfig

SYSTEMS = (
    "majority",
    "words",
    "words+characters",
    "words+characters+elmo",
    "bert_frozen",
    "bert_fine_tuned",
)

_CONFIG = config_flags.DEFINE_config("config", "tagger", "Config of the BiLSTM taggers. ")
_BERT_CONFIG = config_flags.DEFINE_config(
    "bert_config", "tagger:bert", "Config of the BERT taggers. "
)
common_flags.DEFINE_encoding()
_CORPORA_DIR = common_flags.DEFINE_corpora_dir()
_INPUT = common_flags.DEFINE_text(
    "input",
    "A .csv file with a header and the columns text and label, to read in place of the treebank.",
)
_MODELS = flags.DEFINE_list(
    "models",
    [],
    'Folders of an ELMo, of a BERT, or of both; "minilm" also counts as a BERT. Systems whose model is not given are '
    "left out. Without this flag, every system that needs ELMo or BERT is left out.",
)
_SYSTEMS = flags.DEFINE_list(
    "systems", list(SYSTEMS), f"Systems to compare: any of {', '.join(SYSTEMS)}."
)
_SEEDS = common_flags.DEFINE_count(
    "seeds", 1, "Number of seeds per system; N means the seeds 0 to N−1."
)
_WORKDIR = common_flags.DEFINE_workdir("Folder for results, plots and checkpoints (required).")
flags.adopt_module_key_flags(jobs)


def main() -> None:
    """Trains the systems and seeds that are not done yet, then shows all results."""
    models = by_kind(_MODELS.value, ("elmo", "bert"))
    systems = read_systems(_SYSTEMS.value, models)
    workdir = Path(_WORKDIR.value)
    configs = create_configs(systems, models)
    with workdirs.Workdir(workdir).locked():
        if config := configs.get("words+characters+elmo"):
            folder = pretrained.write_vectors(
                models["elmo"], config, workdir / "vectors" / "elmo", "ELMo"
            )
            configs["words+characters+elmo"] = with_vectors(config, folder)
        grid = Grid(workdir, plan(configs, _SEEDS.value, 1, workdir))
        pretrained.check_sources(grid)
        grid.train(jobs.number(len(grid.cells), default=1))
        show(systems, grid)


def read_systems(names: Sequence[str], models: Mapping[str, str]) -> list[str]:
    """The systems of --systems whose models are given.

    Raises:
      ConfigError: a system is unknown, or no system is left.
    """
    common_flags.check_names("system", names, SYSTEMS)
    missing = [kind for kind in ("elmo", "bert") if kind not in models]
    lacking = {name for name in SYSTEMS for kind in missing if kind in name}
    systems = [name for name in SYSTEMS if name in names and name not in lacking]
    if not systems:
        raise ConfigError(
            "no system of --systems can be compared: give their ELMo or BERT in --models"
        )
    return systems


def read_config(holder: Any) -> ExperimentConfig:
    """The config of a flag, on the sentences of the other flags."""
    config = config_flags.read_config(holder.value)
    return with_options(config, data_dir=_CORPORA_DIR.value, file=_INPUT.value)


def create_configs(
    systems: Sequence[str], models: Mapping[str, str]
) -> dict[str, ExperimentConfig]:
    """The checked config of each system that is trained; that on ELMo still lacks its vectors."""
    recurrent = read_config(_CONFIG)
    words = recurrent.model
    characters = dataclasses.replace(words, characters=words.characters or 32)
    configs: dict[str, ExperimentConfig] = {}
    if "words" in systems:
        configs["words"] = recurrent
    if "words+characters" in systems:
        configs["words+characters"] = dataclasses.replace(recurrent, model=characters)
    for name in systems:
        if name.startswith("bert"):
            config = read_config(_BERT_CONFIG)
            frozen = name == "bert_frozen"
            config = pretrained.on_encoder(
                config, models["bert"], frozen=frozen, vocabulary="pieces"
            )
            if name == "bert_frozen":
                mixed = dataclasses.replace(config.model, layers="mix")
                config = dataclasses.replace(config, model=mixed)
            configs[name] = config
    for config in (recurrent, *configs.values()):
        Experiment.check(config)
    if "words+characters+elmo" in systems:
        configs["words+characters+elmo"] = dataclasses.replace(recurrent, model=characters)
    return {name: configs[name] for name in systems if name in configs}


def with_vectors(config: ExperimentConfig, folder: Path) -> ExperimentConfig:
    """Returns the config with the vectors in `folder`."""
    model = dataclasses.replace(config.model, vectors=True)
    return dataclasses.replace(with_options(config, vectors=str(folder)), model=model)


def create_table(accuracies: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """A row for each system, a column for each split: mean ± standard deviation over seeds."""
    splits = list(dict.fromkeys(split for by_split in accuracies.values() for split in by_split))
    rows = [
        [name, *(mean_std(by_split.get(split, ()), scale=100) for split in splits)]
        for name, by_split in accuracies.items()
    ]
    return Table("tagging accuracy, in %", ["system", *splits], rows)


def show(systems: Sequence[str], grid: Grid) -> None:
    """Writes and prints the accuracies, and how systems weight the layers."""
    out = console()
    paths: list[Path] = []
    accuracies: dict[str, dict[str, list[float]]] = {}
    if "majority" in systems:
        task: Any = read_config(_CONFIG).task.create()
        accuracies["majority"] = {split: [task.majority(split)] for split in task.evaluation_splits}
    if grid.cells:
        paths = grid.write_results()
        for record in select(grid.records(), metric="token_error"):
            by_split = accuracies.setdefault(record["system"], {})
            by_split.setdefault(record["split"], []).append(1 - record["value"])
    table = create_table(accuracies)
    paths.append(write_atomically(grid.workdir / "table.md", f"{table.markdown()}\n"))
    out.print(table.rich())
    mixes: dict[str, list[list[float]]] = {}
    for cell in grid.cells:
        if weights := pretrained.mix_weights(cell.folder(grid.workdir)):
            mixes.setdefault(cell.label, []).append(weights)
    for label, runs in mixes.items():
        layers = [str(layer) for layer in range(len(runs[0]))]
        means = np.mean(runs, axis=0)
        pairs = zip(layers, means, strict=True)
        shares = ", ".join(f"{layer}: {share:.3f}" for layer, share in pairs)
        text = f"{label} weights the layers {shares}; the largest weight is of layer {np.argmax(means)}"
        out.print(text, markup=False, soft_wrap=True)
        figure = contextual_plots.mix_weights(layers, {label: runs}, title="parts of speech")
        paths.append(save(figure, grid.workdir / f"mix_{label.replace('+', '_')}.png"))
    outputs.list_files(paths)
