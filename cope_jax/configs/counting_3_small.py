"""Counting with three variables in programs of up to 96 operations: the paper's task, CPU-sized.

Command:
    cope-jax compare --config=counting_3_small --workdir=runs/counting_3_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: CoPE's error is the lowest. No encoding is trained to convergence.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("counting_small")
    config.task.options.num_variables = 3
    return config
