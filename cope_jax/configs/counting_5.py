r"""Counting with five variables: the paper's recipe, the same as in counting.py.

Command:
    cope-jax compare --config=counting_5 \
        --encodings=cope,relative,learned --workdir=runs/counting_5
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's figures next to ours.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("counting")
    config.task.options.num_variables = 5
    config.paper = {
        "learned": {"in_distribution": "71.5 (1.5)"},
        "relative": {"in_distribution": "22.4 (5.1)"},
        "cope": {"in_distribution": "7.4 (8.5)"},
    }
    return config
