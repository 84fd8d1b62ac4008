"""Counting with one variable in programs of up to 96 operations: the paper's task, CPU-sized.

Command:
    cope-jax compare --config=counting_small --workdir=runs/counting_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: all encodings learn the training distribution (errors: CoPE 0.1 %, absolute 3.4 %). With fewer `pass`
(pass_10), CoPE has the lowest error, about 10 %, and absolute the highest, about 40 %.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "counting",
        {"num_variables": 1, "max_operations": 96, "block_length": 96},
        model={"block": {"num_heads": 4}},
        encodings={"cope": {"npos_max": 64}},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 150, "final_fraction": 0.05},
        training={"steps": 1500, "batch_size": 32, "examples": 10_000, "evaluate_every": 300},
    )
