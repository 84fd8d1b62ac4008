"""Shows what heads count in a text, as sentences, a table, a heat map and coloured text."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.style import Style
from rich.text import Text

from cope_jax.evaluation.gates.head_scores import HeadScore
from cope_jax.evaluation.gates.maps import shade_style, strip
from cope_jax.evaluation.report.plot_style import STYLE, add_caption, save
from cope_jax.evaluation.report.table import Table, figure

_NAMES = {
    "word start": "beginnings of words",
    "newline": "ends of lines",
    "sentence end": "ends of sentences",
    "digit": "digits",
    "bracket": "brackets",
}


def sentences(heads: Sequence[HeadScore], bound: float, most: int = 5) -> list[str]:
    """The findings as sentences: heads by feature, and details of the first `most` heads.

    `heads` are from `rank`, and `bound` is from `chance`. A head whose AUC does not exceed the
    bound cannot be distinguished from noise.
    """
    clear = [head for head in heads if head.best and head.aucs[head.best] > bound]
    lines = [
        f"The gates of {len(clear)} of {len(heads)} heads follow a feature of the text, more than chance explains "
        f"(AUC above {bound:.2f})."
    ]
    if clear:
        counts = Counter(head.best for head in clear).most_common()
        whose = "Its best feature" if len(clear) == 1 else "Their best features"
        features = ", ".join(f"{_named(name)} ({count})" for name, count in counts)
        lines.append(f"{whose}: {features}.")
    names = heads[0].aucs if heads else ()
    unseen = [_named(name) for name in names if all(head.best != name for head in clear)]
    if clear and unseen:
        lines.append(f"No head has {' or '.join(unseen)} as its best feature.")
    lines += [
        f"Layer {head.layer}, head {head.head}: the gates open wider for {_named(head.best)} than for other tokens in "
        f"{100 * head.aucs[head.best]:.0f} of 100 pairs; the mean gate is {head.mean_with:.2f} there and "
        f"{head.mean_without:.2f} elsewhere."
        for head in clear[:most]
    ]
    counting = sum(head.mean_with > 0.5 and head.mean_without < 0.1 for head in clear)
    lines.append(
        f"Nearly counting, with a mean gate above 0.5 there and below 0.1 elsewhere: {counting} of these heads."
        if clear
        else "No head counts any of these features."
    )
    return lines


def ranking(heads: Sequence[HeadScore], bound: float, tokens: Sequence[str]) -> Table:
    """Makes a table with a row for each head; rows of heads whose AUC exceeds the bound are bold.

    `heads` are from `rank`, and `bound` is from `chance`. `tokens` names the tokens with the widest
    gates of each head.
    """
    headings = [
        "layer",
        "head",
        "opens for",
        "AUC",
        "95 %",
        "gate there",
        "elsewhere",
        "by token",
        "widest for",
    ]
    rows, bold = [], []
    for number, (head, widest) in enumerate(zip(heads, tokens, strict=True)):
        value, (low, high) = head.aucs.get(head.best, float("nan")), head.interval
        means = [figure(mean) for mean in (head.mean_with, head.mean_without, head.identity)]
        interval = f"{figure(low, 3)}–{figure(high, 3)}"
        names = [str(head.layer), str(head.head), head.best]
        rows.append([*names, figure(value, 3), interval, *means, widest])
        bold += [(number, column) for column in range(len(headings)) if value > bound]
    return Table("", headings, rows, text_columns=len(headings), bold=bold)


def coloured(parts: Sequence[str], gates_L: np.ndarray) -> Text:
    """Colours the background of each piece of a text by its gate; shows line ends as ↵.

    A console breaks the lines between words.
    """
    text = Text()
    for piece, gate in zip(parts, gates_L, strict=True):
        text.append(piece.replace("\n", "↵"), style=shade_style(float(gate)))
        text.append("\n" * piece.count("\n"), style=Style())
    return text


def numbered(parts: Sequence[str], gates_L: np.ndarray, width: int) -> Text:
    """Shows the pieces of a text with their gates below, where there are no colours."""
    pieces = [piece.replace("\n", "↵") for piece in parts]
    return strip(pieces, gates_L, [[f"{gate:.2f}" for gate in gates_L]], width)


@rc_context(STYLE)
def feature_map(heads: Sequence[HeadScore], title: str = "") -> Figure:
    """Plots a heat map of AUCs, with a row for each head and a column for each feature.

    The last column shows the variance that the token explains. Undefined values are hatched.
    """
    ordered = sorted(heads, key=lambda head: (head.layer, head.head))
    names = [*ordered[0].aucs, "token"]
    values = np.array([[*head.aucs.values(), np.nan] for head in ordered])
    explained = np.array([[*(np.nan for _ in head.aucs), head.identity] for head in ordered])
    size = (0.5 * len(names) + 2.4, 0.2 * len(ordered) + 1.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    # Shows where there is no value.
    axes.patch.set(facecolor="0.93", edgecolor="0.6", hatch="//////", linewidth=0)
    shown = axes.imshow(values, cmap="RdBu_r", vmin=0, vmax=1, aspect="auto")
    share = axes.imshow(explained, cmap="Greens", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    labels = [f"layer {head.layer}, head {head.head}" for head in ordered]
    axes.set_yticks(range(len(ordered)), labels, fontsize=6)
    axes.tick_params(length=0)
    figure.colorbar(shown, ax=axes, label="AUC", shrink=0.8)
    figure.colorbar(share, ax=axes, label="variance explained by token", shrink=0.8)
    figure.suptitle(title, fontsize=8)
    add_caption(
        figure, "AUC 0.5: gates do not depend on the feature; hatched: no token has it, or all have"
    )
    return figure


def write(folder: Path, heads: Sequence[HeadScore], title: str = "") -> list[Path]:
    """Writes the ranking to `heads.csv`, and heads by features as a heat map to `features.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "heads.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        numbers = ("auc", "low", "high", "gate_there", "gate_elsewhere", "identity")
        features = (f"auc {name}" for name in heads[0].aucs)
        writer.writerow(["layer", "head", "best", *numbers, *features])
        for head in heads:
            best = head.aucs.get(head.best, float("nan"))
            means = (head.mean_with, head.mean_without, head.identity)
            values = (best, *head.interval, *means, *head.aucs.values())
            figures = (f"{value:.6g}" for value in values)
            writer.writerow([head.layer, head.head, head.best, *figures])
    return [folder / "heads.csv", save(feature_map(heads, title), folder / "features.png")]


def _named(feature: str) -> str:
    return _NAMES.get(feature, feature)
