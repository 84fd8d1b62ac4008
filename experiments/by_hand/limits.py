"""The cells that have weights, and those that no weights can solve, with the reasons in short.

docs/can.md has the arguments.
"""

ALL = (
    *("cope", "rope", "fox", "path", "stick_breaking"),
    *("none", "pope", "mapformer", "cope_signed", "alibi"),
)
_ORDERED = tuple(name for name in ALL if name not in ("none", "alibi"))
_MARKED = ("cope", "fox", "path", "stick_breaking", "mapformer", "cope_signed")

CAN: dict[str, tuple[str, ...]] = {
    "ignore": ("cope", "path", "mapformer", "cope_signed"),
    "count": _MARKED,
    "recall": ALL,
    "occurrence": _ORDERED,
    "steps": ("mapformer", "cope_signed"),
    "parity": tuple(name for name in ALL if name not in ("stick_breaking", "alibi")),
    "index": _ORDERED,
    "stack": ("mapformer", "cope_signed"),
    "copy": ("stick_breaking",),
}
"""The encodings with the gadgets that the recipe of an ability needs."""

CONSTANT = "a word of equal elements gives equal outputs at all its tokens"
SWAP = "one layer without positions gives the same output for w0i1r and w1i0r"
MARGIN = "exchanging the written bit and an ignored one changes logits by O(1/n)"
BITS = "instructions and bits meet in 2·33 numbers, which do not contain n bits"

CANNOT: dict[tuple[str, str], str] = {
    **{("state", encoding): CONSTANT for encoding in ALL if encoding != "stick_breaking"},
    ("ignore", "none"): SWAP,
}
"""Cells in which every model of these sizes, or any other, is wrong on short sequences too."""

LIMIT: dict[tuple[str, str], str] = {
    **{("ignore", encoding): MARGIN for encoding in ("fox", "stick_breaking")},
    **{("ignore", encoding): BITS for encoding in ("rope", "pope", "alibi")},
}
"""Cells in which the margin of each model vanishes as sequences grow; we do not know weights for 64
times the length."""
