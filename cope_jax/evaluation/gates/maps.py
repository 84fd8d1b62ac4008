"""Shows what a trained model attends to: heat maps and strips of coloured tokens.

A map is an array `[layers, heads, L, L]` of one input: `attention`, and what the encoding names in its `maps`.
Row i belongs to query i, and only columns j ≤ i are valid.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from rich.style import Style
from rich.text import Text

from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates.head_scores import top_tokens
from cope_jax.evaluation.report.plot_style import STYLE, save

MOST_LABELS = 64  # labels of more tokens on the axes could not be read


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The maps and the prediction of a model for one input."""

    tokens: tuple[str, ...]  # the input as text
    maps: dict[str, np.ndarray]  # by name, each float32 `[layers, heads, L, L]`
    query: int  # index of the inspected query, from 0
    layers: Sequence[int]  # numbers of the layers to show
    heads: Sequence[int]  # numbers of the heads to show
    predicted: str  # the most probable next token after the query
    probability: float  # of that token

    @property
    def shading(self) -> str:
        """The map that colours the strips: the gates if the encoding has any, else the attention."""
        return "gates" if "gates" in self.maps else "attention"


def inspect(
    model: Any,
    vocabulary: Sequence[str],
    tokens_L: np.ndarray,
    *,
    positions_BL: Any = None,
    query: int = -1,
    layer: int | None = None,
    head: int | None = None,
) -> Inspection:
    """The gates, positions and attention of all layers and heads for one input, and the prediction of the model.

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
      tokens_L: int32.
      positions_BL: `[1, L]`; None is 0 … L−1.
      query: index of the query; negative counts from the end.
      layer: the only layer to show; None shows all.
      head: the only head to show; None shows all.

    Raises:
      ConfigError: no such query, layer or head.
    """
    length = len(tokens_L)
    if not -length <= query < length:
        raise ConfigError(f"query must be between {-length} and {length - 1} for {length} tokens, got {query}")
    tokens_BL = jnp.asarray(tokens_L)[None]
    probabilities_V = jax.nn.softmax(model(tokens_BL, positions_BL=positions_BL)[0, query])
    maps = {
        name: np.asarray(m[:, 0], np.float32) for name, m in model.maps(tokens_BL, positions_BL=positions_BL).items()
    }
    num_layers, num_heads = maps["attention"].shape[:2]
    return Inspection(
        tokens=tuple(vocabulary[token] for token in tokens_L),
        maps=maps,
        query=query % length,
        layers=choose("layer", layer, num_layers),
        heads=choose("head", head, num_heads),
        predicted=vocabulary[int(jnp.argmax(probabilities_V))],
        probability=float(jnp.max(probabilities_V)),
    )


def strips(seen: Inspection, width: int) -> Text:
    """For each layer and head, the tokens up to the query, coloured by the query's gates.

    Positions p_ij are below the tokens, and the mean gate of each different token is above. An encoding without gates
    shows its attention instead, relative to the strongest, and no positions.
    """
    tokens = seen.tokens[: seen.query + 1]
    lines = [
        Text(f"query {seen.query} ({tokens[-1]}) predicts {seen.predicted} with probability {seen.probability:.2f}")
    ]
    for layer in seen.layers:
        for head in seen.heads:
            rows = {name: values[layer, head, seen.query, : len(tokens)] for name, values in seen.maps.items()}
            shades_M = rows[seen.shading] if seen.shading == "gates" else rows[seen.shading] / rows[seen.shading].max()
            means = ", ".join(
                f"{token} {mean:.2f}" for token, mean in top_tokens(rows[seen.shading], tokens, len(tokens), 1)
            )
            lines.append(Text.assemble((f"\nlayer {layer}, head {head}", "bold"), f"  mean {seen.shading}: {means}"))
            lines.append(strip(tokens, shades_M, rows.get("positions"), width))
    return Text("\n").join(lines)


def strip(tokens: Sequence[str], shades_M: np.ndarray, numbers_M: np.ndarray | None = None, width: int = 100) -> Text:
    """Tokens in lines of `width` characters, each on a background of its shade in [0, 1], with numbers below."""
    below = [""] * len(tokens) if numbers_M is None else [f"{number:.1f}" for number in numbers_M]
    lines: list[tuple[Text, Text]] = []
    for token, shade, number in zip(tokens, shades_M, below, strict=True):
        size = max(len(token), len(number)) + 1
        if not lines or lines[-1][0].cell_len + size > width:
            lines.append((Text(), Text()))
        lines[-1][0].append(f"{token:<{size - 1}}", style=shade_style(float(shade))).append(" ")
        lines[-1][1].append(f"{number:<{size}}", style="dim")
    rows = [row for line in lines for row in (line if numbers_M is not None else line[:1])]
    return Text("\n").join(rows)


def write_heat_maps(folder: Path, seen: Inspection) -> list[Path]:
    """Writes a PNG file for each map, with the chosen layers and heads, and returns the paths of the files."""
    return [save(heat_map(seen, name), folder / f"{name}.png") for name in seen.maps]


@rc_context(STYLE)
def heat_map(seen: Inspection, name: str) -> Figure:
    """One map as a grid of panels, layers downwards and heads to the right; pairs hidden by causality are blank."""
    tokens, layers, heads = seen.tokens, seen.layers, seen.heads
    map_NHLM = seen.maps[name][np.ix_(layers, heads)]
    length, labelled = len(tokens), len(tokens) <= MOST_LABELS
    side = max(1.6, 0.11 * length) if labelled else 2.4
    figure = Figure(figsize=(side * len(heads) + 1.2, side * len(layers) + 0.8), layout="constrained")
    panels = figure.subplots(len(layers), len(heads), sharex=True, sharey=True, squeeze=False)
    visible_LM = np.tril(np.ones((length, length), bool))
    shown = map_NHLM[..., visible_LM]
    scale = {"vmin": min(0.0, float(shown.min())), "vmax": max(1.0, float(shown.max()))}
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            axes, values = panels[row, column], np.where(visible_LM, map_NHLM[row, column], np.nan)
            image = axes.imshow(values, cmap="viridis", interpolation="nearest", **scale)
            axes.set_title(f"layer {layer}, head {head}", fontsize=7)
            if labelled:
                axes.set_xticks(range(length), tokens, rotation=90, fontsize=5)
                axes.set_yticks(range(length), tokens, fontsize=5)
            axes.tick_params(length=0, pad=1)
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    figure.colorbar(image, ax=panels, label=name, shrink=min(1.0, 2.0 / (side * len(layers))), aspect=12)
    return figure


def choose(what: str, number: int | None, count: int) -> Sequence[int]:
    """The layers or heads to show: one, or all. ConfigError: no such layer or head."""
    if number is None:
        return range(count)
    if not 0 <= number < count:
        raise ConfigError(f"{what} must be between 0 and {count - 1}, got {number}")
    return [number]


def shade_style(shade: float) -> Style:
    """The background colour of a shade in [0, 1], with a readable text colour."""
    red, green, blue, _ = colormaps["Blues"](np.clip(shade, 0.0, 1.0), bytes=True)
    return Style(color="white" if shade > 0.6 else "black", bgcolor=f"rgb({red},{green},{blue})")
