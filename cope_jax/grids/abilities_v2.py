"""Version 2 of the grid `abilities`, with every registered encoding; among others, no test example
is in the training data.

Command: cope-jax sweep --grid=abilities_v2 --workdir=runs/abilities_v2
Hardware: any. Wall time: about a minute of one CPU core for each cell. experiments/RESULTS.md says
which were run.
"""

import functools

from cope_jax import encodings
from cope_jax.grids import abilities

others = [name for name in encodings.names() if name not in abilities.FIRST + abilities.SECOND]
get_cells = functools.partial(abilities.get_cells, "_v2", others)
