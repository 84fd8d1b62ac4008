r"""Flip-flop language modelling at length 128: the paper's task, CPU-sized.

Command:
    cope-jax compare --config=flip_flop_small --seeds=5 \
        --workdir=runs/flip_flop_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: CoPE, RoPE and relative make almost no errors in distribution; absolute learns more slowly. On the sparse
split the error varies by an order of magnitude between seeds and within a run: look at the median and the worst seed.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "flip_flop",
        {"length": 128},
        encodings={"cope": {"npos_max": 64}},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 100, "final_fraction": 0.05},
        training={"steps": 1200, "batch_size": 32, "examples": 20_000, "evaluate_every": 200},
    )
