"""Generates text from a trained model, and prints the text as it grows.

cope-jax generate --model=runs/wikitext2_small --prompt="The lighthouse" --max_new_tokens=200
cope-jax generate --model=runs/code_small --prompts=prompts.txt --top_p=0.95 --out=found.jsonl

Prints each prompt (bold in a terminal) with its continuation, and finally the number of tokens per
second. More is in docs/text.md.
"""

import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import flags

from cope_jax.cli import common_flags, outputs
from cope_jax.errors import ConfigError
from cope_jax.generation import text_model
from cope_jax.generation.decoding import generate_stream
from cope_jax.generation.detokenizer import Continuation
from cope_jax.generation.sampling import row_keys
from cope_jax.storage.files import read_text

common_flags.DEFINE_encoding()
_MODEL = common_flags.DEFINE_model(
    "Folder of a run, folder of an exported or Hugging Face model with its tokenizer, or name of a trained model of "
    "the package, such as shakespeare (required)."
)
_PROMPT = flags.DEFINE_string(
    "prompt", None, "Text to continue (either this flag or --prompts is required)."
)
_PROMPTS = common_flags.DEFINE_text(
    "prompts", "File with one text to continue per line (either this flag or --prompt is required)."
)
_OUT = common_flags.DEFINE_text(
    "out",
    "File for prompts and continuations as JSON lines; without this flag, the command prints them.",
)
_MAX_NEW_TOKENS = common_flags.DEFINE_count(
    "max_new_tokens", 128, "Maximum number of tokens to generate for each prompt."
)
_TEMPERATURE = flags.DEFINE_float(
    "temperature",
    1.0,
    "Sampling temperature; 0 always takes the most probable token.",
    lower_bound=0.0,
)
_TOP_K = common_flags.DEFINE_count(
    "top_k",
    None,
    "Sample only from the K most probable tokens; without this flag, from all tokens.",
)
_TOP_P = flags.DEFINE_float(
    "top_p",
    None,
    "Sample only from the most probable tokens whose total probability reaches this value; without this flag, from all "
    "tokens.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_STOP = common_flags.plain(
    flags.DEFINE_multi_string(
        "stop",
        [],
        "Text at which a continuation ends; may be given several times. --max_new_tokens ends it too, and so does each "
        "end token of a published model.",
    )
)
_SAMPLE_SEED = flags.DEFINE_integer(
    "sample_seed", 0, "Random seed for sampling tokens.", lower_bound=0, upper_bound=2**31 - 1
)
_SEED = common_flags.DEFINE_seed()
_BATCH_SIZE = common_flags.DEFINE_count(
    "batch_size", 16, "Number of prompts from --prompts to continue at the same time."
)


def main() -> None:
    """Reads the prompts, and prints or writes their continuations."""
    named = list(_prompts())
    if not math.isfinite(_TEMPERATURE.value):
        raise ConfigError(f"--temperature must be a finite number, got {_TEMPERATURE.value}")
    if _TOP_P.value is not None and not _TOP_P.value > 0:
        raise ConfigError(
            f"--top_p must be above 0, got {_TOP_P.value}; to always take the best token, set --top_k=1"
        )
    if _OUT.value is not None:
        if Path(_OUT.value).is_file() and Path(_OUT.value).stat().st_size:
            raise ConfigError(f"{_OUT.value} exists: delete it, or choose another --out")
        with outputs.writing(Path(_OUT.value)):  # so that an error comes before the model is loaded
            out = Path(_OUT.value).resolve()  # not the link
            is_new = not out.exists()
            out.open("a").close()
            if is_new:
                out.unlink()
    generator = text_model.load(Path(_MODEL.value), _SEED.value)
    prompts = [(prompt, generator.codec.read(prompt, name).tolist()) for name, prompt in named]
    longest = max(len(tokens) for _, tokens in prompts) + len(generator.codec.begin)
    longest += _MAX_NEW_TOKENS.value - 1
    print(generator.title, file=sys.stderr)
    if longest > generator.length:
        print(
            f"the context has up to {longest} tokens; training used {generator.length}",
            file=sys.stderr,
        )
    speed = Speed()
    if _OUT.value is None:
        for start in range(0, len(prompts), _BATCH_SIZE.value):
            _show(generator, prompts, start, speed)
    else:
        _write(generator, prompts, Path(_OUT.value), speed)
    print(speed.line(), file=sys.stderr)


@dataclasses.dataclass
class Speed:
    """Counts and times sampled tokens, except the first of a batch, which waits to compile."""

    tokens: int = 0
    counted: int = 0  # tokens sampled during `seconds`
    seconds: float = 0.0

    def line(self) -> str:
        """The number of tokens and their speed, in one line."""
        if not self.counted:
            return f"{self.tokens} tokens"
        return f"{self.tokens} tokens, {self.counted / self.seconds:,.0f} tokens/s (excluding compilation)"


def _prompts() -> Iterator[tuple[str, str]]:
    """Yields (the name of a prompt for error messages, the prompt)."""
    if (_PROMPT.value is None) == (_PROMPTS.value is None):
        raise ConfigError(
            "exactly one of --prompt and --prompts is required: give a text in --prompt, or a file with one prompt per "
            "line in --prompts"
        )
    if _PROMPT.value is not None:
        yield "--prompt", _PROMPT.value
        return
    text = read_text(_PROMPTS.value)
    if not text:
        raise ConfigError(f"{_PROMPTS.value} is empty: write one prompt per line")
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        yield f"{_PROMPTS.value}, line {number},", line.removesuffix("\r")


def _rows(
    generator: text_model.TextGenerator,
    batch: list[tuple[str, list[int]]],
    start: int,
    speed: Speed,
) -> Iterator[list[tuple[Continuation, str]]]:
    """Yields all continuations of a batch with their new text, at the end the held-back text."""
    codec = generator.codec
    rows = [Continuation(codec.decode, tokens, _STOP.value) for _, tokens in batch]
    # Indices in the file, so that samples do not depend on batches.
    numbers = range(start, start + len(batch))
    parts = generate_stream(
        generator.model,
        [[*codec.begin, *tokens] for _, tokens in batch],
        _MAX_NEW_TOKENS.value,
        key=row_keys(jax.random.key(_SAMPLE_SEED.value), numbers),
        temperature=_TEMPERATURE.value,
        top_k=_TOP_K.value,
        top_p=_TOP_P.value,
        stop_token=codec.ends,
        size=codec.size,
    )
    began = None
    for drawn_rows in parts:
        drawn, now = sum(map(len, drawn_rows)), time.perf_counter()
        speed.tokens += drawn
        if began is not None:
            speed.counted += drawn
            speed.seconds += now - began
        drawn_rows = [tokens[~np.isin(tokens, codec.ends)] for tokens in drawn_rows]
        yield [(row, row.add(tokens)) for row, tokens in zip(rows, drawn_rows, strict=True)]
        if all(row.ended for row in rows):
            break
        began = time.perf_counter()
    yield [(row, row.finish()) for row in rows]


def _show(
    generator: text_model.TextGenerator,
    prompts: list[tuple[str, list[int]]],
    start: int,
    speed: Speed,
) -> None:
    """Prints the first continuation of a batch while it grows, then the complete others."""
    batch = prompts[start : start + _BATCH_SIZE.value]
    rows: list[tuple[Continuation, str]] = []
    between = "\n" if start else ""
    for number, rows in enumerate(_rows(generator, batch, start, speed)):
        new = _visible(rows[0][1])
        print(new if number else f"{between}{_bold(batch[0][0])}{new}", end="", flush=True)
    print(flush=True)  # before the speed, which goes to stderr
    for (prompt, _), (row, _) in list(zip(batch, rows, strict=True))[1:]:
        print(f"\n{_bold(prompt)}{_visible(row.text)}", flush=True)


def _bold(prompt: str) -> str:
    """The prompt, in bold if the output is a terminal."""
    return f"\033[1m{_visible(prompt)}\033[0m" if sys.stdout.isatty() else prompt


def _visible(text: str) -> str:
    """The text; for a terminal, which would obey control characters, these are escapes."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda sign: f"\\x{ord(sign[0]):02x}", text)


def _write(
    generator: text_model.TextGenerator,
    prompts: list[tuple[str, list[int]]],
    out: Path,
    speed: Speed,
) -> None:
    """Writes one JSON line for each prompt, batch by batch."""
    for start in range(0, len(prompts), _BATCH_SIZE.value):
        batch = prompts[start : start + _BATCH_SIZE.value]
        *_, rows = _rows(generator, batch, start, speed)
        lines = [
            {"prompt": prompt, "continuation": row.text}
            for (prompt, _), (row, _) in zip(batch, rows, strict=True)
        ]
        text = "".join(f"{json.dumps(values, ensure_ascii=False)}\n" for values in lines)
        with outputs.writing(out), out.open("a" if start else "w", encoding="utf-8") as file:
            file.write(text)
    print(out)
