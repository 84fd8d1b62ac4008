"""Selective copy, 32 tokens among 32 blanks: CPU-sized.

python -m experiments.compare --config=experiments/configs/selective_copy_small.py --encodings=cope,rope,relative,learned --seeds=3 --workdir=runs/selective_copy_small
"""

from ml_collections import config_dict

from experiments.configs import base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "selective_copy",
        {"num_tokens": 32, "num_blanks": 32},
        encodings={"cope": {"npos_max": 97}},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 100, "schedule": "cosine"},
        training={"steps": 1000, "batch_size": 64},
    )
