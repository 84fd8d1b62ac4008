r"""Navigation on a line, with one layer and one head: the task of MapFormer (arXiv 2511.19279,
B.3), CPU-sized.

Command:
    cope-jax compare --config=navigation --encodings=rope,cope,cope_signed,mapformer,path --seeds=1 \
        --workdir=runs/navigation_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
In two dimensions: --config.task.options.dimensions=2.

From the paper: task, 1 layer, 1 head of width 64, weight decay 0.05, linear decay. Our choice: rate
1e-3, batch 32 and 4,000 steps (the paper: 3e-4, 128 and 5,469), so 128,000 sequences in place of
700,000; 200 warm-up steps, gradient clipping at 1.
"""

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment


def get_config() -> ConfigDict:
    return experiment(
        "navigation",
        model={"num_layers": 1, "block": {"model_dim": 64, "num_heads": 1}},
        encodings={"cope": {"npos_max": 256}},
        optimizer=adamw(1e-3, 200, schedule="linear", weight_decay=0.05),
        training={"steps": 4000, "batch_size": 32, **every(1000)},
        evaluation={"examples": 500, "curve_examples": 200, "sweep_examples": 200},
        paper={
            "rope": {"in_distribution": "75", "dense": "60", "sparse": "84"},
            "cope": {"in_distribution": "37 (21)", "dense": "29 (21)", "sparse": "53 (22)"},
            "path": {"in_distribution": "1", "dense": "1", "sparse": "2"},
            "mapformer": {"in_distribution": "0", "dense": "0", "sparse": "0"},
        },
    )
