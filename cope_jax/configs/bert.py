r"""BERT: CPU-sized on WikiText-2 and the text of the treebank UD English EWT, and BERT BASE (arXiv
1810.04805).

`bert` learns masked words and next sentences:
    cope-jax train --config=bert --config.task.options.data_dir=DATA --workdir=runs/bert_small
Hardware: 2 CPU cores. Wall time, and accuracies with context-free baselines: see experiments/RESULTS.md.
The model has three layers of the width of the published "tiny" model, 64 pieces per pair, and a vocabulary of 8,192
pieces learned from the text. The optimizer is the original's, with a higher rate and the usual bias correction. Two
other choices differ from the original: initial weights are wider, because the model is narrower, and positions are
RoPE's. In this short training, BERT's own position encoding (`--config.encoding=learned`) has no effect, as
experiments/RESULTS.md shows.

`bert:base` has 110 M parameters:
    cope-jax train --config=bert:base --config.task.options.data_dir=DATA --workdir=runs/bert_base
Hardware: accelerators with 16 GB and more. Wall time: not measured; the original took 4 days on 16 TPU chips.
Expected: after training on 3.3 billion words (1,600 times WikiText-2), an accuracy of about 98 % on next sentences, and
a perplexity near 4 on masked pieces.
From the paper: 12 layers, width 768, 12 heads, a vocabulary of 30,522 pieces, sequences of 128 pieces, batch 256, AdamW
at 1e-4 with 10,000 steps of warm-up and linear decay over 1,000,000 steps, weight decay 0.01 except on biases and
norms, clipping at 1, dropout 0.1. In each sequence, 15 % of the pieces are masked, and at most 20. The paper trains the
last tenth of the steps on 512 pieces; here all steps have 128 pieces. The paper's Adam has no bias correction; ours has
a bias correction, like all later implementations.
"""

from cope_jax.training.config_files import BERT, ConfigDict, adamw, every, experiment, measured

VARIANTS = ("small", "base")


def get_config(variant: str = "small") -> ConfigDict:
    if variant == "base":
        return experiment(
            "masked_lm",
            {"length": 128, "vocab_size": 30_522, "max_predictions": 20},
            model={
                "name": "bert",
                "num_layers": 12,
                "predictions": 20,
                "block": {"model_dim": 768, "num_heads": 12, "compute_dtype": "bfloat16"},
            },
            encoding="learned",
            optimizer=adamw(1e-4, 10_000, **BERT),
            training={"steps": 1_000_000, "batch_size": 256, **every(10_000, checkpoints=1000)},
            evaluation=measured(4096, curve=1024, batch_size=256),
        )
    return experiment(
        "masked_lm",
        {"corpus": "both", "length": 64, "vocab_size": 8192, "max_predictions": 10},
        model={
            "name": "bert",
            "num_layers": 3,
            "predictions": 10,
            "block": {"model_dim": 128, "num_heads": 2, "dropout": 0.0, "initial_stddev": 0.06},
        },
        encoding="rope",
        optimizer=adamw(2e-3, 300, **BERT),
        training={"steps": 8000, "batch_size": 32, "evaluate_every": 1000, "checkpoint_every": 500},
        evaluation=measured(2048, curve=512, batch_size=64),
    )
