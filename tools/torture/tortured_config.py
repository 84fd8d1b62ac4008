"""The run that is killed: a few seconds of training, all of which is random, with a checkpoint
every few steps.
"""

from typing import Any

from ml_collections import config_dict

from cope_jax.training.config_files import experiment

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("selective_copy", {"num_symbols": 4, "num_tokens": 4, "num_blanks": 4}),
    "text": ("text", {"tokenizer": "bpe", "vocab_size": 300, "length": 12}),
}


def get_config(kind: str = "") -> config_dict.ConfigDict:
    """The config, with a key of `TASKS`."""
    name, options = TASKS[kind]
    return experiment(
        name,
        options,
        model={"num_layers": 1, "block": {"model_dim": 16, "num_heads": 4, "dropout": 0.1}},
        encodings={"cope": {"npos_max": 4}},
        optimizer={"warmup_steps": 4},
        training={
            "steps": 96,
            "batch_size": 8,
            "examples": 30,  # so that a batch spans two epochs
            "steps_per_dispatch": 2,
            "evaluate_every": 12,
            "checkpoint_every": 4,
        },
        evaluation={"examples": 8, "curve_examples": 8, "sweep_examples": 0, "batch_size": 8},
    )
