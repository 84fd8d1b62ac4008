"""Shows what a trained model looks at: what its gates count, and heat maps of gates, positions and attention.

python -m experiments.inspect --model=runs/cope --input="a = 0 ; pass; a ++; print a"
python -m experiments.inspect --model=runs/cope --split=in_distribution --example=0 --layer=1 --head=0
python -m experiments.inspect --model=runs/wikitext2_small --split=test --windows=32

For a synthetic task: prints a strip of tokens for each layer and head, coloured by the gates of one query (by its
attention if there are no gates) with the positions p_ij below, and writes a PNG for each map.

For text: ranks the heads by what their gates follow, describes the result in sentences, and prints a text coloured by
the gates of the first heads; writes the ranking, and a PNG of all heads and features. docs/text.md
"""

if __name__ == "inspect":  # a command of this folder was started as a file, and Python imports this as its own module
    import sys

    raise SystemExit(f"run it as: python -m experiments.{sys.argv[0].rpartition('/')[2].removesuffix('.py')}")

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags
from rich.console import Console

from cope_jax import models, positions
from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import inspect_text, maps, views
from cope_jax.evaluation.report.table import console as wide_console
from cope_jax.runs.load import LoadedRun, load_run
from cope_jax.runs.workdir import check_sources
from cope_jax.tasks.synthetic import SyntheticTask
from experiments.cli import entry, outputs

_MODEL = flags.DEFINE_string("model", None, "Folder of a training run.", required=True)
_INPUT = flags.DEFINE_string("input", None, "Tokens separated by spaces, or a text; without it, from --split.")
_SPLIT = flags.DEFINE_string("split", None, "Split to take the example from; without it, the first evaluation split.")
_EXAMPLE = flags.DEFINE_integer("example", 0, "Index of the example in the split, from 0.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", None, "Seed of the model; without it, the first of the run.")
_QUERY = flags.DEFINE_integer(
    "query", -1, "Index of the query in the input, from 0; a negative one is counted from the end."
)
_LAYER = flags.DEFINE_integer("layer", None, "Only this layer, from 0; without it, all.")
_HEAD = flags.DEFINE_integer("head", None, "Only this head, from 0; without it, all.")
_WINDOWS = flags.DEFINE_integer("windows", 16, "For text: number of windows of the split.", lower_bound=1)
_TOP = flags.DEFINE_integer("top", 3, "For text: number of top-ranked heads to show in colours.", lower_bound=0)
_OUT = flags.DEFINE_string("out", None, "Folder for the heat maps; without it, `maps` in the run's folder.")
entry.renamed("workdir", "model")


def main() -> None:
    """Prints what the model looks at, and writes the heat maps."""
    workdir = Path(_MODEL.value)
    run = load_run(workdir)
    if run.name not in models.able("map"):
        raise ConfigError(f"{workdir} is a run of {run.name} on {run.task.name}: choose a run of a decoder")
    out = workdir / "maps" if _OUT.value is None else Path(_OUT.value)
    console = wide_console()
    if isinstance(run.task, SyntheticTask):
        write = show_maps(console, run, run.task)
    else:
        write = show_text(console, workdir, run)
    with outputs.writing(out):
        paths = write(out)
    outputs.list_files(paths)


def show_maps(console: Console, run: LoadedRun, task: SyntheticTask) -> Callable[[Path], list[Path]]:
    """Prints the strips of a synthetic example, and returns the function that writes its maps."""
    tokens_L = read_input(run, task)
    sampler = positions.SAMPLERS.get(run.experiment.training.positions)
    limit = max(run.config.max_length, len(tokens_L))  # an encoding that has a table checks the length itself
    seen = maps.inspect(
        run.model(_SEED.value),
        task.vocabulary,
        tokens_L,
        positions_BL=sampler(jax.random.key(0), 1, len(tokens_L), limit),
        query=_QUERY.value,
        layer=_LAYER.value,
        head=_HEAD.value,
    )
    console.print(run.title(_SEED.value), markup=False)
    console.print(maps.strips(seen, console.width), soft_wrap=True)
    return functools.partial(maps.write_heat_maps, seen=seen)


def show_text(console: Console, workdir: Path, run: LoadedRun) -> Callable[[Path], list[Path]]:
    """Prints what heads count in a text, and returns the function that writes the ranking."""
    split = _SPLIT.value or run.task.evaluation_splits[0]
    if _INPUT.value is None:
        check_sources(run.task, workdir, [split])
    tokens_BL = inspect_text.windows(run.task, run.task.codec(), _INPUT.value, split, _WINDOWS.value)
    shape = run.config.block.attention_shape(None)
    layers = maps.choose("layer", _LAYER.value, run.config.num_layers)
    heads = maps.choose("head", _HEAD.value, shape.num_heads)
    console.print(run.title(_SEED.value), markup=False)
    found = inspect_text.score_text(run.model(_SEED.value), run.task.codec(), tokens_BL)
    console.print(f"{found.count:,} tokens in {len(tokens_BL)} windows of {tokens_BL.shape[1]}\n", markup=False)
    console.print(views.ranking(found.heads, found.bound, found.top_tokens).rich())
    console.print(*views.sentences(found.heads, found.bound), sep="\n", markup=False, soft_wrap=True)
    shown = [one for one in found.heads if one.layer in layers and one.head in heads]
    for one in shown[: _TOP.value if _LAYER.value is None and _HEAD.value is None else None]:
        console.print(f"\nlayer {one.layer}, head {one.head}: mean gates", style="bold", markup=False)
        console.print(views.coloured(found.pieces, found.gates_LHBL[one.layer, one.head, 0]), soft_wrap=True)
    return functools.partial(views.write, heads=found.heads)


def read_input(run: LoadedRun, task: SyntheticTask) -> np.ndarray:
    """The tokens of --input, or else of the example, up to the last one whose answer counts."""
    if _INPUT.value is not None:
        tokens_L = task.encode(_INPUT.value)
        if not tokens_L.size:
            raise ConfigError("--input has no token: write tokens separated by spaces")
        return tokens_L
    example, examples = _EXAMPLE.value, run.experiment.evaluation.examples
    if example >= examples:
        raise ConfigError(f"--example must be below {examples}, the number of examples that the run was evaluated on")
    batch = task.dataset(_SPLIT.value or task.evaluation_splits[0], examples, run.experiment.training.data_seed)
    return batch["inputs"][example, : int(np.flatnonzero(batch["weights"][example])[-1]) + 1]


if __name__ == "__main__":
    entry.run(main)
