"""Any experiment made so small that it trains in seconds."""

import dataclasses
import runpy
from pathlib import Path
from typing import Any

from cope_jax.training.config import ExperimentConfig, MeshConfig

CONFIGS = sorted((Path(__file__).parents[2] / "experiments" / "configs").glob("[!_]*.py"))
CONFIGS = [path for path in CONFIGS if path.stem != "base"]
TASK_OPTIONS: dict[str, dict[str, Any]] = {
    "selective_copy": {"num_tokens": 2, "num_blanks": 2},
    "flip_flop": {"length": 8},
    "counting": {"max_operations": 4, "block_length": 12},
    "zipf": {"vocab_size": 16, "length": 8},
}


def load(path: Path) -> ExperimentConfig:
    """The config of a file of experiments/configs."""
    return ExperimentConfig.from_mapping(runpy.run_path(str(path))["get_config"]().to_dict())


def shrink(config: ExperimentConfig, steps: int = 2) -> ExperimentConfig:
    """`config` with all sizes tiny, on one device, and every other choice as it is."""
    name, options = config.task.name, config.task.options | TASK_OPTIONS[config.task.name]
    block = dataclasses.replace(config.model.block, model_dim=4 * config.model.block.num_heads)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, name=name, options=options),
        model=dataclasses.replace(config.model, num_layers=min(config.model.num_layers, 2), block=block),
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
