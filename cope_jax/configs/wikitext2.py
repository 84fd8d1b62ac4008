r"""Language models of WikiText-2, CPU-sized: of pieces of words, and three of words with equally
many parameters.

Command:
    cope-jax train --config=wikitext2 --config.task.options.data_dir=DATA --workdir=runs/wikitext2_small
Hardware: 2 CPU cores. Wall time, and perplexity by token, word and byte: see experiments/RESULTS.md.

`wikitext2` is trained with 128 tokens of context, and tested with up to 1,024. The tokenizer is
byte-pair encoding of 2,048 tokens, learned from the training text. This text has 3.5 M tokens;
1,000 steps read 2.0 M of them. `relative` has a row for each distance in training, and repeats the
last row for longer distances, like the paper's "relative-capped"; `relative(beyond=nothing)` is the
paper's "relative".

`wikitext2:rnn`, `wikitext2:lstm` and `wikitext2:transformer` are two-layer models of words with 9.6
M parameters and the same batches: a recurrent one with tanh, an LSTM, and a Transformer. The state
of the first two reaches back beyond the 35 words of a window; the Transformer sees only the window.
Expected: a perplexity far above the 102.5 (test) that two LSTM layers of width 200 reach with
dropout in hundreds of epochs, because these runs read less than one epoch, and train with 1,024
sampled words.
"""

from typing import Any

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment, measured

WORDS: dict[str, dict[str, Any]] = {
    "rnn": {"name": "rnn_lm", "cell": "tanh", "embed_dim": 280, "hidden_dim": 280},
    "lstm": {"name": "rnn_lm", "cell": "lstm", "embed_dim": 256, "hidden_dim": 256},
    "transformer": {"num_layers": 2, "block": {"model_dim": 256, "num_heads": 4, "mlp_dim": 512}},
}
"""The models of words."""
VARIANTS = ("small", *WORDS)


def get_config(variant: str = "small") -> ConfigDict:
    if variant in WORDS:
        return experiment(
            "words",
            {"length": 35},
            model={**WORDS[variant], "tie_embeddings": True, "num_sampled": 1024},
            encoding="rope" if variant == "transformer" else "none",
            optimizer=adamw(1e-3, 100, final_fraction=0.05, weight_decay=0.0),
            training={"steps": 1200, "batch_size": 32, **every(300)},
            evaluation=measured(1_000_000, curve=1024, batch_size=32),
        )
    return experiment(
        "text",
        {"corpus": "wikitext-2", "vocab_size": 2048, "length": 128, "sweep": (128, 256, 512, 1024)},
        model={"num_layers": 3, "tie_embeddings": True, "block": {"model_dim": 64, "num_heads": 4}},
        encodings={"cope": {"npos_max": 64}, "relative": {"max_distance": 128}},
        optimizer=adamw(3e-3, 100, final_fraction=0.05, weight_decay=0.1),
        training={"steps": 1000, "batch_size": 16, **every(200)},
        evaluation=measured(100_000, curve=256, batch_size=16, sweep=128),
    )
