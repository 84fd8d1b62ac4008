r"""ELMo on WikiText-2 and the text of the treebank UD English EWT, CPU-sized.

Command:
    cope-jax train --config=elmo_small \
        --config.task.options.data_dir=DATA --workdir=runs/elmo_small
Hardware: 2 CPU cores. Wall time and perplexities: see experiments/RESULTS.md.

The model has an eighth of the filters and half the cells of the published "small" model, and the same projection. Words
have at most 20 bytes. Training reads about one epoch of 2 million words, with Adam. The original training reads ten
epochs of 769 million words, with Adagrad.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "bilm",
        {"corpus": "both", "length": 20, "vocab_size": 30_000, "max_characters": 20},
        model={
            "name": "elmo",
            "filters": ((1, 16), (2, 16), (3, 32), (4, 64), (5, 128)),
            "num_highways": 1,
            "max_characters": 20,
            "cell_dim": 512,
            "projection_dim": 128,
            "num_sampled": 1024,
        },
        encoding="none",
        optimizer={"learning_rate": 1e-3, "warmup_steps": 100, "final_fraction": 0.05, "weight_decay": 0.0},
        training={"steps": 3000, "batch_size": 32, "evaluate_every": 1000, "checkpoint_every": 500},
        evaluation={"examples": 4096, "curve_examples": 1024, "sweep_examples": 0, "batch_size": 32},
    )
