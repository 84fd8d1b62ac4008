r"""Selective copy: the recipes of CoPE (arXiv 2405.18719) and MapFormer (arXiv 2511.19279), and
CPU-sized.

`selective_copy` has 256 tokens among 256 blanks, as in CoPE's section 4.2:
    cope-jax compare --config=selective_copy --workdir=runs/selective_copy
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's figures next to ours.
From the paper: task, 2 layers, width 64, 2 heads, 100,000 steps. Our choice, because the paper does not say: batch,
initialisation, p_max, test size, optimizer, learning rate and weight decay. The last three come from MapFormer, which
reproduces CoPE on this task. We compare the paper's errors with our sequence errors, because the 100.0 ± 0.0 of the
paper's baselines cannot be token errors.

`selective_copy:mapformer` has 128 tokens among 128 blanks, as in MapFormer's appendix B.2:
    cope-jax compare --config=selective_copy:mapformer --encodings=rope,cope,path,mapformer --seeds=1 \
        --workdir=runs/selective_copy_mapformer
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: by the paper, CoPE, PaTH and MapFormer copy on every split, RoPE only with as many blanks as in training. Our
CoPE is still learning when the run ends, and MapFormer has hardly begun.
From the paper: task, 2 layers, 2 heads of width 64, 100,000 sequences (here 99,840), batch 64, AdamW with rate 2e-4 and
linear decay, weight decay 0.05. Our choice: no temperature of the softmax (the paper has 0.9), 100 warm-up steps,
gradient clipping at 1. The paper's figures are accuracies of tokens; here they are errors, in per cent.

`selective_copy:small` has 32 tokens among 32 blanks:
    cope-jax compare --config=selective_copy:small --workdir=runs/selective_copy_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: CoPE makes no error on any split. RoPE and relative learn the training length (sequence errors of 3 to 51 %)
and fail beyond it (80 to 100 %). Absolute learns more slowly and fails, too.
"""

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment

VARIANTS = ("paper", "mapformer", "small")


def get_config(variant: str = "paper") -> ConfigDict:
    return {"paper": _paper, "mapformer": _mapformer, "small": _small}[variant]()


def _paper() -> ConfigDict:
    return experiment(
        "selective_copy",
        {"num_tokens": 256, "num_blanks": 256},
        encodings={"cope": {"npos_max": 769}},
        optimizer=adamw(2e-4, 1000, weight_decay=0.05),
        training={"steps": 100_000, "steps_per_dispatch": 100, **every(5000)},
        evaluation={"examples": 25_000},  # the paper's 0.004 % is one sequence of these
        paper={
            "learned": {
                "in_distribution": "16.9 (3.7)",
                "dense": "25.6 (3.8)",
                "sparse": "85.2 (8.4)",
            },
            "rope": {"in_distribution": "40.1 (3.5)", "dense": "100.0 (0)", "sparse": "100.0 (0)"},
            "cope": {"in_distribution": "0.0 (0)", "dense": "0.0 (0)", "sparse": "0.004 (0.006)"},
        },
    )


def _mapformer() -> ConfigDict:
    return experiment(
        "selective_copy",
        {"num_symbols": 16, "num_tokens": 128, "num_blanks": 128},
        model={"block": {"model_dim": 128, "num_heads": 2}},
        encodings={"cope": {"npos_max": 385}},
        optimizer=adamw(2e-4, 100, schedule="linear", weight_decay=0.05),
        training={"steps": 1560, "batch_size": 64, **every(390)},
        evaluation={"examples": 500},
        paper={
            "rope": {"in_distribution": "0", "dense": "52", "sparse": "78"},
            "cope": {"in_distribution": "0", "dense": "0", "sparse": "0"},
            "path": {"in_distribution": "0", "dense": "0", "sparse": "0"},
            "mapformer": {"in_distribution": "0", "dense": "0", "sparse": "0"},
        },
    )


def _small() -> ConfigDict:
    return experiment(
        "selective_copy",
        {"num_tokens": 32, "num_blanks": 32},
        # Both tables end at the length of a training sequence: positions beyond it use the last
        # row.
        encodings={"cope": {"npos_max": 97}, "relative": {"max_distance": 96}},
        optimizer=adamw(4e-3, 100),
        training={"steps": 1200, "batch_size": 32, "evaluate_every": 200},
    )
