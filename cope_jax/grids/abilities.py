"""Published encodings on a small setting of each ability, with five seeds, and 25 seeds of flip-flop for
five encodings.

Command: cope-jax sweep --grid=abilities --workdir=runs/abilities
Hardware: any. Wall time: about a minute of one CPU core for each of the 1,695 cells.
experiments/RESULTS.md says which were run.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import cope_jax as cj
from cope_jax.configs.abilities import SETTINGS
from cope_jax.runs.grid.cell import Cell

FIRST = ("cope", "rope", "fox", "path", "stick_breaking")
"""The encodings that train first; they have many seeds on flip-flop, where seeds differ most."""

SECOND = ("none", "pope", "mapformer", "cope_signed", "alibi")
"""The encodings that train next, because papers compare with them."""

THIRD = (
    *("cable", "carope", "cope_two_sided", "dape", "darope", "fire", "grape", "grape_additive"),
    *("kerple", "learned", "learned_sink", "relative", "row_fox", "selective", "selective_rope"),
    *("sinusoidal", "t5", "tra", "wall"),
)
"""The other encodings of the published results. A new encoding does not join them, but those of
`abilities_v2`.
"""


def get_cells(
    suffix: str = "",
    third: Iterable[str] = THIRD,
    search: Mapping[str, tuple[Any, ...]] | None = None,
) -> Iterator[Cell]:
    """Yields the cells in the order in which they train; `suffix` selects a version of the
    settings, `third` are the encodings after the first two groups, and `search` is that of cells.
    """
    configs = {ability: cj.config(f"abilities:{ability}{suffix}") for ability in SETTINGS}
    for names in (FIRST, SECOND, third):
        for seed in range(25 if names is FIRST else 5):
            for name in names:
                for ability in SETTINGS if seed < 5 else ("ignore",):
                    config = configs[ability]
                    # Test examples differ too, so intervals cover their choice.
                    training = dataclasses.replace(config.training, data_seed=seed)
                    config = dataclasses.replace(config, encoding=name, training=training)
                    setting = ability + suffix
                    yield Cell(config, (seed,), setting=setting, search=search or {})
