r"""Selective copy of 32 tokens among 32 blanks: the paper's task, CPU-sized.

Command:
    cope-jax compare --config=selective_copy_small \
        --workdir=runs/selective_copy_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: CoPE makes no error on any split. RoPE and relative learn the training length (sequence errors of 3 to 51 %)
and fail beyond it (80 to 100 %). Absolute learns more slowly and fails, too.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "selective_copy",
        {"num_tokens": 32, "num_blanks": 32},
        # Both tables end at the length of a training sequence: positions beyond it use the last row.
        encodings={"cope": {"npos_max": 97}, "relative": {"max_distance": 96}},
        optimizer={"learning_rate": 4e-3, "warmup_steps": 100},
        training={"steps": 1200, "batch_size": 32, "evaluate_every": 200},
    )
