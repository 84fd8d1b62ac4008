"""Models on the built-in samples, so small that a few steps cost little but compilation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cope_jax.runs.experiment import Experiment
from cope_jax.runs.workdir import Workdir, write_json
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig

BLOCK = {"model_dim": 8, "num_heads": 2, "mlp_dim": 16, "dropout": 0.0}
MODELS = {
    "bert": (
        "masked_lm",
        {"length": 24, "vocab_size": 300, "corpus": "both"},
        {"name": "bert", "num_layers": 2, "block": BLOCK},
        "learned",
    ),
    "elmo": (
        "bilm",
        {"length": 8, "max_characters": 12},
        {
            "name": "elmo",
            "filters": ((1, 4), (2, 4)),
            "num_highways": 1,
            "max_characters": 12,
            "cell_dim": 8,
            "projection_dim": 6,
        },
        "none",
    ),
    "rnn": (
        "words",
        {"length": 8},
        {"name": "rnn_lm", "embed_dim": 8, "hidden_dim": 8, "num_layers": 1},
        "none",
    ),
}
TEXT_CONFIG = """
from cope_jax.training import config_files


def get_config():
    return config_files.experiment(
        {task!r},
        {options!r},
        model={model!r},
        encoding={encoding!r},
        optimizer={{"warmup_steps": 1}},
        training={{
            "steps": 2, "batch_size": 4, "steps_per_dispatch": 2, "evaluate_every": 2, "checkpoint_every": 2
        }},
        evaluation={{"examples": 40, "curve_examples": 8, "sweep_examples": 0, "batch_size": 8}},
        job={{"mesh": {{"data": 1}}}},
    )
"""


def write_model(
    folder: Path, task: str, options: dict, model: dict, encoding: str, **written: Any
) -> Experiment:
    """`write_run` on one device, with few examples to be measured on."""
    settings = config_files.experiment(
        task,
        options,
        model=model,
        encoding=encoding,
        evaluation={"examples": 40, "sweep_examples": 0, "batch_size": 8},
        job={"mesh": {"data": 1}},
    )
    return write_run(folder, ExperimentConfig.from_mapping(settings.to_dict()), **written)


def write_run(
    folder: Path,
    config: ExperimentConfig,
    seeds: Sequence[int] = (0,),
    step: int = 2,
    **metrics: float,
) -> Experiment:
    """Makes a folder that of a run which has learned nothing yet, with made-up metrics; much faster
    than training.
    """
    experiment = Experiment(config)
    Workdir(folder).open(config, seeds, {"commit": "made up"})
    Workdir(folder).keep_files(experiment.task)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        program, _ = experiment._side_by_side(len(seeds))
        checkpoints.save(step, program.init(seeds), {"data": [], "seconds": 0.0})
    records = [
        {"split": split, "metric": name, "value": value}
        for split in experiment.task.evaluation_splits
        for name, value in metrics.items()
    ]
    write_json(folder / "result.json", {"records": records})
    return experiment
