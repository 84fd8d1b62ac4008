"""The tables of a grid as a picture; not with the texts, because Matplotlib takes long to import."""

import itertools
import math

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from cope_jax.evaluation.report.grid_cells import RANK, Tables, legend
from cope_jax.evaluation.report.plot_style import STYLE, add_caption
from cope_jax.evaluation.report.results_table import cell_text

COLOURS = LinearSegmentedColormap.from_list("errors", ["#66b0f2", "#f7fafc", "#f2a468"])
"""From blue to orange, which most colour-blind people tell apart."""
LETTER = 0.06  # mean width in inches of a letter in a heading


@rc_context(STYLE)
def picture(tables: Tables, title: str) -> Figure:
    """The tables as a picture, one next to the other; the colour of a cell is its error."""
    names, views = tables.encodings, len(tables.cells)
    widest = max(map(len, tables.cells.values()))
    longest, tallest = max(map(len, names)), max(map(len, itertools.chain(*tables.cells.values())))
    size = (
        max(1.2, 0.4 + LETTER * longest) + 0.42 * widest * views,
        max(1.0, 0.6 + LETTER * tallest) + 0.25 * len(names),
    )
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, views, sharey=True, squeeze=False)[0]
    for axes, (view, columns) in zip(panels, tables.cells.items(), strict=True):
        headings = [heading for heading in columns if heading != RANK]
        shown = [[columns[heading].get(name) for heading in headings] for name in names]
        means = [[cell and cell.mean for cell in row] for row in shown]
        values = [[math.nan if mean is None else mean for mean in row] for row in means]
        highest = 1 if tables.unit.symbol else None
        axes.imshow(np.array(values), COLOURS, vmin=0, vmax=highest, aspect="auto")
        axes.set_title(view)
        axes.set_xticks(range(len(headings)), headings, rotation=90)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        for row, cells in enumerate(shown):
            for column, cell in enumerate(cells):
                weight = "bold" if cell and cell.best else "normal"
                text = cell_text(cell).replace(" ± ", "\n± ")
                axes.text(column, row, text, ha="center", va="center", fontsize=5, weight=weight)
    add_caption(figure, legend(tables, "Bold"))
    return figure
