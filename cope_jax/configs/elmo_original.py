r"""ELMo at its original size (arXiv 1802.05365): 93.6 M parameters without the softmax.

Command:
    cope-jax train --config=elmo_original \
        --config.task.options.data_dir=DATA --workdir=runs/elmo_original
Hardware: accelerators. Wall time: not measured; the original took two weeks on three GPUs.
Expected: on the billion-word benchmark (370 times the text of WikiText-2), an average perplexity of 39.7.

From the published program: 2,048 filters, 4,096 cells projected to 512, cells and projections clipped at 3, dropout
0.1, words of 50 characters, 20 words from each of 384 texts in a step, 8,192 sampled words. The original used Adagrad
at 0.2, which this package does not offer; Adam at 1e-3 is our choice.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "bilm",
        {"length": 20, "max_characters": 50},
        model={"name": "elmo", "num_sampled": 8192},
        encoding="none",
        optimizer={"learning_rate": 1e-3, "warmup_steps": 1000, "weight_decay": 0.0, "clip_norm": 10.0},
        training={"steps": 100_000, "batch_size": 384, "evaluate_every": 5000, "checkpoint_every": 1000},
        evaluation={"examples": 8192, "curve_examples": 1024, "sweep_examples": 0, "batch_size": 128},
    )
