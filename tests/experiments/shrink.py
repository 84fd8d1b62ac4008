"""Any experiment made so small that it trains in seconds."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from cope_jax.tasks.base import TASKS
from cope_jax.tasks.difficulty import LevelTask
from cope_jax.training.config import ExperimentConfig, MeshConfig

TASK_OPTIONS: dict[str, dict[str, Any]] = {
    "selective_copy": {"num_tokens": 2, "num_blanks": 2},
    "flip_flop": {"length": 8},
    "counting": {"max_operations": 4, "block_length": 12},
    "zipf": {"vocab_size": 16, "length": 8},
    "words": {"length": 8},
    "text": {"corpus": "wikitext-2", "vocab_size": 300, "length": 8, "sweep": (8, 16)},
    "bilm": {"length": 8, "max_characters": 8},
    "masked_lm": {"length": 24, "vocab_size": 200, "max_predictions": 4},
    "tagging": {"length": 12, "max_pieces": 24},
    "spam": {"length": 12, "vocab_size": 200},
}
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "decoder": {"num_sampled": 0},
    "rnn_lm": {"embed_dim": 8, "hidden_dim": 8, "num_sampled": 4},
    "elmo": {
        "filters": ((1, 2), (2, 2)),
        "max_characters": 8,
        "cell_dim": 6,
        "projection_dim": 4,
        "num_sampled": 4,
    },
    "bert": {"predictions": 4},
    "tagger": {"word_dim": 4, "recurrent": (3,)},
    "bert_tagger": {},
    "bert_classifier": {},
}


def load(path: Path) -> ExperimentConfig:
    """The config of a file of experiments/configs."""
    return ExperimentConfig.from_mapping(runpy.run_path(str(path))["get_config"]().to_dict())


CONFIGS = sorted((Path(__file__).parents[2] / "experiments" / "configs").glob("[!_]*.py"))
SYNTHETIC = [path for path in CONFIGS if issubclass(TASKS.get(load(path).task.name), LevelTask)]
TEXT = [path for path in CONFIGS if path not in SYNTHETIC]


def shrink(config: ExperimentConfig, steps: int = 2) -> ExperimentConfig:
    """`config` with all sizes tiny, on one device, and every other choice as it is."""
    name, options = config.task.name, config.task.options | TASK_OPTIONS[config.task.name]
    model = dataclasses.replace(config.model, **MODEL_OPTIONS[config.model.name])
    if hasattr(model, "block"):
        block = dataclasses.replace(model.block, model_dim=4 * model.block.num_heads, mlp_dim=None)
        model = dataclasses.replace(model, num_layers=min(model.num_layers, 2), block=block)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, name=name, options=options),
        model=model,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, 1)),
        training=dataclasses.replace(
            config.training,
            steps=steps,
            batch_size=2,
            examples=config.training.examples and 6,
            steps_per_dispatch=1,
            evaluate_every=1,
            checkpoint_every=1,
        ),
        evaluation=dataclasses.replace(config.evaluation, examples=4, curve_examples=2, sweep_examples=2, batch_size=2),
        job=dataclasses.replace(config.job, mesh=MeshConfig(data=1)),
    )
