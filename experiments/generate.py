"""Generates text from a trained model, and shows it while it grows.

python -m experiments.generate --model=runs/wikitext2_small --prompt="The lighthouse" --max_new_tokens=200
python -m experiments.generate --model=runs/code_small --prompts=prompts.txt --top_p=0.95 --out=found.jsonl

Prints a prompt with its continuation, or those of a file one after the other, and the tokens per second. docs/text.md
"""

import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags

from cope_jax.errors import ConfigError
from cope_jax.files import read_text
from cope_jax.generation import text_model
from cope_jax.generation.decoding import generate_stream
from cope_jax.generation.detokenizer import Continuation
from cope_jax.generation.sampling import row_keys
from cope_jax.registry import check_at_least
from experiments.cli import entry, outputs

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Folder of a training run, or of a model with its tokenizer in our or Hugging Face's format.",
    required=True,
)
_PROMPT = flags.DEFINE_string("prompt", None, "Text to continue.")
_PROMPTS = flags.DEFINE_string("prompts", None, "File with one prompt per line, instead of --prompt.")
_OUT = flags.DEFINE_string("out", None, "File for prompts and continuations as JSON lines; without it, the terminal.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Maximum number of tokens to generate for each prompt.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Temperature of the sampling; 0 takes the most probable token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Sample from the K most probable tokens.")
_TOP_P = flags.DEFINE_float("top_p", None, "Sample from the fewest tokens that together have this probability.")
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends a continuation; may be given several times.")
_SAMPLE_SEED = flags.DEFINE_integer("sample_seed", 0, "Seed of the sampling.", lower_bound=0, upper_bound=2**31 - 1)
_MODEL_SEED = flags.DEFINE_integer("model_seed", None, "Seed of the run to generate with; without it, the first.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Number of prompts of a file to continue at the same time.")
entry.renamed("workdir", "model")
# In the next release --seed will be the seed of the run, which is --model_seed until then.
entry.renamed("seed", "sample_seed")


def main() -> None:
    """Reads the prompts, and prints or writes their continuations."""
    named = list(_prompts())
    if "" in _STOP.value:
        raise ConfigError("--stop is empty: give a text, or leave it out")
    check_at_least(1, "generate", batch_size=_BATCH_SIZE.value)
    generator = text_model.load(Path(_MODEL.value), _MODEL_SEED.value)
    prompts = [(prompt, generator.codec.read(prompt, name).tolist()) for name, prompt in named]
    longest = max(len(tokens) for _, tokens in prompts) + len(generator.codec.begin) + _MAX_NEW_TOKENS.value - 1
    print(generator.title, file=sys.stderr)
    if longest > generator.length:
        print(f"up to {longest} tokens of context; training used {generator.length}", file=sys.stderr)
    speed = Speed()
    if _OUT.value is None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not support every character
            sys.stdout.reconfigure(errors="replace")
        try:
            for start in range(0, len(prompts), _BATCH_SIZE.value):
                _show(generator, prompts, start, speed)
        except BrokenPipeError:  # the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    else:
        _write(generator, prompts, Path(_OUT.value), speed)
    print(speed.line(), file=sys.stderr)


@dataclasses.dataclass
class Speed:
    """Counts sampled tokens, and the seconds without the first token of each batch, which waits for the compiler."""

    tokens: int = 0
    counted: int = 0  # tokens sampled during `seconds`
    seconds: float = 0.0

    def line(self) -> str:
        """What was measured, in a sentence."""
        if not self.counted:
            return f"{self.tokens} tokens"
        return f"{self.tokens} tokens, {self.counted / self.seconds:,.0f} tokens/s (excluding compilation)"


def _prompts() -> Iterator[tuple[str, str]]:
    """The name of each prompt in errors, and the prompt."""
    if (_PROMPT.value is None) == (_PROMPTS.value is None):
        raise ConfigError("give --prompt, or --prompts with a file that has one prompt per line")
    if _PROMPT.value is not None:
        yield "--prompt", _PROMPT.value
        return
    text = read_text(_PROMPTS.value)
    if not text:
        raise ConfigError(f"{_PROMPTS.value} is empty: write one prompt per line")
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        yield f"{_PROMPTS.value}, line {number},", line.removesuffix("\r")


def _rows(
    generator: text_model.TextGenerator, batch: list[tuple[str, list[int]]], start: int, speed: Speed
) -> Iterator[list[tuple[Continuation, str]]]:
    """The continuations of a batch as they grow, each with its new text; at the end, with the text held back."""
    codec = generator.codec
    rows = [Continuation(codec.decode, tokens, _STOP.value) for _, tokens in batch]
    numbers = range(start, start + len(batch))  # in the file, so that the batch size does not change the samples
    parts = generate_stream(
        generator.model,
        [[*codec.begin, *tokens] for _, tokens in batch],
        _MAX_NEW_TOKENS.value,
        key=row_keys(jax.random.key(_SAMPLE_SEED.value), numbers),
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
    )
    began = None
    for part in parts:
        drawn, now = sum(map(len, part)), time.perf_counter()
        speed.tokens += drawn
        if began is not None:
            speed.counted += drawn
            speed.seconds += now - began
        yield [(row, row.add(tokens)) for row, tokens in zip(rows, part, strict=True)]
        if all(row.ended for row in rows):
            break
        began = time.perf_counter()
    yield [(row, row.finish()) for row in rows]


def _show(generator: text_model.TextGenerator, prompts: list[tuple[str, list[int]]], start: int, speed: Speed) -> None:
    """Prints the first continuation while it grows, and then the others, which grew at the same time."""
    batch = prompts[start : start + _BATCH_SIZE.value]
    rows: list[tuple[Continuation, str]] = []
    between = "\n" if start else ""
    for number, rows in enumerate(_rows(generator, batch, start, speed)):
        print(rows[0][1] if number else f"{between}{batch[0][0]}{rows[0][1]}", end="", flush=True)
    print()
    for (prompt, _), (row, _) in list(zip(batch, rows, strict=True))[1:]:
        print(f"\n{prompt}{row.text}", flush=True)


def _write(generator: text_model.TextGenerator, prompts: list[tuple[str, list[int]]], out: Path, speed: Speed) -> None:
    """Writes a line of JSON for each prompt, a batch at a time."""
    with outputs.writing(out):
        out.open("a").close()  # before anything is sampled
    for start in range(0, len(prompts), _BATCH_SIZE.value):
        batch = prompts[start : start + _BATCH_SIZE.value]
        *_, rows = _rows(generator, batch, start, speed)
        found = [
            {"prompt": prompt, "continuation": row.text} for (prompt, _), (row, _) in zip(batch, rows, strict=True)
        ]
        text = "".join(f"{json.dumps(values, ensure_ascii=False)}\n" for values in found)
        with outputs.writing(out), out.open("a" if start else "w", encoding="utf-8") as file:
            file.write(text)
    print(out)


if __name__ == "__main__":
    entry.run(main)
