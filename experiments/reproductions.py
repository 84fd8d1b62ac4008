"""Settings of papers at sizes that a CPU core trains in minutes, which no config of the package has.

    cope-jax compare --config=experiments/reproductions.py:parity --encodings=rope --workdir=runs/parity
    cope-jax sweep --grid=experiments/reproductions.py --workdir=runs/turned

experiments/RESULTS.md says what each paper has, what is smaller here, and what came out.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cope_jax as cj
from cope_jax.runs.grid.cell import Cell
from cope_jax.training.config_files import ConfigDict, adamw, every, experiment, measured


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


TURNED = ("rope", "none", "alibi", "random_steps", "mapformer")
"""Encodings of the grid; the two that add up angles also turn values, and go with `alibi`."""


def get_cells() -> Iterator[Cell]:
    """Yields the cells for the claims of arXiv 2606.24975 on angles that tokens add up.

    The folder DATA of the current folder needs tinyshakespeare.
    """
    cj.encodings.load(Path(__file__).with_name("random_steps.py"))
    added = TURNED[-2:]
    turned = [f"{name}(values=True)" for name in added]
    controlled = [f"{name}+alibi" for name in (*added, *turned)]
    config = cj.config(
        "shakespeare",
        task={"options": {"data_dir": "DATA", "length": 128, "sweep": (1024, 4096)}},
        model={"num_layers": 2, "block": {"model_dim": 64}},
        training={"batch_size": 8, "steps": 1500, **every(500)},
        evaluation=measured(100_000, curve=128, batch_size=8, sweep=27),
    )
    for seed in range(5):
        for name in (*TURNED, *turned, *controlled):
            yield Cell(dataclasses.replace(config, encoding=name), (seed,))
