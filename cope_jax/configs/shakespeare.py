r"""A language model of Shakespeare's plays, one byte at a time: the trained model "shakespeare" of
the package.

Command:
    cope-jax train --config=shakespeare \
        --config.task.options.data_dir=DATA --config.encoding=cope --workdir=runs/shakespeare
Hardware: 2 CPU cores. Wall time and bits per byte: see experiments/RESULTS.md.

Tokens are bytes, so the model itself must find out where words and lines end, and its gates can
count words and lines. With three layers of width 96 the parameters take 1.4 MB.
"""

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment


def get_config() -> ConfigDict:
    return experiment(
        "text",
        {"corpus": "tinyshakespeare", "tokenizer": "bytes", "length": 256},
        model={"num_layers": 3, "tie_embeddings": True, "block": {"model_dim": 96, "num_heads": 4}},
        encodings={"cope": {"npos_max": 64}},
        optimizer=adamw(3e-3, 100, final_fraction=0.05, weight_decay=0.1),
        training={"steps": 2000, "batch_size": 16, **every(500)},
        evaluation={"examples": 100_000, "curve_examples": 128, "batch_size": 16},
    )
