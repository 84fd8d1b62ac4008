r"""Writes the examples of a task as a TFDS dataset, for `--config.training.data_dir` and for other programs.

python -m experiments.export --task=counting --options=num_variables=3 \
    --sizes=train=10000,in_distribution=1000 --out=DIR
python -m experiments.export --task=text --options="data_dir='DATA',corpus='wikitext-2',vocab_size=4096" --out=DIR

Text is written as tokens, together with its tokenizer.
"""

import ast
import contextlib
import io
from typing import Any

import tensorflow_datasets as tfds
from absl import flags

from cope_jax import tasks
from cope_jax.data import tfds_builder
from cope_jax.errors import ConfigError
from experiments.cli import entry, outputs

_TASK = flags.DEFINE_string("task", None, "Name of the task whose examples to write (required).", required=True)
_OPTIONS = flags.DEFINE_string(
    "options", "", "Options of the task, as name=value,name=value; without this flag, each option has its default."
)
_SIZES = flags.DEFINE_string(
    "sizes",
    "",
    "Number of examples per split, as split=number,split=number. Without this flag, all examples of a task with a "
    "fixed size, such as text, are written; other tasks need this flag.",
)
_DATA_SEED = flags.DEFINE_integer("data_seed", 0, "Random seed of the examples.")
_OUT = flags.DEFINE_string("out", None, "Folder to write to (required).", required=True)
entry.renamed("data_dir", "out")
entry.renamed("seed", "data_seed")


def parse_assignments(text: str, what: str) -> dict[str, Any]:
    """Reads `name=value,name=value`; values are Python literals.

    >>> parse_assignments("num_variables=3,ood_pass_weights=(100,10)", "options")
    {'num_variables': 3, 'ood_pass_weights': (100, 10)}
    """
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"--{what} must look like name=value,name=value, got {text!r}") from None


def main() -> None:
    """Writes the dataset and prints its folder."""
    task = tasks.create(_TASK.value, **parse_assignments(_OPTIONS.value, "options"))
    sizes = parse_assignments(_SIZES.value, "sizes")
    tfds.disable_progress_bar()  # TFDS nests its bars and does not know the sizes
    with outputs.writing(_OUT.value), contextlib.redirect_stdout(io.StringIO()):  # TFDS prints a line about downloads
        folder = tfds_builder.write(task, _OUT.value, sizes, _DATA_SEED.value)
    print(folder)


if __name__ == "__main__":
    entry.run(main)
