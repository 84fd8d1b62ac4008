"""Version 2 of the grid `abilities`: among others, no test example is in the training data.

Command: cope-jax sweep --grid=abilities_v2 --workdir=runs/abilities_v2
Hardware: any. Wall time: about a minute of one CPU core for each cell. experiments/RESULTS.md says
which were run.
"""

import functools
import runpy
from pathlib import Path

abilities = runpy.run_path(str(Path(__file__).with_name("abilities.py")))
get_cells = functools.partial(abilities["get_cells"], "_v2")
