r"""ELMo: CPU-sized on WikiText-2 and the text of the treebank UD English EWT, and its original size
(arXiv 1802.05365).

`elmo` is CPU-sized:
    cope-jax train --config=elmo --config.task.options.data_dir=DATA --workdir=runs/elmo_small
Hardware: 2 CPU cores. Wall time and perplexities: see experiments/RESULTS.md.
The model has an eighth of the filters and half the cells of the published "small" model, and the same projection. Words
have at most 20 bytes. Training reads about one epoch of 2 million words, with Adam. The original training reads ten
epochs of 769 million words, with Adagrad.

`elmo:original` has 93.6 M parameters without the softmax:
    cope-jax train --config=elmo:original --config.task.options.data_dir=DATA --workdir=runs/elmo_original
Hardware: accelerators. Wall time: not measured; the original took two weeks on three GPUs.
Expected: on the billion-word benchmark (370 times the text of WikiText-2), an average perplexity of 39.7.
From the published program: 2,048 filters, 4,096 cells projected to 512, cells and projections clipped at 3, dropout
0.1, words of 50 characters, 20 words from each of 384 texts in a step, 8,192 sampled words. The original used Adagrad
at 0.2, which this package does not offer; Adam at 1e-3 is our choice.
"""

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment, measured

VARIANTS = ("small", "original")


def get_config(variant: str = "small") -> ConfigDict:
    if variant == "original":
        return experiment(
            "bilm",
            {"length": 20, "max_characters": 50},
            model={"name": "elmo", "num_sampled": 8192},
            encoding="none",
            optimizer=adamw(1e-3, 1000, weight_decay=0.0, clip_norm=10.0),
            training={"steps": 100_000, "batch_size": 384, **every(5000, checkpoints=1000)},
            evaluation=measured(8192, curve=1024, batch_size=128),
        )
    return experiment(
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
        optimizer=adamw(1e-3, 100, final_fraction=0.05, weight_decay=0.0),
        training={"steps": 3000, "batch_size": 32, "evaluate_every": 1000, "checkpoint_every": 500},
        evaluation=measured(4096, curve=1024, batch_size=32),
    )
