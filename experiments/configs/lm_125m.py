"""The paper's language model of WikiText-103: GPT-2 small's shape with CoPE (arXiv 2405.18719, section 5.4).

Command:
    python -m experiments.train --config=experiments/configs/lm_125m.py --workdir=runs/lm_125m
Hardware: a v5e-16 slice (topology v5e:4x4), or any GPU or TPU with 16 GB by a smaller batch. Wall time: not measured.
Expected: the loss falls to 7.57 nats, the entropy of the tokens; they are Zipf's, drawn independently; on
text this model is `wikitext103.py`, for which the paper has perplexity 23.46 (test), 22.55 (validation).

From the paper: 12 layers, width 768, context 1024, GPT-2's vocabulary and tied embeddings (123.7 M parameters), p_max
64 shared by the layers, batch 64, 100 epochs: 180,000 steps are as many tokens. It leaves the rest open. As GPT-2
small: 12 heads, dropout 0.1. Our choice: AdamW as GPT-3 (arXiv 2005.14165) has it for this size.

Every device has the parameters whole and its share of the batch, 4 sequences on each of 16.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "zipf",
        {"vocab_size": 50_257, "length": 1024},
        model={
            "num_layers": 12,
            "encoding_sharing": "model",
            "tie_embeddings": True,
            "block": {
                "model_dim": 768,
                "num_heads": 12,
                "dropout": 0.1,
                "compute_dtype": "bfloat16",
                "attention_blocks": (64, 256, 512),
            },
        },
        encodings={"cope": {"npos_max": 64}},
        optimizer={**base.GPT3, "learning_rate": 6e-4, "warmup_steps": 2000},
        training={"steps": 180_000, "batch_size": 64, "steps_per_dispatch": 10, **base.every(1000)},
        evaluation={"examples": 256, "curve_examples": 64, "sweep_examples": 0, "batch_size": 64},
    )
