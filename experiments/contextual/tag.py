r"""Tags parts of speech with words, characters, a frozen ELMo, and a BERT frozen and fine-tuned: a table of accuracies.

python -m experiments.tag --data_dir=DATA --elmo=runs/elmo_small --bert=runs/bert_small --seeds=3 --workdir=runs/tag

ELMo and BERT are runs of experiments.train, or folders of published models; systems without their model are left out.
Without --data_dir a built-in sample stands in for the treebank. Every finished cell (a system with a seed) is kept:
after an interruption the same command goes on.

Writes results.json, results.csv, table.md, and a plot of which layers the mixes chose.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from cope_jax import tasks
from cope_jax.errors import ConfigError
from cope_jax.evaluation.contextual import accuracy_table, contextual_plots, encoder_heads, frozen_vectors
from cope_jax.runs import grid
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.experiment import Experiment
from cope_jax.runs.records import write_atomically
from cope_jax.training.config import ExperimentConfig, TaskConfig
from experiments.cli import entry

SYSTEMS = ("majority", "words", "words+characters", "words+characters+elmo", "bert_frozen", "bert_fine_tuned")

_CONFIG = entry.DEFINE_config("config", "tagger", "Of the BiLSTM taggers. ")
_BERT_CONFIG = entry.DEFINE_config("bert_config", "bert_tagger", "Of the taggers on BERT. ")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Folder of corpora; without it, the built-in sample.")
_ELMO = flags.DEFINE_string("elmo", None, "A trained ELMo.")
_BERT = flags.DEFINE_string("bert", None, 'A pretrained BERT, or "minilm".')
_SYSTEMS = flags.DEFINE_list("systems", list(SYSTEMS), f"Some of {', '.join(SYSTEMS)}.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Seeds 0 … N−1 of each system.", lower_bound=1)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for results, plots and checkpoints.", required=True)


def main() -> None:
    """Trains what is missing, then shows everything."""
    systems = read_systems(_SYSTEMS.value)
    workdir = Path(_WORKDIR.value)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdirs.locked(workdir))
        configs = create_configs(systems, workdir)
        planned = grid.plan(list(configs), _SEEDS.value, 1, workdir)
        grid.train_missing(configs, planned, workdir)
        show(workdir, systems, configs, planned, Console())


def read_systems(names: Sequence[str]) -> list[str]:
    """The systems of the flag whose models there are; ConfigError for an unknown one, and where none is left."""
    encoder_heads.check_names("system", names, SYSTEMS)
    missing = {"elmo": _ELMO.value is None, "bert": _BERT.value is None}
    systems = [name for name in SYSTEMS if name in names and not any(lost and m in name for m, lost in missing.items())]
    if not systems:
        raise ConfigError("no system is left: those with ELMo need --elmo, those with BERT --bert")
    return systems


def create_configs(systems: Sequence[str], workdir: Path) -> dict[str, ExperimentConfig]:
    """What each system that is trained is trained with."""
    recurrent = with_data(entry.read_config(_CONFIG.value))
    words = recurrent.model
    characters = dataclasses.replace(words, characters=words.characters or 32)
    configs: dict[str, ExperimentConfig] = {}
    if "words" in systems:
        configs["words"] = recurrent
    if "words+characters" in systems:
        configs["words+characters"] = dataclasses.replace(recurrent, model=characters)
    for name in systems:
        if name.startswith("bert"):
            config = with_data(entry.read_config(_BERT_CONFIG.value))
            config = encoder_heads.on_encoder(config, _BERT.value, frozen=name == "bert_frozen", vocabulary="pieces")
            if name == "bert_frozen":
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, layers="mix"))
            configs[name] = config
    for config in (recurrent, *configs.values()):  # before the vectors, which take long
        Experiment.check(config)
    if "words+characters+elmo" in systems:
        folder = frozen_vectors.make(_ELMO.value, recurrent, workdir / "vectors" / "elmo", "ELMo")
        configs["words+characters+elmo"] = dataclasses.replace(
            with_options(recurrent, vectors=str(folder)), model=dataclasses.replace(characters, vectors=True)
        )
    return {name: configs[name] for name in systems if name in configs}


def with_data(config: ExperimentConfig) -> ExperimentConfig:
    """The config on the data of the flag."""
    return config if _DATA_DIR.value is None else with_options(config, data_dir=_DATA_DIR.value)


def with_options(config: ExperimentConfig, **options: Any) -> ExperimentConfig:
    """The config with other options of its task."""
    return dataclasses.replace(config, task=TaskConfig(config.task.name, {**config.task.options, **options}))


def show(
    workdir: Path,
    systems: Sequence[str],
    configs: Mapping[str, ExperimentConfig],
    planned: Sequence[grid.GridRun],
    console: Console,
) -> None:
    """Writes and prints the accuracies, and which layers were chosen."""
    paths: list[Path] = []
    rows: dict[str, dict[str, list[float]]] = {}
    if "majority" in systems:
        config = with_data(entry.read_config(_CONFIG.value)).task
        task: Any = tasks.create(config.name, **config.options)
        rows["majority"] = {split: [task.majority(split)] for split in task.evaluation_splits}
    if planned:
        records, paths = grid.write_results(workdir, planned)
        for label in configs:
            rows[label] = accuracy_table.by_split(records, label, "token_error", of_error=True)
    title = "words tagged right, in %"
    paths.append(write_atomically(workdir / "table.md", accuracy_table.markdown(rows, title)))
    console.print(accuracy_table.rich_table(rows, title))
    mixes: dict[str, list[list[float]]] = {}
    for cell in planned:
        weights = encoder_heads.mix_weights(cell.workdir)
        if weights is not None:
            mixes.setdefault(cell.label, []).append(weights)
    for label, runs in mixes.items():
        layers = [str(layer) for layer in range(len(runs[0]))]
        means = np.mean(runs, axis=0)
        shares = ", ".join(f"{layer}: {share:.3f}" for layer, share in zip(layers, means, strict=True))
        console.print(f"{label} mixes layers {shares}; most of layer {np.argmax(means)}", markup=False, soft_wrap=True)
        figure = contextual_plots.mix_weights(layers, {label: runs})
        paths.append(contextual_plots.save(figure, workdir / f"mix_{label.replace('+', '_')}.png"))
    console.print(*paths, sep="\n", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    entry.run(main)
