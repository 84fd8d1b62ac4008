"""Version 2 of the grid `abilities`, with every registered encoding; among others, no test example
is in the training data.

Command: cope-jax sweep --grid=abilities_v2 --workdir=runs/abilities_v2
Hardware: any. Wall time: about a minute of one CPU core for each cell. experiments/RESULTS.md says
which were run.
"""

import functools
import runpy
from pathlib import Path

from cope_jax import encodings

abilities = runpy.run_path(str(Path(__file__).with_name("abilities.py")))
early = abilities["FIRST"] + abilities["SECOND"]
others = [name for name in encodings.names() if name not in early]
get_cells = functools.partial(abilities["get_cells"], "_v2", others)
