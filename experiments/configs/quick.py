"""Selective copy of 24 tokens among 24 blanks, in minutes on a laptop: the picture that a newcomer should see.

Command: `make compare`, or
    python -m experiments.compare --config=experiments/configs/quick.py --seeds=1 --workdir=runs/quick
Hardware: 2 CPU cores. Wall time: QUICKTIME.
Expected: CoPE's sequence error is 0 % on all three splits; that of RoPE, relative and absolute is 100 % out of
distribution.
"""

from ml_collections import config_dict

from experiments.configs import base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "selective_copy",
        {"num_tokens": 24, "num_blanks": 24},
        encodings={"cope": {"npos_max": 72}},  # the length of a training sequence: no clipping
        optimizer={"learning_rate": 2e-3, "warmup_steps": 100},
        training={"steps": 500, "evaluate_every": 100},
        evaluation={"examples": 512, "curve_examples": 128, "sweep_examples": 128},
    )
