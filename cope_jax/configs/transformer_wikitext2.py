r"""A two-layer Transformer language model on the words of WikiText-2, CPU-sized: 9.6 M parameters.

Command:
    cope-jax train --config=transformer_wikitext2 \
        --config.task.options.data_dir=DATA --workdir=runs/transformer_wikitext2
Hardware: 2 CPU cores. Wall time and word perplexity: see experiments/RESULTS.md.

`rnn_wikitext2.py` and `lstm_wikitext2.py` have the same number of parameters and the same batches. The state of those
two models reaches back beyond the 35 words of a window; this Transformer sees only the window.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    return base.experiment(
        "words",
        {"length": 35},
        model={
            "num_layers": 2,
            "tie_embeddings": True,
            "num_sampled": 1024,
            "block": {"model_dim": 256, "num_heads": 4, "mlp_dim": 512},
        },
        encoding="rope",
        optimizer={"learning_rate": 1e-3, "warmup_steps": 100, "final_fraction": 0.05, "weight_decay": 0.0},
        training={"steps": 1200, "batch_size": 32, "evaluate_every": 300, "checkpoint_every": 300},
        evaluation={"examples": 1_000_000, "curve_examples": 1024, "sweep_examples": 0, "batch_size": 32},
    )
