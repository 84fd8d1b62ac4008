r"""Flip-flop language modelling: the recipes of CoPE (arXiv 2405.18719) and PaTH (arXiv
2505.16381), and CPU-sized.

`flip_flop` has length 512, as in CoPE's section 4.1:
    cope-jax compare --config=flip_flop --workdir=runs/flip_flop
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's numbers next to ours; the paper's "OOD" is the sparse split.
From the paper: task, 4 layers, width 256, 4 heads, 10,000 steps, AdamW with rate 3e-4, linear decay, betas (0.9,
0.999). From Liu et al. (arXiv 2306.00946), whom the paper follows: batch 16 (the paper's "8 GPUs with batch size 16"
may also mean 128), 50 warm-up steps, weight decay 0.1. Our choice: p_max 64, no dropout, unlimited new training data
(Liu et al. have 1.6 million sequences; this run would see a tenth of them), no gradient clipping.

`flip_flop:one_layer` is the table of the PaTH paper:
    cope-jax compare --config=flip_flop:one_layer --encodings=rope,stick_breaking,fox,path,cope \
        --seeds=1 --workdir=runs/flip_flop_one_layer
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: PaTH has at most 0.1 % in distribution and on sparse; on dense 27 %, by its paper none.
The others err on the sparse split.
From the paper: task, 1 layer, 2 heads, width 64. The paper does not state the optimizer; this is the one of Liu et al.

`flip_flop:small` has length 128:
    cope-jax compare --config=flip_flop:small --seeds=5 --workdir=runs/flip_flop_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: CoPE, RoPE and relative make almost no errors in distribution; absolute learns more slowly. On the sparse
split the error varies by an order of magnitude between seeds and within a run: look at the median and the worst seed.
"""

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment

VARIANTS = ("paper", "one_layer", "small")


def get_config(variant: str = "paper") -> ConfigDict:
    if variant == "small":
        return experiment(
            "flip_flop",
            {"length": 128},
            encodings={"cope": {"npos_max": 64}},
            optimizer=adamw(1e-3, 100, final_fraction=0.05),
            training={"steps": 1200, "batch_size": 32, "examples": 20_000, "evaluate_every": 200},
        )
    config = experiment(
        "flip_flop",
        {"length": 512},
        model={"num_layers": 4, "block": {"model_dim": 256, "num_heads": 4}},
        encodings={"cope": {"npos_max": 64}},
        optimizer=adamw(3e-4, 50, schedule="linear", weight_decay=0.1, clip_norm=None),
        training={"steps": 10_000, "batch_size": 16, "steps_per_dispatch": 50, **every(500)},
        evaluation={"examples": 4000},
        paper={
            "learned": {"in_distribution": "6.8 (6.9)", "sparse": "21.7 (7.9)"},
            "rope": {"in_distribution": "1.8 (3.1)", "sparse": "20.3 (2.9)"},
            "cope": {"in_distribution": "0.03 (0.06)", "sparse": "4.9 (4.4)"},
        },
    )
    if variant == "one_layer":
        config.model.update({"num_layers": 1, "block": {"model_dim": 64, "num_heads": 2}})
        config.training.update({"steps_per_dispatch": 10, **every(1000)})
        config.evaluation.examples = 1000
        config.paper = {
            "rope": {"in_distribution": "6.9", "sparse": "40.3", "dense": "0.01"},
            "stick_breaking": {"in_distribution": "9.6", "sparse": "38.9", "dense": "0"},
            "fox": {"in_distribution": "8.3", "sparse": "36.3", "dense": "0"},
            "path": {"in_distribution": "0", "sparse": "0.0001", "dense": "0"},
        }
    return config
