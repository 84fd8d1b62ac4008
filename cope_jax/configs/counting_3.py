r"""Counting with three variables: the paper's recipe, the same as in counting.py.

Command:
    cope-jax compare --config=counting_3 \
        --encodings=cope,relative,learned --workdir=runs/counting_3
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's figures next to ours.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("counting")
    config.task.options.num_variables = 3
    config.paper = {
        "learned": {"in_distribution": "67.6 (1.5)"},
        "relative": {"in_distribution": "17.8 (7.8)"},
        "cope": {"in_distribution": "1.2 (2.1)"},
    }
    return config
