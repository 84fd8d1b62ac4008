r"""Predicts how a training step scales, from what `experiments.compile_check --json` wrote for several topologies.

for shape in 2x2 4x4 8x8 16x16; do
  python -m experiments.compile_check --config=experiments/configs/lm_1b.py --topology=v5e:$shape \
      --config.training.batch_size=... --json=runs/scaling/v5e-$shape.json
done
python -m experiments.scaling --figures=runs/scaling --plot=docs/scaling.png

Prints a table in Markdown. The calculation is documented in `experiments.compilation.scaling`.
"""

from pathlib import Path

from absl import flags

from cope_jax.errors import ConfigError
from experiments import entry
from experiments.compilation import scaling

_FIGURES = flags.DEFINE_string("figures", None, "Folder with the files of compile_check --json.", required=True)
_PLOT = flags.DEFINE_string("plot", None, "A file for the plot of efficiency against devices.")


def main() -> None:
    """Prints the table, and writes the plot."""
    points = scaling.read(Path(_FIGURES.value))
    print(scaling.markdown(points), end="")
    if _PLOT.value is not None:
        try:
            scaling.plot(points).savefig(_PLOT.value, dpi=200)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write --plot={_PLOT.value} ({error})") from error


if __name__ == "__main__":
    entry.run(main)
