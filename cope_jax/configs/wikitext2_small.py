r"""A language model of WikiText-2, CPU-sized: trained with 128 tokens of context, tested with up to 1,024 tokens.

Command:
    cope-jax train --config=wikitext2_small \
        --config.task.options.data_dir=DATA --workdir=runs/wikitext2_small
Hardware: 2 CPU cores. Wall time, and perplexity by token, word and byte: see experiments/RESULTS.md.

The tokenizer is byte-pair encoding of 2,048 tokens, learned from the training text. This text has 3.5 M tokens; 1,000
steps read 2.0 M of them. `relative` has a row for each distance in training, and repeats the last row for longer
distances, like the paper's "relative-capped"; `relative(beyond=nothing)` is the paper's "relative".
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "text",
        {"corpus": "wikitext-2", "vocab_size": 2048, "length": 128, "sweep": (128, 256, 512, 1024)},
        model={"num_layers": 3, "tie_embeddings": True, "block": {"model_dim": 64, "num_heads": 4}},
        encodings={"cope": {"npos_max": 64}, "relative": {"max_distance": 128}},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 100, "final_fraction": 0.05, "weight_decay": 0.1},
        training={"steps": 1000, "batch_size": 16, "evaluate_every": 200, "checkpoint_every": 200},
        evaluation={"examples": 100_000, "curve_examples": 256, "sweep_examples": 128, "batch_size": 16},
    )
