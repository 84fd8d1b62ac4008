"""A tagger of parts of speech on a pretrained BERT, CPU-sized: see `tagger.py`.

`cope-jax tag` takes the sizes of the encoder from the pretrained model, and trains it frozen and fine-tuned. Devlin
et al. (arXiv 1810.04805) fine-tune for 2 to 4 epochs at 2e-5 to 5e-5; a model as small as ours needs a higher rate.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "tagging",
        {"length": 48, "max_pieces": 64},
        model={"name": "bert_tagger"},
        encoding="learned",
        optimizer={**base.BERT, "learning_rate": 5e-4, "warmup_steps": 60},
        training={"steps": 600, "batch_size": 32, "evaluate_every": 200, "checkpoint_every": 200},
        evaluation={"examples": 100_000, "curve_examples": 512, "sweep_examples": 0, "batch_size": 64},
    )
