r"""Counting with one variable in programs of up to 512 operations: the paper's recipe (arXiv 2405.18719, section 4.3).

Command:
    cope-jax compare --config=counting --encodings=cope,relative,learned \
        --workdir=runs/counting
Hardware: one GPU or TPU (the paper: 8 GPUs). Wall time: not measured yet.
Expected: the table shows the paper's figures next to ours.

From the released code: 10,000 training sequences, 4 layers, width 256, 4 heads, post-norm, ReLU, tied embeddings,
dropout 0.1, blocks of 511 inputs and the answer, norms with ε = 1e-5, 100 epochs of batches of 64 (15,625 steps), Adam
with a constant rate of 7e-5, no clipping of positions, position logits divided by √K. Our choice: initialisation and no
gradient clipping.

It differs from the released code in two ways. There, all layers share the table of `relative`; here, each layer has its
own, as with CoPE (--config.model.encoding_sharing=model shares it). There, the MLP has a second dropout after the ReLU.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "counting",
        {"num_variables": 1, "block_length": 511},
        model={
            "num_layers": 4,
            "tie_embeddings": True,
            "block": {
                "model_dim": 256,
                "num_heads": 4,
                "norm_position": "post",
                "norm_epsilon": 1e-5,
                "activation": "relu",
                "dropout": 0.1,
            },
        },
        encodings={
            "cope": {"npos_max": 513, "scale_position_logits": True},
            "relative": {"scale_position_logits": True},
        },
        optimizer={"name": "adam", "learning_rate": 7e-5, "schedule": "constant", "warmup_steps": 0, "clip_norm": None},
        training={"steps": 15_625, "examples": 10_000, "steps_per_dispatch": 25, **base.every(625)},
        paper={
            "learned": {"in_distribution": "5.3 (0.8)"},
            "relative": {"in_distribution": "1.1 (0.4)", "pass_100": "8.8 (1.1)", "pass_10": "34.1 (2.5)"},
            "cope": {"in_distribution": "0.0 (0.0)", "pass_100": "0.0 (0.0)", "pass_10": "4.0 (4.1)"},
        },
    )
