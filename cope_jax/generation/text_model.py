"""Models that go on from a text: those of a run, or of a folder with a model and its tokenizer."""

from pathlib import Path
from typing import Any, NamedTuple

from cope_jax import models
from cope_jax.errors import ConfigError
from cope_jax.exchange import formats, safetensors_io
from cope_jax.runs.load import LoadedRun, load_run
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.base import Codec
from cope_jax.tokenizers.words import Words as WordTokenizer


class Speaker(NamedTuple):
    """A model with its language.

    Attributes:
      title: what it is, in a line.
      model: has `prefill` and `decode`.
      language: of its tokens.
      length: of the sequences that it was trained on.
    """

    title: str
    model: Any
    language: Codec
    length: int


def load(folder: Path, seed: int | None = None) -> Speaker:
    """The model of a run, or of a folder in a format of `model_files` with a tokenizer beside it.

    Args:
      folder: where it is.
      seed: which of a run's; None: the first.

    Raises:
      ConfigError: there is none, it cannot generate, or the tokenizer is missing or of another vocabulary.
    """
    if safetensors_io.holds_model(folder) and not (folder / "checkpoints").exists():
        if seed is not None:
            raise ConfigError(f"{folder} holds one model and no run: leave out --model_seed")
        config, params = formats.load(folder)
        _check(folder, config.name, "")
        tokenizer = loading.load("words" if (folder / WordTokenizer.file).exists() else "bpe", folder)
        # Published tables have rows for no token, which byte-pair encoding leaves out of a text. Words are all there.
        least = config.vocab_size if isinstance(tokenizer, WordTokenizer) else 1
        if not least <= len(tokenizer) <= config.vocab_size:
            raise ConfigError(
                f"the tokenizer of {folder} has {len(tokenizer)} tokens, and the model {config.vocab_size}: "
                "put the one there that the model was trained with"
            )
        begin = safetensors_io.read_tokens(folder).get("bos_token_id", tokenizer.end)
        if type(begin) is not int or not 0 <= begin < config.vocab_size:
            raise ConfigError(
                f"bos_token_id={begin} of {folder} is none of the model's {config.vocab_size} tokens: put the number "
                f"of the one there with which its texts begin, or null"
            )
        language = Codec.of(tokenizer, begin)
        title = f"{config.name} of {folder}, {config.encoding.text() or 'none'}"
        return Speaker(title, formats.build(config, params), language, config.max_length)
    run = load_run(folder)
    _check(folder, run.config.model.name, f" on {run.task.name}")
    number = place_of(run, folder, seed, "--model_seed")
    title = f"{run.task.name}, {run.config.encoding}, seed {run.seeds[number]}, step {run.step:,}"
    model = run.learner.rebuild(run.params[number])
    return Speaker(title, model, run.task.codec(), run.task.length("train"))


def place_of(run: LoadedRun, folder: Path, seed: int | None, flag: str = "--seed") -> int:
    """The place of a seed among those of a run, the first for None; ConfigError: the run has it not."""
    seeds = list(run.seeds)
    if seed is None:
        return 0
    if seed not in seeds:
        raise ConfigError(f"{folder} holds no seed {seed}: choose {flag} from {', '.join(map(str, seeds))}")
    return seeds.index(seed)


def _check(folder: Path, name: str, task: str) -> None:
    able = models.able("generate")
    if name not in able:
        raise ConfigError(
            f"{folder} holds a {name}{task}, which cannot generate here: give a run of a {' or '.join(able)}"
        )
