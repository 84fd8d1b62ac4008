r"""A two-layer recurrent language model with tanh on the words of WikiText-2, CPU-sized: 9.6 M parameters.

Command:
    cope-jax train --config=rnn_wikitext2 \
        --config.task.options.data_dir=DATA --workdir=runs/rnn_wikitext2
Hardware: 2 CPU cores. Wall time and word perplexity: see experiments/RESULTS.md.
Expected: a perplexity far above the 102.5 (test) that two LSTM layers of width 200 reach with dropout in hundreds of
epochs, because this run reads less than one epoch, and trains with 1,024 sampled words.

`lstm_wikitext2.py` and `transformer_wikitext2.py` have the same number of parameters and the same batches.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "words",
        {"length": 35},
        model={
            "name": "rnn_lm",
            "cell": "tanh",
            "embed_dim": 280,
            "hidden_dim": 280,
            "tie_embeddings": True,
            "num_sampled": 1024,
        },
        encoding="none",
        optimizer={"learning_rate": 1e-3, "warmup_steps": 100, "final_fraction": 0.05, "weight_decay": 0.0},
        training={"steps": 1200, "batch_size": 32, "evaluate_every": 300, "checkpoint_every": 300},
        evaluation={"examples": 1_000_000, "curve_examples": 1024, "sweep_examples": 0, "batch_size": 32},
    )
