"""Flip-flop language modelling with one layer: the table of the PaTH paper (arXiv 2505.16381).

Command:
    cope-jax compare --config=flip_flop_one_layer --encodings=rope,stick_breaking,fox,path,cope \
        --seeds=1 --workdir=runs/flip_flop_one_layer
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: PaTH makes no error; the others err on the sparse split.

From the paper: task, 1 layer, 2 heads, width 64. The paper does not state the optimizer; this is the one of Liu et al.
(arXiv 2306.00946): AdamW with rate 3e-4, linear decay, 50 warm-up steps, weight decay 0.1, batch 16, 10,000 steps. Our
choice: unlimited new training data, no gradient clipping, a table of 64 positions for CoPE.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("flip_flop")
    config.update(
        {
            "model": {"num_layers": 1, "block": {"model_dim": 64, "num_heads": 2}},
            "training": {"steps_per_dispatch": 10, **base.every(1000)},
            "evaluation": {"examples": 1000},
        }
    )
    config.paper = {
        "rope": {"in_distribution": "6.9", "sparse": "40.3", "dense": "0.01"},
        "stick_breaking": {"in_distribution": "9.6", "sparse": "38.9", "dense": "0"},
        "fox": {"in_distribution": "8.3", "sparse": "36.3", "dense": "0"},
        "path": {"in_distribution": "0", "sparse": "0.0001", "dense": "0"},
    }
    return config
