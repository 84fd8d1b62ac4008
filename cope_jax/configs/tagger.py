r"""A BiLSTM tagger of parts of speech on a Universal Dependencies treebank, English EWT, CPU-sized.

Command:
    cope-jax tag --corpora_dir=DATA --models=runs/elmo_small,runs/bert_small --workdir=runs/tag
Hardware: 2 CPU cores. Wall time and accuracies: see experiments/RESULTS.md.
Expected: on the test set, tagging each word with its most frequent tag has an accuracy of 86.16 %; the BiLSTM of Plank
et al. has 95.16 % on an older version of this treebank.

The recipe is the one for named entities in ELMo's paper (arXiv 1802.05365, A.7), with one narrower layer and fewer
steps.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "tagging",
        {"length": 48},
        model={"name": "tagger", "word_dim": 100, "recurrent": (128,), "dropout": 0.5},
        encoding="none",
        optimizer={
            "learning_rate": 2e-3,
            "warmup_steps": 50,
            "final_fraction": 0.05,
            "clip_norm": 5.0,
            "weight_decay": 0.0,
        },
        training={"steps": 600, "batch_size": 32, "evaluate_every": 200, "checkpoint_every": 200},
        evaluation={"examples": 100_000, "curve_examples": 512, "sweep_examples": 0, "batch_size": 64},
    )
