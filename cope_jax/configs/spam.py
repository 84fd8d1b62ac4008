r"""A classifier of spam on a pretrained BERT, CPU-sized.

Command:
    cope-jax classify --corpora_dir=DATA --model=runs/bert_small --workdir=runs/classify
Hardware: 2 CPU cores. Wall time and scores: see experiments/RESULTS.md.
Expected: TF-IDF with a linear SVM has an accuracy of about 99 % on the 5,171 different messages, and a small BERT is
not better.

`cope-jax classify` takes the sizes of the encoder from the pretrained model, and trains it frozen
and fine-tuned, once on each fold.
"""

from cope_jax.training.config_files import BERT, ConfigDict, adamw, experiment, measured


def get_config() -> ConfigDict:
    return experiment(
        "spam",
        {"length": 48, "folds": 5},
        model={"name": "bert_classifier"},
        encoding="learned",
        optimizer=adamw(5e-4, 25, **BERT),
        training={"steps": 250, "batch_size": 32, "evaluate_every": 0, "checkpoint_every": 250},
        evaluation=measured(100_000, curve=512, batch_size=64),
    )
