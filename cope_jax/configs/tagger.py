r"""Taggers of parts of speech on a Universal Dependencies treebank, English EWT: a BiLSTM, and a
head on BERT.

Command:
    cope-jax tag --corpora_dir=DATA --models=runs/elmo_small,runs/bert_small --workdir=runs/tag
Hardware: 2 CPU cores. Wall time and accuracies: see experiments/RESULTS.md.
Expected: on the test set, tagging each word with its most frequent tag has an accuracy of 86.16 %; the BiLSTM of Plank
et al. has 95.16 % on an older version of this treebank.

`tagger` is the BiLSTM. The recipe is the one for named entities in ELMo's paper (arXiv 1802.05365,
A.7), with one narrower layer and fewer steps. `tagger:bert` is a head on a pretrained BERT.
`cope-jax tag` takes the sizes of the encoder from the pretrained model, and trains it frozen and
fine-tuned. Devlin et al. (arXiv 1810.04805) fine-tune for 2 to 4 epochs at 2e-5 to 5e-5; a model as
small as ours needs a higher rate.
"""

from typing import Any

from cope_jax.training.config_files import BERT, ConfigDict, adamw, every, experiment, measured

LSTM: dict[str, Any] = {
    "model": {"name": "tagger", "word_dim": 100, "recurrent": (128,), "dropout": 0.5},
    "encoding": "none",
    "optimizer": adamw(2e-3, 50, final_fraction=0.05, clip_norm=5.0, weight_decay=0.0),
}
ON_BERT: dict[str, Any] = {
    "model": {"name": "bert_tagger"},
    "encoding": "learned",
    "optimizer": adamw(5e-4, 60, **BERT),
}
VARIANTS = ("lstm", "bert")


def get_config(variant: str = "lstm") -> ConfigDict:
    return experiment(
        "tagging",
        {"length": 48, "max_pieces": 64} if variant == "bert" else {"length": 48},
        training={"steps": 600, "batch_size": 32, **every(200)},
        evaluation=measured(100_000, curve=512, batch_size=64),
        **(ON_BERT if variant == "bert" else LSTM),
    )
