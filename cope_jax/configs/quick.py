"""Selective copy of 16 tokens among 16 blanks, in minutes on a laptop: the result that a newcomer
should see.

Command: `make compare`, or
    cope-jax compare --config=quick --seeds=1 --workdir=runs/quick
Hardware: 2 CPU cores. Time: 1 to 3 minutes.
Expected sequence errors in distribution, dense and sparse: CoPE at most 1 % on each split in 18 of 20 seeds; RoPE 0,
100 and 100 %; relative 8, 72 and 98 %; absolute 37, 100 and 100 %. See experiments/RESULTS.md.
"""

from cope_jax.training.config_files import ConfigDict, adamw, experiment


def get_config() -> ConfigDict:
    return experiment(
        "selective_copy",
        {"num_tokens": 16, "num_blanks": 16},
        # Both tables end at the length of a training sequence: positions beyond it use the last
        # row.
        encodings={"cope": {"npos_max": 49}, "relative": {"max_distance": 48}},
        # Sparse needs a head that counts every symbol and no blank. With 4 heads, 2 of 20 seeds
        # have more than 2 % error; the three worst have no such head.
        model={"block": {"num_heads": 8, "head_dim": 32}},
        optimizer=adamw(4e-3, 100, beta2=0.98),
        training={"steps": 600, "batch_size": 32, "evaluate_every": 100},
        evaluation={"examples": 512, "curve_examples": 128, "sweep_examples": 128},
    )
