r"""One small setting for each ability: what an encoding can learn in a minute or two of one CPU
core.

Command (the text after the colon is an ability):
    cope-jax compare --config=abilities:recall --encodings=cope,rope --workdir=runs/recall
All of them: cope-jax sweep --grid=abilities --workdir=runs/abilities
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.

New work should use version 2 of a setting, such as `abilities:parity_v2`. In version 1, which the
archived results have, many test examples are in the training data, a few questions of counting
cannot be answered, and on other splits the torus of navigation is smaller or larger than in
training: docs/tasks.md has the figures. Version 1 has the same data and recipes as ever.

The sizes and the recipe are our choice, and small: an encoding that fails here may learn the task
with more steps or layers. Models have two layers; those of flip-flop have one, as in PaTH's paper:
with two, CoPE, RoPE and `relative` make almost no error in distribution (at length 128).
"""

from typing import Any

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ignore": ("flip_flop", {"length": 64}),
    "count": ("counting", {"num_variables": 1, "max_operations": 48, "block_length": 48}),
    "recall": ("mqar", {"vocabulary": 64, "pairs": 4}),
    "occurrence": ("mqrar", {"back": 2, "keys": 4, "values": 8, "assignments": 32}),
    "steps": ("navigation", {"steps": 32, "side": 8, "objects": 8}),
    "state": ("group_words", {"group": "S3", "length": 8}),
    "parity": ("chomsky", {"problem": "parity_check", "length": 16}),
    "index": ("indirect_indexing", {"shortest": 4, "longest": 8, "shift": 2}),
    "stack": ("dyck", {"length": 24, "depth": 3}),
    "copy": ("copying", {"letters": 16}),
    "arithmetic": ("addition", {"digits": 2}),
}

CHANGED: dict[str, dict[str, Any]] = {
    "count": {"block_length": 96},  # no program is cut
    "recall": {"every": 2},  # the places of the published generator
    "steps": {"side": 32},  # no walk goes around the torus, whose size differs between splits
    "index": {"shortest": 2, "longest": 4, "shift": 1},  # shorter, so that more is learned
}
VERSION_2 = {
    f"{ability}_v2": (task, {**options, "held_out": 0.1, **CHANGED.get(ability, {})})
    for ability, (task, options) in SETTINGS.items()
}
VARIANTS = (*SETTINGS, *VERSION_2)


def get_config(ability: str = "recall") -> ConfigDict:
    task, options = (SETTINGS | VERSION_2)[ability]
    return experiment(
        task,
        options,
        model={
            "num_layers": 1 if ability.startswith("ignore") else 2,
            "block": {"model_dim": 64, "num_heads": 2},
        },
        optimizer=adamw(1e-3, 100, final_fraction=0.05),
        # Version 2 has a point each 100 steps, to read when a task is solved.
        training={
            "steps": 1500,
            "batch_size": 32,
            **every(100 if ability in VERSION_2 else 500, checkpoints=500),
        },
        evaluation={"examples": 500, "curve_examples": 200, "sweep_examples": 0},
    )
