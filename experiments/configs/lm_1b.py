"""A language model of 1.3 billion parameters, GPT-3 XL's shape with CoPE.

Command:
    python -m experiments.train --config=experiments/configs/lm_1b.py --workdir=runs/lm_1b
Hardware: a v5p-64 slice, 32 chips (topology v5p:2x4x4). Wall time: not measured.
Expected: the loss falls to 7.57 nats, the entropy of the tokens; they are Zipf's, drawn independently, until a corpus
is chosen.

24 layers of width 2048, context 2048 and a million tokens a step, as GPT-3 XL (arXiv 2005.14165, table 2.1), whose
optimizer it has too; 16 heads of 128, as many as fill the width. GPT-2's vocabulary, padded to a multiple of 128;
tied embeddings. 26 billion tokens, 20 for each parameter (arXiv 2203.15556).

The parameters are split over all devices, as the batch is; what lies between the products with matrices is computed
anew in the backward pass.
"""

from ml_collections import config_dict

from cope_jax.training import config_files as base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "zipf",
        {"vocab_size": 50_304, "length": 2048},
        model={
            "num_layers": 24,
            "encoding_sharing": "model",
            "remat": "dots",
            "tie_embeddings": True,
            "block": {
                "model_dim": 2048,
                "num_heads": 16,
                "mlp_dim": 8192,
                "compute_dtype": "bfloat16",
                "attention_blocks": (64, 256, 512),
            },
        },
        encodings={"cope": {"npos_max": 64}},
        optimizer={**base.GPT3, "learning_rate": 2e-4, "warmup_steps": 500},
        training={
            "steps": 25_000,
            "batch_size": 512,
            "steps_per_dispatch": 5,
            "evaluate_every": 500,
            "checkpoint_every": 250,
        },
        job={"mesh": {"data": 1, "fsdp": -1}},
        evaluation={"examples": 256, "curve_examples": 64, "sweep_examples": 0, "batch_size": 64},
    )
