"""Shows what a trained model attends to: heat maps and strips of coloured tokens.

A map is an array `[layers, heads, L, L]` for one input. Every model has the map `attention`, and
the encoding can add maps such as `gates`. Row i belongs to query i, and only columns j ≤ i are
valid.
"""

import dataclasses
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.style import Style
from rich.text import Text

from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import viewer
from cope_jax.evaluation.gates.head_scores import top_tokens
from cope_jax.evaluation.report.plot_style import (
    CHARACTER,
    COLOURS,
    COLUMN_WIDTH,
    STYLE,
    TEXT_WIDTH,
    add_caption,
    save,
)
from cope_jax.evaluation.report.table import FIRM, words
from cope_jax.generation.prompts import pad_left
from cope_jax.registry import checked

COLUMNS = 4  # panels side by side
LABEL = 0.085  # width of the label of a token, in inches
PER_ROW = 24  # tokens side by side in the picture of a query
PER_NAME = 0.05  # what a selection loses for each further name that describes it
NAMED = 6  # tokens whose mean gates are printed
# Colours from light to dark that terminals with 256 colours show exactly.
RAMP = ("ffffff", "d7d7ff", "afd7ff", "87afff", "5f87d7", "0087d7", "005faf", "000087")
NEGATIVE = ("ffffff", "ffd7d7", "ffafaf", "ff8787", "d75f5f", "d70000", "af0000", "870000")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The maps and the prediction of a model for one input."""

    tokens: tuple[str, ...]  # the input as text
    maps: dict[str, np.ndarray]  # by name, each float32 `[layers, heads, L, L]`
    query: int  # index of the inspected query, from 0
    layers: Sequence[int]  # numbers of the layers to show
    heads: Sequence[int]  # numbers of the heads to show
    predicted: str  # the most probable next token after the query
    probability: float  # the probability of the predicted token

    @property
    def shading(self) -> str:
        """The map that colours the strips: "gates" if the encoding has gates, else "attention"."""
        return "gates" if "gates" in self.maps else "attention"

    @property
    def best(self) -> "Selection":
        """The head that selects tokens most clearly."""
        return best_selection(self)

    def _repr_html_(self) -> str:
        """The viewer in a notebook: point at a token to see its gates, positions and attention."""
        return viewer.frame(self)


def inspect(
    model: Any,
    vocabulary: Sequence[str],
    tokens_L: Sequence[int] | np.ndarray,
    *,
    positions_BL: Any = None,
    query: int = -1,
    layer: int | None = None,
    head: int | None = None,
) -> Inspection:
    """Computes the maps of all layers and heads for one input, and the model's prediction.

    Every model has the map `attention`. CoPE adds `gates` and `positions`.

    >>> import cope_jax as cj
    >>> from flax import nnx
    >>> task = cj.tasks.create("flip_flop", length=8)
    >>> sizes = {"vocab_size": task.vocab_size, "max_length": 8, "num_layers": 1}
    >>> config = cj.models.decoder.DecoderConfig(**sizes, encoding=cj.encodings.EncodingConfig.parse("cope"))
    >>> model = cj.models.create("decoder", config, rngs=nnx.Rngs(0))
    >>> seen = cj.inspect(model, task.vocabulary, task.encode("w 0 i 1"))
    >>> {name: map.shape for name, map in sorted(seen.maps.items())}
    {'attention': (1, 2, 4, 4), 'gates': (1, 2, 4, 4), 'positions': (1, 2, 4, 4)}

    Args:
      model: a module like `cope_jax.models.decoder.Decoder`.
      vocabulary: text of each token.
      tokens_L: the input, int32.
      positions_BL: `[1, L]`. If None, positions are 0 … L−1.
      query: index of the query. A negative index counts from the end.
      layer: the only layer to show. If None, all layers are shown.
      head: the only head to show. If None, all heads are shown.

    Raises:
      ConfigError: there is no such query, layer or head.
    """
    if not hasattr(model, "maps"):
        attends = "choose a run of a model with attention"
        remedy = attends if isinstance(model, nnx.Module) else "pass cj.load(folder).model()"
        raise ConfigError(
            f"inspect.model must be a model with attention, got a {type(model).__name__}: {remedy}"
        )
    checked(vocabulary, Sequence, "vocabulary")
    layer, head = checked(layer, int | None, "layer"), checked(head, int | None, "head")
    tokens_BL, lengths = pad_left([tokens_L], min(model.config.vocab_size, len(vocabulary)))
    length = int(lengths[0])  # JSON has no integers of NumPy
    if not -length <= checked(query, int, "query") < length:
        raise ConfigError(
            f"query must be between {-length} and {length - 1} for {length} tokens, got {query}"
        )
    probabilities_V = jax.nn.softmax(model(tokens_BL, positions_BL=positions_BL)[0, query])
    seen = model.maps(tokens_BL, positions_BL=positions_BL)
    maps = {name: np.asarray(values[:, 0], np.float32) for name, values in seen.items()}
    num_layers, num_heads = maps["attention"].shape[:2]
    return Inspection(
        tokens=tuple(vocabulary[token] for token in tokens_BL[0]),
        maps=maps,
        query=query % length,
        layers=choose("layer", layer, num_layers),
        heads=choose("head", head, num_heads),
        predicted=vocabulary[int(jnp.argmax(probabilities_V))],
        probability=float(jnp.max(probabilities_V)),
    )


class Selection(NamedTuple):
    """The tokens that a head selects for the query by its gates, or else by its attention."""

    score: float  # how clearly it selects
    layer: int
    head: int
    tokens: frozenset[str]  # the different tokens with wide gates
    # The selection as text: what these and all other tokens add to the position of the first
    # token.
    says: str


def best_selection(seen: Inspection) -> Selection:
    """Finds the head that selects tokens most clearly.

    A head selects the tokens whose mean gate is above the middle between the highest and the lowest
    mean gate. The score of a head is the mean of the gates of selected tokens minus the mean of all
    other gates. A selection is described by the names of the selected tokens, or of the other
    tokens if these are fewer. Each name after the first lowers the score by `PER_NAME`.
    """
    tokens = seen.tokens[: seen.query + 1]
    added = "positions" if seen.shading == "gates" else "attention"
    selections = []
    for layer, head in itertools.product(seen.layers, seen.heads):
        row_M = seen.maps[seen.shading][layer, head, seen.query, : len(tokens)]
        means = dict(top_tokens(row_M, tokens, len(tokens), 1))
        middle = (max(means.values()) + min(means.values())) / 2
        wide = [token for token, mean in means.items() if mean > middle] or [*means]
        narrow = [token for token in means if token not in wide]
        chosen_M = np.isin(tokens, wide)
        difference = float(row_M[chosen_M].mean() - row_M[~chosen_M].mean()) if narrow else 0.0
        score = difference - PER_NAME * max(min(len(wide), len(narrow)) - 1, 0)
        names = "all but " * (len(narrow) < len(wide)) + _names(min(wide, narrow, key=len) or wide)
        sums = [float(row_M[of_M].sum()) for of_M in (chosen_M, ~chosen_M)]
        says = (
            f"layer {layer}, head {head}: {chosen_M.sum()} of {len(tokens)} tokens, {names}, add {sums[0]:.2f} to the "
            f"{added}, all others {sums[1]:.2f}"
        )
        selections.append(Selection(score, layer, head, frozenset(wide), says))
    return max(selections, key=lambda selection: selection.score)


def _names(tokens: Sequence[str]) -> str:
    return " ".join(repr(token) for token in tokens[:4]) + " …" * (len(tokens) > 4)


def strips(seen: Inspection, width: int, coloured: bool = True) -> Text:
    """Shows the tokens up to the query, for each layer and head, coloured by the query's gates; if
    not `coloured`, the gates are numbers below.

    Above the tokens are the widest and the narrowest mean gates of tokens. Below the tokens are the
    positions p_ij. For an encoding without gates, its attention divided by the strongest attention
    takes their place, and there are no positions. The first lines are the prediction, the head that
    selects best, and a legend of the colours or numbers.
    """
    tokens = seen.tokens[: seen.query + 1]
    gates = seen.shading == "gates"
    lines = [
        Text(
            f"query {seen.query} ({tokens[-1]}) predicts {seen.predicted} with probability {seen.probability:.2f}"
        ),
        Text(textwrap.fill(f"selects best: {best_selection(seen).says}", width)),
    ]
    shading = "gates" if gates else "attention, relative to the strongest"
    has_positions = "positions" in seen.maps
    if coloured:
        shown = legend(shading, bool(gates and seen.maps["gates"].min() < 0))
        lines.append(shown.append("; below the tokens: positions" * has_positions))
    else:
        lines.append(Text(f"below the tokens: {shading}{', then positions' * has_positions}"))
    for layer in seen.layers:
        for head in seen.heads:
            query = (layer, head, seen.query, slice(len(tokens)))
            rows = {name: values[query] for name, values in seen.maps.items()}
            shades_M = rows[seen.shading]
            shades_M = shades_M if gates else shades_M / (shades_M.max() or 1.0)
            mean_gates = top_tokens(rows[seen.shading], tokens, len(tokens), 1)
            means = [f"{token!r}{FIRM}{mean:.2f}" for token, mean in mean_gates]
            if len(means) > NAMED:
                means = [*means[: NAMED // 2], "…", *means[-NAMED // 2 :]]
            named = f"layer {layer}, head {head}"
            line = f"{named}  mean {seen.shading}: {', '.join(means)}"
            text = textwrap.fill(line, width, subsequent_indent="  ")
            lines.append(Text.assemble("\n", (text[: len(named)], "bold"), text[len(named) :]))
            numbers = [] if coloured else [[f"{shade:.2f}" for shade in shades_M]]
            if has_positions:
                numbers.append([f"{position:.1f}" for position in rows["positions"]])
            lines.append(strip(tokens, shades_M, numbers, width))
    return Text("\n").join(lines)


def legend(name: str, negative: bool = False) -> Text:
    """Shows `name`, and the colours of shades from 0 to 1, or from −1 to 1, in one line."""
    shades = (-1, -0.6, -0.2, 0, 0.2, 0.6, 1) if negative else (0, 0.2, 0.4, 0.6, 0.8, 1)
    cells = [(f" {shade:g} ", shade_style(shade)) for shade in shades]
    return Text.assemble(f"{name}: ", *cells)


def strip(
    tokens: Sequence[str],
    shades_M: np.ndarray,
    numbers: Sequence[Sequence[str]] = (),
    width: int = 100,
) -> Text:
    """Shows tokens in lines of `width` characters, with their shades in [−1, 1] as background and
    rows of `numbers` below.
    """
    lines: list[list[Text]] = []
    for token, shade, *below in zip(tokens, shades_M, *numbers, strict=True):
        size = max(len(text) for text in (token, *below)) + 1
        if not lines or lines[-1][0].cell_len + size > width:
            lines.append([Text() for _ in range(1 + len(below))])
        lines[-1][0].append(f"{token:<{size - 1}}", style=shade_style(float(shade))).append(" ")
        for row, number in zip(lines[-1][1:], below, strict=True):
            row.append(f"{number:<{size}}", style="dim")
    return Text("\n").join(row for line in lines for row in line)


def write_heat_maps(folder: Path, seen: Inspection, title: str = "") -> list[Path]:
    """Writes `query.png`, and the `heat_map` of each map as NAME.png; returns their paths."""
    heat_maps = [save(heat_map(seen, name, title), folder / f"{name}.png") for name in seen.maps]
    return [save(query_plot(seen, title), folder / "query.png"), *heat_maps]


@rc_context(STYLE)
def query_plot(seen: Inspection, title: str = "") -> Figure:
    """Plots the query's gates in the head that selects best, as bars, with positions p_ij above.

    A long input has several rows of bars. Bars of the tokens that the head selects are blue. For an
    encoding without gates, the bars show attention.
    """
    chosen, tokens = best_selection(seen), seen.tokens[: seen.query + 1]
    of_query = (chosen.layer, chosen.head, seen.query, slice(len(tokens)))
    rows = {name: map_LHQM[of_query] for name, map_LHQM in seen.maps.items()}
    lines = -(-len(tokens) // PER_ROW)
    columns = min(len(tokens), PER_ROW)
    longest = max(map(len, tokens))
    width = max(COLUMN_WIDTH, TEXT_WIDTH * columns / PER_ROW)
    size = (width, 1.1 + lines * (1.1 + 0.075 * longest))
    figure = Figure(figsize=size, layout="constrained")
    for number, axes in enumerate(figure.subplots(lines, 1, squeeze=False)[:, 0]):
        places = range(number * PER_ROW, min(len(tokens), (number + 1) * PER_ROW))
        colours = [COLOURS[0] if tokens[index] in chosen.tokens else "0.65" for index in places]
        axes.bar(places, rows[seen.shading][places.start : places.stop], 0.8, color=colours)
        named = [tokens[index] for index in places]
        axes.set_xticks(places, named, rotation=90 if longest > 2 else 0)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(places.start - 0.6, places.start + columns - 0.4)
        axes.set_ylim(min(0.0, float(rows[seen.shading].min())), 1)
        axes.set_ylabel(words(seen.shading).removesuffix("s"))
        if "positions" in rows:
            above = {"fontsize": 6, "color": "0.35", "transform": axes.get_xaxis_transform()}
            axes.text(places.start - 0.8, 1.06, "position", ha="right", **above)
            for index in places:
                axes.text(index, 1.06, f"{rows['positions'][index]:.1f}", ha="center", **above)
    axes.get_xticklabels()[-1].set_fontweight("bold")
    query = f"query {seen.query} {tokens[-1]!r} (bold) predicts {seen.predicted!r}, probability {seen.probability:.2f}"
    width = int(size[0] / (1.3 * CHARACTER))
    head = (textwrap.fill(line, width) for line in (title, query, chosen.says) if line)
    figure.suptitle("\n".join(head), fontsize=8)
    add_caption(
        figure,
        "blue: the tokens that this head selects; no other of these heads selects so clearly",
    )
    return figure


@rc_context(STYLE)
def heat_map(seen: Inspection, name: str, title: str = "") -> Figure:
    """Plots one map as a grid of panels, one for each layer and head, at most four side by side.

    A frame marks the row of the query. Keys after their query are blank. Tokens label the axes if
    the panels have room for them.
    """
    columns, length = min(len(seen.heads), COLUMNS), len(seen.tokens)
    lines = -(-len(seen.heads) // columns)  # of each layer
    side = float(np.clip(1.5 * LABEL * length, 1.6, (TEXT_WIDTH - 0.9) / columns))
    labels = seen.tokens if side >= LABEL * length else ()
    size = (max(COLUMN_WIDTH, side * columns + 0.9), (side + 0.25) * lines * len(seen.layers) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    shape = lines * len(seen.layers), columns
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    visible_LM = np.tril(np.ones((length, length), bool))
    shown = seen.maps[name][np.ix_(seen.layers, seen.heads)][..., visible_LM]
    scale = {"vmin": min(0.0, float(shown.min())), "vmax": max(1.0, float(shown.max()))}
    for layer, row in zip(seen.layers, panels.reshape(len(seen.layers), -1), strict=True):
        for axes in row[len(seen.heads) :]:
            axes.set_axis_off()
        for head, axes in zip(seen.heads, row, strict=False):
            values = np.where(visible_LM, seen.maps[name][layer, head], np.nan)
            image = axes.imshow(values, cmap="viridis", interpolation="nearest", **scale)
            axes.set_title(f"layer {layer}, head {head}", fontsize=7)
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5)
            axes.set_yticks(range(len(labels)), labels, fontsize=5)
            axes.tick_params(length=0, pad=1)
            corner = (-0.5, seen.query - 0.5)
            frame: dict[str, Any] = {"fill": False, "edgecolor": COLOURS[1], "linewidth": 0.8}
            axes.add_patch(Rectangle(corner, seen.query + 1, 1, **frame))
    figure.suptitle(title, fontsize=8)
    figure.supylabel("query", fontsize=8)
    shrink = min(1.0, 2.0 / (side * len(panels)))
    figure.colorbar(image, ax=panels, label=name, shrink=shrink, aspect=12)
    add_caption(figure, f"columns: keys; frame: query {seen.query} ({seen.tokens[seen.query]})")
    return figure


def choose(axis: str, number: int | None, count: int) -> Sequence[int]:
    """The layers or heads to show: only `number`, or all `count` if `number` is None.

    Raises ConfigError if there is no such layer or head.
    """
    if number is None:
        return range(count)
    if not 0 <= number < count:
        raise ConfigError(f"{axis} must be between 0 and {count - 1}, got {number}")
    return [number]


def shade_style(shade: float) -> Style:
    """The colour of a shade in [−1, 1], and of text on it, both exact on 256-colour terminals."""
    step = round(min(abs(float(shade)), 1.0) * (len(RAMP) - 1))
    colour = (RAMP if shade > 0 else NEGATIVE)[step]
    return Style(color="#ffffff" if step > 3 else "#000000", bgcolor=f"#{colour}")
