"""Any experiment made so small that it trains in seconds."""

import dataclasses
import re
from typing import Any

from cope_jax.tasks.synthetic import SyntheticTask
from cope_jax.tasks.task import TASKS
from cope_jax.training import config_files
from cope_jax.training.experiment_config import ExperimentConfig, MeshConfig

SMALL_TASK: dict[str, Any] = {
    "block_length": 12,
    "length": 24,
    "max_characters": 8,
    "max_operations": 4,
    "max_pieces": 24,
    "max_predictions": 4,
    "num_blanks": 2,
    "num_tokens": 2,
    "sweep": (8, 24),
    "vocab_size": 300,
}
"""Sizes by the name of the option, for every task that has it."""
SMALL_MODEL: dict[str, Any] = {
    "cell_dim": 6,
    "embed_dim": 8,
    "filters": ((1, 2), (2, 2)),
    "hidden_dim": 8,
    "max_characters": 8,
    "predictions": 4,
    "projection_dim": 4,
    "recurrent": (3,),
    "word_dim": 4,
}
"""The same of every model."""
LARGE_CORPORA = ("code", "wikitext-103")


def load(name: str) -> ExperimentConfig:
    """The config of a name, without changes."""
    return ExperimentConfig.from_mapping(config_files.named(name).to_dict())


SETTINGS = re.compile(r"(abilities|published):")
NEEDING_SHARDS = re.compile(r"lm(:[0-9a-z]+)?|\w+:shards")
"""Configs of text in folders that the user names. Those of `lm` are tested on noise."""
CONFIGS = [
    name
    for name in config_files.names()
    if not SETTINGS.match(name) and not NEEDING_SHARDS.fullmatch(name)
]
SYNTHETIC = [name for name in CONFIGS if issubclass(TASKS.get(load(name).task.name), SyntheticTask)]
TEXT = [name for name in CONFIGS if name not in SYNTHETIC]


def shrink(config: ExperimentConfig, steps: int = 2) -> ExperimentConfig:
    """`config` with all sizes tiny, on one device, and every other choice as it is."""
    has = {field.name for field in dataclasses.fields(TASKS.get(config.task.name).Config)}
    options = config.task.options | {name: size for name, size in SMALL_TASK.items() if name in has}
    if options.get("corpus") in LARGE_CORPORA:
        options["corpus"] = "wikitext-2"
    has = {field.name for field in dataclasses.fields(config.model)}
    model = dataclasses.replace(
        config.model, **{name: size for name, size in SMALL_MODEL.items() if name in has}
    )
    if getattr(model, "num_sampled", 0):
        model = dataclasses.replace(model, num_sampled=4)
    if hasattr(model, "block"):
        block = dataclasses.replace(model.block, model_dim=4 * model.block.num_heads, mlp_dim=None)
        model = dataclasses.replace(model, num_layers=min(model.num_layers, 2), block=block)
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, options=options),
        model=model,
        optimizer=dataclasses.replace(
            config.optimizer, warmup_steps=min(config.optimizer.warmup_steps, 1)
        ),
        training=dataclasses.replace(
            config.training,
            steps=steps,
            batch_size=2,
            examples=config.training.examples and 6,
            steps_per_dispatch=1,
            evaluate_every=1,
            checkpoint_every=1,
        ),
        evaluation=dataclasses.replace(
            config.evaluation, examples=4, curve_examples=2, sweep_examples=2, batch_size=2
        ),
        job=dataclasses.replace(config.job, mesh=MeshConfig(data=1)),
    )
