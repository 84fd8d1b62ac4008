"""Selective copy of 16 tokens among 16 blanks, in minutes on a laptop: the picture that a newcomer should see.

Command: `make compare`, or
    python -m experiments.compare --config=experiments/configs/quick.py --seeds=1 --workdir=runs/quick
Hardware: 2 CPU cores. Wall time: 2 minutes after installation.
Expected, sequence errors of one seed (in distribution, dense, sparse): CoPE 0.0, 0.4, 6.8 %; RoPE 11, 100, 100;
relative 10, 72, 100; absolute 67, 100, 100. Rounding alone has moved CoPE's last figure between 0.4 and 6.8.
"""

from ml_collections import config_dict

from cope_jax.training import config_files as base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "selective_copy",
        {"num_tokens": 16, "num_blanks": 16},
        # Both tables end at the length of a training sequence: what lies beyond takes the last row.
        encodings={"cope": {"npos_max": 49}, "relative": {"max_distance": 48}},
        # Small models may be late to find a head that counts every symbol and no blank, and then settle for gates that
        # are half open. Four heads of 32 find it soon; with beta2 at 0.999, this rate can undo what was found.
        model={"block": {"num_heads": 4, "head_dim": 32}},
        optimizer={"learning_rate": 4e-3, "warmup_steps": 100, "beta2": 0.98},
        training={"steps": 600, "batch_size": 32, "evaluate_every": 100},
        evaluation={"examples": 512, "curve_examples": 128, "sweep_examples": 128},
    )
