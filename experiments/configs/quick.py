"""Selective copy in a few minutes on a laptop: the picture that a newcomer should see.

python -m experiments.compare --config=experiments/configs/quick.py --seeds=1 --workdir=runs/quick
"""

from ml_collections import config_dict

from experiments.configs import base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "selective_copy",
        {"num_tokens": 24, "num_blanks": 24},
        encodings={"cope": {"npos_max": 73}},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 100},
        training={"steps": 600, "evaluate_every": 100},
        evaluation={"examples": 512, "curve_examples": 128, "sweep_examples": 128},
    )
