"""Selective copy of 256 tokens among 256 blanks: the paper's recipe (arXiv 2405.18719, section 4.2).

Command:
    cope-jax compare --config=selective_copy --workdir=runs/selective_copy
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's figures next to ours.

From the paper: task, 2 layers, width 64, 2 heads, 100,000 steps. Our choice, because the paper does not say: batch,
initialisation, p_max, test size, optimizer, learning rate and weight decay. The last three come from MapFormer (arXiv
2511.19279), which reproduces CoPE on this task. We compare the paper's errors with our sequence errors, because the
100.0 ± 0.0 of the paper's baselines cannot be token errors.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "selective_copy",
        {"num_tokens": 256, "num_blanks": 256},
        encodings={"cope": {"npos_max": 769}},
        optimizer={"learning_rate": 2e-4, "warmup_steps": 1000, "weight_decay": 0.05},
        training={"steps": 100_000, "steps_per_dispatch": 100, "evaluate_every": 5000, "checkpoint_every": 5000},
        evaluation={"examples": 25_000},  # the paper's 0.004 % is one sequence of these
        paper={
            "learned": {"in_distribution": "16.9 (3.7)", "dense": "25.6 (3.8)", "sparse": "85.2 (8.4)"},
            "rope": {"in_distribution": "40.1 (3.5)", "dense": "100.0 (0)", "sparse": "100.0 (0)"},
            "cope": {"in_distribution": "0.0 (0)", "dense": "0.0 (0)", "sparse": "0.004 (0.006)"},
        },
    )
