r"""BERT BASE (arXiv 1810.04805): 110 M parameters.

Command:
    cope-jax train --config=bert_base \
        --config.task.options.data_dir=DATA --workdir=runs/bert_base
Hardware: accelerators with 16 GB and more. Wall time: not measured; the original took 4 days on 16 TPU chips.
Expected: after training on 3.3 billion words (1,600 times WikiText-2), an accuracy of about 98 % on next sentences, and
a perplexity near 4 on masked pieces.

From the paper: 12 layers, width 768, 12 heads, a vocabulary of 30,522 pieces, sequences of 128 pieces, batch 256, AdamW
at 1e-4 with 10,000 steps of warm-up and linear decay over 1,000,000 steps, weight decay 0.01 except on biases and
norms, clipping at 1, dropout 0.1. In each sequence, 15 % of the pieces are masked, and at most 20. The paper trains the
last tenth of the steps on 512 pieces; here all steps have 128 pieces. The paper's Adam has no bias correction; ours has
a bias correction, like all later implementations.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "masked_lm",
        {"length": 128, "vocab_size": 30_522, "max_predictions": 20},
        model={
            "name": "bert",
            "num_layers": 12,
            "predictions": 20,
            "block": {"model_dim": 768, "num_heads": 12, "compute_dtype": "bfloat16"},
        },
        encoding="learned",
        optimizer={**base.BERT, "learning_rate": 1e-4, "warmup_steps": 10_000},
        training={"steps": 1_000_000, "batch_size": 256, "evaluate_every": 10_000, "checkpoint_every": 1000},
        evaluation={"examples": 4096, "curve_examples": 1024, "sweep_examples": 0, "batch_size": 256},
    )
