r"""A language model of source code, CPU-sized: the standard library of the running Python, in contexts of 128.

Command:
    python -m experiments.train --config=experiments/configs/code_small.py --workdir=runs/code_small
Hardware: 2 CPU cores. Wall time, and perplexity by token and byte: see experiments/RESULTS.md.

Byte-pair encoding of 2,048 tokens, learned from the training files, 3.4 M of them in Python 3.11, of which 1,000 steps
read 2.0 M; other versions have other files, so figures compare within one. Files are packed, so that no token sees
another file.
`--config.task.options.globs` names other files.
"""

from ml_collections import config_dict

from cope_jax.training import config_files as base


def get_config() -> config_dict.ConfigDict:
    """The config."""
    return base.experiment(
        "text",
        {
            "corpus": "code",
            "vocab_size": 2048,
            "length": 128,
            "packing": "documents",
            "sweep": (128, 256, 512, 1024),
        },
        model={
            "num_layers": 3,
            "tie_embeddings": True,
            "block": {"model_dim": 64, "num_heads": 4},
        },
        encodings={"cope": {"npos_max": 64}, "relative": {"max_distance": 128}},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 100, "final_fraction": 0.05, "weight_decay": 0.1},
        training={"steps": 1000, "batch_size": 16, "evaluate_every": 200, "checkpoint_every": 200},
        evaluation={"examples": 100_000, "curve_examples": 256, "sweep_examples": 128, "batch_size": 16},
    )
