"""Shows what a trained model looks at: which tokens its gates count, and heat maps of gates, positions and attention.

python -m experiments.inspect --workdir=runs/cope --input="a = 0 ; pass; a ++; print a"
python -m experiments.inspect --workdir=runs/cope --split=in_distribution --example=0 --layer=1 --head=0

Prints a strip of tokens for each layer and head, coloured by the gates of one query (by its attention where there are
no gates) with the positions p_ij below, and writes a PNG for each map.
"""

from pathlib import Path

import jax
import numpy as np
from absl import flags
from rich.console import Console

from cope_jax import positions
from cope_jax.errors import ConfigError
from cope_jax.evaluation import maps
from experiments import common, entry

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a training run.", required=True)
_INPUT = flags.DEFINE_string("input", None, "Tokens separated by spaces; without it, an example of --split.")
_SPLIT = flags.DEFINE_string("split", "in_distribution", "Split to take the example from.")
_EXAMPLE = flags.DEFINE_integer("example", 0, "Which example of the split, from 0.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", None, "Seed of the model; without it, the first of the run.")
_QUERY = flags.DEFINE_integer("query", -1, "Place of the query in the input; negative counts from the end.")
_LAYER = flags.DEFINE_integer("layer", None, "Only this layer, from 0; without it, all.")
_HEAD = flags.DEFINE_integer("head", None, "Only this head, from 0; without it, all.")
_OUT = flags.DEFINE_string("out", None, "Folder for the heat maps; without it, `maps` in the workdir.")


def main() -> None:
    """Prints the strips and writes the heat maps."""
    workdir = Path(_WORKDIR.value)
    run = common.load_run(workdir)
    seeds = list(run.seeds)
    seed = seeds[0] if _SEED.value is None else _SEED.value
    if seed not in seeds:
        raise ConfigError(f"{workdir} holds no seed {seed}: choose --seed from {', '.join(map(str, seeds))}")
    tokens_L = read_input(run)
    sampler = positions.SAMPLERS.get(run.learner.sampler)
    limit = max(run.learner.model.max_length, len(tokens_L))  # an encoding that has a table checks the length itself
    seen = maps.inspect(
        run.learner.rebuild(run.params[seeds.index(seed)]),
        run.task.vocabulary,
        tokens_L,
        positions_BL=sampler(jax.random.key(0), 1, len(tokens_L), limit),
        query=_QUERY.value,
        layer=_LAYER.value,
        head=_HEAD.value,
    )
    console = Console(highlight=False)
    console.print(f"{run.task.name}, {run.config.encoding}, seed {seed}, step {run.step:,}", markup=False)
    console.print(maps.strips(seen, console.width), soft_wrap=True)
    out = workdir / "maps" if _OUT.value is None else Path(_OUT.value)
    try:
        paths = maps.write_heat_maps(out, seen)
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another --out") from error
    console.print(*paths, sep="\n", soft_wrap=True)


def read_input(run: common.LoadedRun) -> np.ndarray:
    """The tokens of --input, or else of the example, up to the last one whose answer counts."""
    if _INPUT.value is not None:
        tokens_L = run.task.encode(_INPUT.value)
        if not tokens_L.size:
            raise ConfigError("--input has no token: write tokens separated by spaces")
        return tokens_L
    example, examples = _EXAMPLE.value, run.config.evaluation.examples
    if example >= examples:
        raise ConfigError(f"--example must be below {examples}, the examples that the run was evaluated on")
    batch = run.task.dataset(_SPLIT.value, examples, run.config.training.data_seed)
    return batch["inputs"][example, : int(np.flatnonzero(batch["weights"][example])[-1]) + 1]


if __name__ == "__main__":
    entry.run(main)
