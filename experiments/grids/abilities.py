"""All encodings on a small setting of each ability, with five seeds, and 25 seeds of flip-flop for
five encodings.

Command: cope-jax sweep --grid=abilities --workdir=runs/abilities
Hardware: any. Wall time: about a minute of one CPU core for each of the 1,695 cells.
experiments/RESULTS.md says which were run.
"""

import dataclasses
from collections.abc import Iterator

import cope_jax as cj
from cope_jax import encodings
from cope_jax.configs.abilities import SETTINGS
from cope_jax.runs.grid.cell import Cell

FIRST = ("cope", "rope", "fox", "path", "stick_breaking")
"""The encodings that train first; they have many seeds on flip-flop, where seeds differ most."""

SECOND = ("none", "pope", "mapformer", "cope_signed", "alibi")
"""The encodings that train next, because papers compare with them; then the others."""


def get_cells(suffix: str = "") -> Iterator[Cell]:
    """Yields the cells in the order in which they train; `suffix` selects a version of the
    settings.
    """
    configs = {ability: cj.config(f"abilities:{ability}{suffix}") for ability in SETTINGS}
    others = [name for name in encodings.names() if name not in FIRST + SECOND]
    for names in (FIRST, SECOND, others):
        for seed in range(25 if names is FIRST else 5):
            for name in names:
                for ability in SETTINGS if seed < 5 else ("ignore",):
                    config = configs[ability]
                    # Test examples differ too, so intervals cover their choice.
                    training = dataclasses.replace(config.training, data_seed=seed)
                    config = dataclasses.replace(config, encoding=name, training=training)
                    yield Cell(config, (seed,), setting=ability + suffix)
