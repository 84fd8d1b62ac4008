r"""Predicts how a training step scales, from the files of `tools.compile_check --json` for several
topologies.

python -m tools.compile_check --config=lm:1b_noise --topology=v5e:4x4 \
    --config.training.batch_size=32 --config.evaluation.batch_size=16 --json=runs/scaling/v5e-4x4.json
python -m tools.scaling --figures=runs/scaling --plot=docs/scaling.png

Prints a table in Markdown. The calculation is documented in `tools.compile_check.prediction`.
"""

from pathlib import Path

from absl import flags

from cope_jax.cli.flag_values import read_numbers
from cope_jax.cli.run import run
from cope_jax.errors import ConfigError
from tools.compile_check import prediction

_FIGURES = flags.DEFINE_string(
    "figures",
    None,
    "Folder with the files that tools.compile_check --json wrote (required).",
    required=True,
)
_PLOT = flags.DEFINE_string(
    "plot",
    None,
    "Image file for a plot of efficiency against the number of devices; without this flag, nothing is plotted.",
)
_DEVICES = flags.DEFINE_list(
    "devices",
    "1,2,4,8,16,32,64,128,256",
    "Numbers of devices to predict times for. The table also shows the numbers of devices of the files in --figures.",
)


def main() -> None:
    """Prints the table, and writes the plot."""
    counts = read_numbers("devices", _DEVICES.value)
    points = {
        chip: prediction.fill(figures_of_chip, counts)
        for chip, figures_of_chip in prediction.read(Path(_FIGURES.value)).items()
    }
    print(prediction.markdown(points), end="")
    if _PLOT.value is not None:
        try:
            prediction.plot(points).savefig(_PLOT.value, dpi=200)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot write --plot={_PLOT.value} ({error}): choose another file"
            ) from error


if __name__ == "__main__":
    run(main)
