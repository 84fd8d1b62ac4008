"""Shows what a trained decoder attends to and what its gates count, in the terminal and as heat
maps.

cope-jax inspect --model=runs/cope --input="a = 0 ; pass; a ++; print a"
cope-jax inspect --model=runs/cope --split=in_distribution --example=0 --layer=1 --head=0
cope-jax inspect --model=runs/wikitext2_small --split=test --windows=32

For a synthetic task, the command prints the tokens once for each layer and head, with the positions
p_ij below. The colours are the gates of one query or, if there are no gates, the attention of this
query. The command writes `query.png`, a large picture of the head whose gates select best for the
query. It also writes one picture of all heads for each kind of map: gates, positions, attention. In
`report.html` you point at any token to see what it counts.

For text, the command ranks the heads by the features of the text that their gates follow, and
describes the result in sentences. It prints a text, coloured by the gates of the top heads. It
writes the ranking, a picture of all heads and features, and `report.html`. More is in docs/text.md.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from cope_jax import models, positions
from cope_jax.cli import common_flags, outputs
from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import inspect_text, maps, viewer, views
from cope_jax.evaluation.report.table import console as wide_console
from cope_jax.evaluation.report.table import has_colours
from cope_jax.runs.load import LoadedRun, load_run
from cope_jax.runs.workdir import Workdir
from cope_jax.tasks.synthetic import SyntheticTask
from cope_jax.tokenizers.tokenizer import Codec

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of a run that trained a decoder, or name of a trained model of the package, such as counting (required)."
)
_INPUT = common_flags.DEFINE_text(
    "input",
    "Input to inspect: a text or, for a synthetic task, tokens separated by spaces. Without this flag, the input is "
    "read from the split --split.",
)
_SPLIT = common_flags.DEFINE_text(
    "split",
    "Without --input: split to read the input from; without this flag, the first evaluation split.",
)
_EXAMPLE = flags.DEFINE_integer(
    "example",
    0,
    "For a synthetic task without --input: index of the example to inspect in the split, from 0.",
    lower_bound=0,
)
_SEED = common_flags.DEFINE_seed()
_QUERY = flags.DEFINE_integer(
    "query",
    -1,
    "For a synthetic task: index of the query in the input, from 0; a negative index counts from the end.",
)
_LAYER = flags.DEFINE_integer(
    "layer", None, "The only layer to show, counted from 0; without this flag, all layers."
)
_HEAD = flags.DEFINE_integer(
    "head", None, "The only head to show, counted from 0; without this flag, all heads."
)
_WINDOWS = common_flags.DEFINE_count(
    "windows",
    16,
    "For text, if --input is not given: maximum number of windows to inspect from the split.",
)
_TOP = flags.DEFINE_integer(
    "top",
    3,
    "For text: number of heads whose gates colour the text, the best-ranked heads first. Ignored if --layer or --head "
    "chooses the heads.",
    lower_bound=0,
)
_OUT = flags.DEFINE_string(
    "out",
    None,
    "Folder for the pictures; without this flag, `maps` in the run's folder or, for a trained model of the package, in "
    "runs/trained/NAME.",
)


def main() -> None:
    """Prints what the model attends to and counts, and writes the pictures."""
    run = load_run(_MODEL.value)
    if run.name not in models.able("map"):
        raise ConfigError(
            f"{run.folder} is a run of {run.name} on {run.task.name}: choose a run of a decoder"
        )
    out = run.output / "maps" if _OUT.value is None else Path(_OUT.value)
    console = wide_console()
    if isinstance(run.task, SyntheticTask):
        write = show_maps(console, run, run.task)
    else:
        write = show_text(console, run)
    with outputs.writing(out):
        paths = write(out)
    outputs.list_files(paths)


def show_maps(
    console: Console, run: LoadedRun, task: SyntheticTask
) -> Callable[[Path], list[Path]]:
    """Prints the coloured tokens of a synthetic example.

    Returns a function that writes its heat maps.
    """
    tokens_L = read_input(run, task)
    sampler = positions.SAMPLERS.get(run.experiment.training.positions)
    # An encoding that has a table checks the length itself.
    limit = max(run.config.max_length, len(tokens_L))
    seen = maps.inspect(
        run.model(_SEED.value),
        task.vocabulary,
        tokens_L,
        positions_BL=sampler(jax.random.key(0), 1, len(tokens_L), limit),
        query=_QUERY.value,
        layer=_LAYER.value,
        head=_HEAD.value,
    )
    title = run.title(_SEED.value)
    console.print(title, markup=False)
    console.print(maps.strips(seen, console.width, has_colours(console)), soft_wrap=True)

    def write(folder: Path) -> list[Path]:
        page = viewer.write(folder / "report.html", seen, title)
        return [*maps.write_heat_maps(folder, seen, title), page]

    return write


def show_text(console: Console, run: LoadedRun) -> Callable[[Path], list[Path]]:
    """Prints what the heads count in a text. Returns a function that writes the ranking."""
    split = _SPLIT.value or run.task.evaluation_splits[0]
    try:
        if _INPUT.value is None:
            Workdir(run.folder).check_sources(run.task, [split])
        tokens_BL = inspect_text.windows(
            run.task, run.task.codec(), _INPUT.value, split, _WINDOWS.value
        )
    except ConfigError as error:
        if _INPUT.value is None:  # the corpus of the run is not here
            raise ConfigError(f"{error}; or give a text in --input") from error
        raise
    shape = run.config.block.attention_shape(None)
    layers = maps.choose("layer", _LAYER.value, run.config.num_layers)
    heads = maps.choose("head", _HEAD.value, shape.num_heads)
    title = run.title(_SEED.value)
    console.print(title, markup=False)
    scored = inspect_text.score_text(run.model(_SEED.value), run.task.codec(), tokens_BL)
    windows = f"{len(tokens_BL)} window{'s' * (len(tokens_BL) > 1)} of {tokens_BL.shape[1]}"
    console.print(f"{scored.count:,} tokens in {windows}\n", markup=False)
    console.print(views.ranking(scored.heads, scored.bound, scored.top_tokens).rich())
    sentences = views.sentences(scored.heads, scored.bound)
    console.print(*sentences, sep="\n", markup=False, soft_wrap=True)
    coloured = has_colours(console)
    if coloured:
        console.print("", maps.legend("mean gates"), sep="\n")
    shown = [head for head in scored.heads if head.layer in layers and head.head in heads]
    for head in shown[: _TOP.value if _LAYER.value is None and _HEAD.value is None else None]:
        named = f"\nlayer {head.layer}, head {head.head}: mean gates"
        console.print(named, style="bold", markup=False)
        gates_L = scored.gates_LHBL[head.layer, head.head, 0]
        shade = (
            views.coloured if coloured else functools.partial(views.numbered, width=console.width)
        )
        console.print(shade(scored.pieces, gates_L), soft_wrap=not coloured)
    model = run.model(_SEED.value)
    pieces = _Pieces(run.task.codec(), model.config.vocab_size)
    tokens_L = np.asarray(tokens_BL[0])[: viewer.LONGEST // 2]
    seen = maps.inspect(model, pieces, tokens_L, layer=_LAYER.value, head=_HEAD.value)
    seen = dataclasses.replace(seen, tokens=tuple(scored.pieces[: len(tokens_L)]))

    def write(folder: Path) -> list[Path]:
        page = viewer.write(folder / "report.html", seen, title)
        return [*views.write(folder, scored.heads, title), page]

    return write


class _Pieces(Sequence[str]):
    """The text of each token of a tokenizer."""

    def __init__(self, codec: Codec, size: int):
        self._codec, self._size = codec, size

    def __getitem__(self, token: Any) -> Any:
        return self._codec.decode(np.array([token]))

    def __len__(self) -> int:
        return self._size


def read_input(run: LoadedRun, task: SyntheticTask) -> np.ndarray:
    """The tokens of --input, or else of the example up to the last token that has a weight."""
    if _INPUT.value is not None:
        tokens_L = task.encode(_INPUT.value)
        if not tokens_L.size:
            raise ConfigError("--input has no token: write tokens separated by spaces")
        return tokens_L
    example, examples = _EXAMPLE.value, run.experiment.evaluation.examples
    if example >= examples:
        raise ConfigError(
            f"--example must be below {examples}, the number of examples that the run was evaluated on"
        )
    split, seed = _SPLIT.value or task.evaluation_splits[0], run.experiment.training.data_seed
    batch = task.dataset(split, examples, seed)
    return batch["inputs"][example, : int(np.flatnonzero(batch["weights"][example])[-1]) + 1]
