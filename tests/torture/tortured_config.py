"""The run that is killed: a few seconds of training, all of which is random, with a checkpoint every few steps."""

from ml_collections import config_dict

from cope_jax.training import config_files as base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "selective_copy",
        {"num_symbols": 4, "num_tokens": 4, "num_blanks": 4},
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
