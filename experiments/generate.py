"""Text from a trained model, shown while it is drawn.

python -m experiments.generate --model=runs/wikitext2_small --prompt="The lighthouse" --max_new_tokens=200
python -m experiments.generate --model=runs/code_small --prompts=prompts.txt --top_p=0.95 --out=found.jsonl

Prints a prompt with its continuation, or those of a file one after the other, and how fast tokens came. docs/text.md
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
    "model", None, "A run, or a folder with a model and its tokenizer, ours or Hugging Face's.", required=True
)
_PROMPT = flags.DEFINE_string("prompt", None, "The beginning of a text.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A file with a prompt in each line, in place of --prompt.")
_OUT = flags.DEFINE_string("out", None, "File for prompts and continuations, JSON lines; without it, the terminal.")
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "How many tokens follow each prompt at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 takes the most probable token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw from the so many most probable tokens.")
_TOP_P = flags.DEFINE_float("top_p", None, "Draw from the fewest tokens that together have this probability.")
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends a continuation; may be given several times.")
_SAMPLE_SEED = flags.DEFINE_integer("sample_seed", 0, "Of the draws.", lower_bound=0, upper_bound=2**31 - 1)
_MODEL_SEED = flags.DEFINE_integer("model_seed", None, "Which seed of the run; without it, the first.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Prompts of a file that are continued side by side.")
entry.renamed("workdir", "model")
entry.renamed(
    "seed", "sample_seed"
)  # with the next release --seed is that of the run, which is --model_seed until then


def main() -> None:
    """Reads the prompts, and shows or writes what follows them."""
    named = list(_prompts())
    if "" in _STOP.value:
        raise ConfigError("--stop is empty: give a text, or leave it out")
    check_at_least(1, "generate", batch_size=_BATCH_SIZE.value)
    generator = text_model.load(Path(_MODEL.value), _MODEL_SEED.value)
    prompts = [(prompt, generator.codec.read(prompt, name).tolist()) for name, prompt in named]
    longest = max(len(tokens) for _, tokens in prompts) + len(generator.codec.begin) + _MAX_NEW_TOKENS.value - 1
    print(generator.title, file=sys.stderr)
    if longest > generator.length:
        print(f"up to {longest} tokens of context, where training saw {generator.length}", file=sys.stderr)
    speed = Speed()
    if _OUT.value is None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not know every character
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
    """Tokens drawn, and seconds taken without those of the first of each batch, which wait for the compiler."""

    tokens: int = 0
    counted: int = 0  # those that the seconds are of
    seconds: float = 0.0

    def line(self) -> str:
        """What was measured, in a sentence."""
        if not self.counted:
            return f"{self.tokens} tokens"
        return f"{self.tokens} tokens, {self.counted / self.seconds:,.0f} tokens/s without compilation"


def _prompts() -> Iterator[tuple[str, str]]:
    """What errors call each prompt, and the prompt."""
    if (_PROMPT.value is None) == (_PROMPTS.value is None):
        raise ConfigError("give --prompt, or --prompts with a file of one in each line")
    if _PROMPT.value is not None:
        yield "--prompt", _PROMPT.value
        return
    text = read_text(_PROMPTS.value)
    if not text:
        raise ConfigError(f"{_PROMPTS.value} is empty: write a prompt in each line")
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        yield f"{_PROMPTS.value}, line {number},", line.removesuffix("\r")


def _rows(
    generator: text_model.TextGenerator, batch: list[tuple[str, list[int]]], start: int, speed: Speed
) -> Iterator[list[tuple[Continuation, str]]]:
    """The continuations of a batch as they grow, each with what is new of it; the last time what was held back."""
    codec = generator.codec
    rows = [Continuation(codec.decode, tokens, _STOP.value) for _, tokens in batch]
    numbers = range(start, start + len(batch))  # in the file, so that the size of a batch changes no draw
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
    """Prints the first continuation while it grows, and then the others, for they grow at the same time."""
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
        out.open("a").close()  # before anything is drawn
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
