"""Selective copy of 128 tokens among 128 blanks: the recipe of MapFormer (arXiv 2511.19279, appendix B.2).

Command:
    cope-jax compare --config=selective_copy_mapformer --encodings=rope,cope,path,mapformer --seeds=1 \
        --workdir=runs/selective_copy_mapformer
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Expected: by the paper, CoPE, PaTH and MapFormer copy on every split, RoPE only with as many blanks as in training. Our
CoPE is still learning when the run ends, and MapFormer has hardly begun.

From the paper: task, 2 layers, 2 heads of width 64, 100,000 sequences (here 99,840), batch 64, AdamW with rate 2e-4 and
linear decay, weight decay 0.05. Our choice: no temperature of the softmax (the paper has 0.9), 100 warm-up steps,
gradient clipping at 1. The paper's figures are accuracies of tokens; here they are errors, in per cent.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "selective_copy",
        {"num_symbols": 16, "num_tokens": 128, "num_blanks": 128},
        model={"block": {"model_dim": 128, "num_heads": 2}},
        encodings={"cope": {"npos_max": 385}},
        optimizer={"learning_rate": 2e-4, "schedule": "linear", "warmup_steps": 100, "weight_decay": 0.05},
        training={"steps": 1560, "batch_size": 64, **base.every(390)},
        evaluation={"examples": 500},
        paper={
            "rope": {"in_distribution": "0", "dense": "52", "sparse": "78"},
            "cope": {"in_distribution": "0", "dense": "0", "sparse": "0"},
            "path": {"in_distribution": "0", "dense": "0", "sparse": "0"},
            "mapformer": {"in_distribution": "0", "dense": "0", "sparse": "0"},
        },
    )
