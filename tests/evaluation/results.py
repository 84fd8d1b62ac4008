"""Records and curves as a comparison makes them, with values written by hand."""

import io

from rich.console import Console

from cope_jax import tasks

TASK = tasks.create("selective_copy", num_tokens=32, num_blanks=32)
METRICS = ("loss", "token_error", "sequence_error")


def records(errors):
    """Records of encoding → split → sequence error by seed; the token error is a tenth of it."""
    return [
        {
            "task": "selective_copy",
            "encoding": encoding,
            "seed": seed,
            "split": split,
            "metric": metric,
            "value": value * factor,
            "step": 1000,
            "parameters": 20_000 + len(encoding),
            "wall_seconds": 60.0 + 10 * seed,
        }
        for encoding, splits in errors.items()
        for split, values in splits.items()
        for seed, value in enumerate(values)
        for metric, factor in zip(METRICS, (2.0, 0.1, 1.0), strict=True)
    ]


def curves(errors):
    """Curves of encoding → split → step → the sequence error of each seed."""
    return [
        {
            "encoding": encoding,
            "seed": seed,
            "step": step,
            "split": split,
            "loss": value,
            "token_error": value / 10,
            "sequence_error": value,
        }
        for encoding, splits in errors.items()
        for split, steps in splits.items()
        for step, values in steps.items()
        for seed, value in enumerate(values)
    ]


def printed(table, width=200):
    """A table as a terminal without colours shows it."""
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table.rich())
    return console.file.getvalue()
