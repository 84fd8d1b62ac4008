"""A page in which a reader points at a token to see what each head counts and attends to."""

import html
import importlib.resources
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cope_jax.runs.records import finite
from cope_jax.storage.files import write_atomically

if TYPE_CHECKING:
    from cope_jax.evaluation.gates.maps import Inspection  # whose notebook view is made here

LONGEST = 256
"""The maximum number of tokens in a page, whose size grows with their square."""

FIRST = ("gates", "attention", "positions")


def write(path: Path, seen: "Inspection", title: str) -> Path:
    """Writes the `page` to a file, and returns its path."""
    return write_atomically(path, page(seen, title))


def page(seen: "Inspection", title: str) -> str:
    """The page as HTML, with all that it needs, so that it works without a network.

    Of an input with more than 256 tokens, it shows 256, up to the query if that is later.
    """
    end = max(seen.query + 1, min(len(seen.tokens), LONGEST))
    shown = slice(max(0, end - LONGEST), end)
    best = seen.best
    lower = np.tril_indices(end - shown.start)
    content = {
        "tokens": seen.tokens[shown],
        "query": seen.query - shown.start,
        "predicts": f"predicts {seen.predicted} with probability {seen.probability:.2f}",
        "best": [seen.layers.index(best.layer), seen.heads.index(best.head)],
        "layers": list(seen.layers),
        "heads": list(seen.heads),
        "shading": seen.shading,
        "maps": {
            name: [
                [_rounded(seen.maps[name][layer, head, shown, shown][lower]) for head in seen.heads]
                for layer in seen.layers
            ]
            for name in sorted(
                seen.maps, key=lambda name: (name not in FIRST, name in FIRST and FIRST.index(name))
            )
        },
    }
    text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    data = text.replace("<", "\\u003c")
    text, style, script = (
        (importlib.resources.files(__package__) / f"viewer.{kind}").read_text(encoding="utf-8")
        for kind in ("html", "css", "js")
    )
    text = text.replace("@@STYLE@@", style).replace("@@SCRIPT@@", script)
    return text.replace("@@TITLE@@", html.escape(title)).replace("@@DATA@@", data)


def frame(seen: "Inspection") -> str:
    """The page as a part of another page, such as a notebook."""
    inner = html.escape(page(seen, f"predicts {seen.predicted}"), quote=True)
    style = "width:100%;height:34rem;border:0"
    return f'<iframe srcdoc="{inner}" style="{style}" title="gates"></iframe>'


def _rounded(values: np.ndarray) -> list[float]:
    """Three decimals, which are more than a colour can show."""
    return [round(value, 3) for value in values.tolist()]
