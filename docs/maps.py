r"""Draws what every encoding attends to in one counting program and one line: maps_*.png here.

The models are trained first, one for each encoding, on 1 CPU core in about 25 minutes:

names=$(python -c "import cope_jax as cj; print(','.join(cj.encodings.names()))")
cope-jax compare --config=counting:small --encodings=$names --seeds=1 --workdir=runs/maps/counting \
    --config.training.steps=600 --config.training.evaluate_every=600 \
    --config.evaluation.sweep_examples=0
cope-jax compare --config=shakespeare --encodings=$names --seeds=1 --workdir=runs/maps/sentence \
    --config.task.options.length=64 --config.model.num_layers=2 --config.model.block.model_dim=64 \
    --config.training.steps=400 --config.training.evaluate_every=400 \
    --config.training.checkpoint_every=400 --config.evaluation.sweep_examples=0
python docs/maps.py runs/maps
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import cope_jax as cj

INPUTS = {
    "counting": "a = 0 ; pass; a ++; pass; pass; a ++; a = 0 ; "
    "pass; a ++; pass; a ++; a ++; pass; print a",
    "sentence": "To be, or not to be, that is the question",
}
KNOWS = {
    "nothing": ["none", "learned_sink"],
    "place": ["learned", "sinusoidal", "relative", "rope", "pope", "alibi", "t5", "kerple", "fire"],
    "token": [
        "fox",
        "cable",
        "carope",
        "grape",
        "grape_additive",
        "mapformer",
        "selective_rope",
        "darope",
        "path",
        "wall",
    ],
    "pair": [
        "cope",
        "cope_two_sided",
        "cope_signed",
        "row_fox",
        "tra",
        "stick_breaking",
        "selective",
        "dape",
    ],
}
COLOURS = {"nothing": "gray", "place": "tab:blue", "token": "tab:green", "pair": "tab:red"}


def attention(folder: Path, text: str) -> tuple[list[str], np.ndarray]:
    """The words of the text, and the mean attention a_LM of its tokens over layers and heads."""
    run = cj.load(folder)
    tokens = run.codec.encode(text)
    seen = cj.inspect(run.model(), [str(token) for token in range(run.config.vocab_size)], tokens)
    return seen.tokens, np.asarray(seen.maps["attention"]).mean((0, 1))


def draw(workdir: Path, name: str) -> None:
    """Writes maps_NAME.png: a small picture for each encoding."""
    figure, axes = plt.subplots(4, 10, figsize=(20, 8.6), layout="constrained")
    for row, (knows, encodings) in zip(axes, KNOWS.items(), strict=True):
        for cell, encoding in zip(row, encodings, strict=False):
            tokens, map_LM = attention(workdir / name / "cells" / encoding / "seed_0", INPUTS[name])
            cell.imshow(np.sqrt(map_LM), cmap="magma", vmin=0, vmax=1)
            cell.set_title(encoding, color=COLOURS[knows], fontsize=11)
        for cell in row:
            cell.set_axis_off()
        row[0].text(
            -0.15,
            0.5,
            knows,
            transform=row[0].transAxes,
            rotation=90,
            va="center",
            color=COLOURS[knows],
        )
    size = len(tokens)
    figure.suptitle(
        f"√ of the attention of {size} tokens (rows) to {size} tokens (columns): {INPUTS[name]}",
        fontsize=11,
    )
    figure.savefig(Path(__file__).with_name(f"maps_{name}.png"), dpi=80)


if __name__ == "__main__":
    for name in INPUTS:
        draw(Path(sys.argv[1]), name)
