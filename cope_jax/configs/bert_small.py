r"""BERT on WikiText-2 and the text of the treebank UD English EWT, CPU-sized: masked words and next sentences.

Command:
    cope-jax train --config=bert_small \
        --config.task.options.data_dir=DATA --workdir=runs/bert_small
Hardware: 2 CPU cores. Wall time, and accuracies with context-free baselines: see experiments/RESULTS.md.

The model has three layers of the width of the published "tiny" model, 64 pieces per pair, and a vocabulary of 8,192
pieces learned from the text. The optimizer is the original's, with a higher rate and the usual bias correction. Two
other choices differ from the original: initial weights are wider, because the model is narrower, and positions are
RoPE's. In this short training, BERT's own position encoding (`--config.encoding=learned`) has no effect, as
experiments/RESULTS.md shows.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "masked_lm",
        {"corpus": "both", "length": 64, "vocab_size": 8192, "max_predictions": 10},
        model={
            "name": "bert",
            "num_layers": 3,
            "predictions": 10,
            "block": {"model_dim": 128, "num_heads": 2, "dropout": 0.0, "initial_stddev": 0.06},
        },
        encoding="rope",
        optimizer={**base.BERT, "learning_rate": 2e-3, "warmup_steps": 300},
        training={"steps": 8000, "batch_size": 32, "evaluate_every": 1000, "checkpoint_every": 500},
        evaluation={"examples": 2048, "curve_examples": 512, "sweep_examples": 0, "batch_size": 64},
    )
