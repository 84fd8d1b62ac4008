"""Settings of papers at sizes that a CPU core trains in minutes, which no config of the package has.

    cope-jax compare --config=experiments/reproductions.py:parity --encodings=rope --workdir=runs/parity

experiments/RESULTS.md says what each paper has, what is smaller here, and what came out.
"""

from typing import Any

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment


def _decoder(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"num_layers": layers, "block": {"model_dim": width, "num_heads": heads}}


def _training(steps: int, batch_size: int) -> dict[str, Any]:
    return {"steps": steps, "batch_size": batch_size, **every(steps // 5)}


LSTM = {"embed_dim": 128, "hidden_dim": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    # Liu et al., arXiv 2306.00946: one layer of 128, a twentieth of the 10,000 steps of 16.
    "flip_flop_lstm": {
        "task": ("flip_flop", {"length": 512}),
        "model": {"name": "rnn_lm", "num_layers": 1, "carries": False, **LSTM},
        "encoding": "none",
        "optimizer": adamw(3e-3, 50, schedule="linear", weight_decay=0.1),
        "training": _training(500, 16),
    },
    # Grazzi et al., arXiv 2411.12537, E.1: two layers, four heads, decay 0.1.
    "parity": {
        "task": ("chomsky", {"problem": "parity_check", "length": 40}),
        "model": _decoder(2, 4, 64),
        "optimizer": adamw(2e-3, 100, weight_decay=0.1),
        "training": _training(1000, 32),
    },
}
VARIANTS = tuple(SETTINGS)


def get_config(setting: str = "parity") -> ConfigDict:
    """The config of one of the settings."""
    chosen = dict(SETTINGS[setting])
    task, options = chosen.pop("task")
    evaluation = {"examples": 1000, "curve_examples": 200, "sweep_examples": 0}
    return experiment(task, options, evaluation=evaluation, **chosen)
