"""Flip-flop language modelling at length 512: the paper's recipe (arXiv 2405.18719, section 4.1).

Command:
    cope-jax compare --config=flip_flop --workdir=runs/flip_flop
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's numbers next to ours; the paper's "OOD" is the sparse split.

From the paper: task, 4 layers, width 256, 4 heads, 10,000 steps, AdamW with rate 3e-4, linear decay, betas (0.9,
0.999). From Liu et al. (arXiv 2306.00946), whom the paper follows: batch 16 (the paper's "8 GPUs with batch size 16"
may also mean 128), 50 warm-up steps, weight decay 0.1. Our choice: p_max 64, no dropout, unlimited new training data
(Liu et al. have 1.6 million sequences; this run would see a tenth of them), no gradient clipping.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "flip_flop",
        {"length": 512},
        model={"num_layers": 4, "block": {"model_dim": 256, "num_heads": 4}},
        encodings={"cope": {"npos_max": 64}},
        optimizer={
            "learning_rate": 3e-4,
            "schedule": "linear",
            "warmup_steps": 50,
            "weight_decay": 0.1,
            "clip_norm": None,
        },
        training={"steps": 10_000, "batch_size": 16, "steps_per_dispatch": 50, **base.every(500)},
        evaluation={"examples": 4000},
        paper={
            "learned": {"in_distribution": "6.8 (6.9)", "sparse": "21.7 (7.9)"},
            "rope": {"in_distribution": "1.8 (3.1)", "sparse": "20.3 (2.9)"},
            "cope": {"in_distribution": "0.03 (0.06)", "sparse": "4.9 (4.4)"},
        },
    )
