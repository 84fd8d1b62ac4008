"""The frozen benchmark `language`: small models of Shakespeare, WikiText-2 and code, with ten
encodings, five seeds, and the same small search of the learning rate for each.

Command: cope-jax sweep --grid=language --workdir=runs/language
The folder DATA of the current folder, which may be a link, needs tinyshakespeare and wikitext-2, as
docs/text.md says; the code is the standard library of the running Python, 3.11 in our records.
Hardware: any. Wall time: about a minute of one idle CPU core for each cell and trial.
experiments/RESULTS.md says which were run.

Frozen are the settings, the seeds and the rates: records of different times can be in one table.
Each cell measures the loss on the same windows of the test text, by blocks of 1,024 tokens for paired
tests; that of rare pairs of tokens which the window has had before, and of all others; and that in
windows of up to 8 times the length of training.
"""

import dataclasses
from collections.abc import Iterator

import cope_jax as cj
from cope_jax.grids.abilities import FIRST, SECOND
from cope_jax.runs.grid.cell import Cell
from cope_jax.training.config_files import every, measured

SETTINGS = {
    "shakespeare": {"corpus": "tinyshakespeare", "data_dir": "DATA"},
    "wikitext-2": {"corpus": "wikitext-2", "data_dir": "DATA"},
    "code": {"corpus": "code", "packing": "documents"},
}
"""The options of the text of each setting."""

SEARCH = {"optimizer.learning_rate": (1.6e-2, 3.2e-2, 6.4e-2)}
"""Each encoding trains once with each rate on each text, with a seed that no cell has; the cells take
the rate with the lowest loss on the validation text.
"""

DATA = {
    "shakespeare": ("93c3467318cc", "5fb872a4734f", "165245f4bb90"),
    "wikitext-2": ("786dcea238a0", "b33162b13d93", "ab21cf56ab57"),
    "code": ("10c9cb879eee", "8ee35db8fc52", "394f595cef2b"),
}
"""For each text the first digits of the SHA-256 of its training, validation and test text, as a run
has them in corpus.json; of code, those of Python 3.11.7.
"""


def get_cells() -> Iterator[Cell]:
    """Yields the cells in the order in which they train."""
    for seed in range(5):
        for setting, text in SETTINGS.items():
            config = cj.config(
                "wikitext2",
                task={"options": {**text, "vocab_size": 1024, "recall": 2.5e-5}},
                model={"num_layers": 2},
                training={"steps": 800, "batch_size": 8, **every(400)},
                evaluation=measured(512, curve=128, batch_size=8, sweep=64),
                job={"blocks": True, "tracker": "none"},
            )
            for name in (*FIRST, *SECOND):
                trained = dataclasses.replace(config, encoding=name)
                yield Cell(trained, (seed,), setting=setting, search=SEARCH)
