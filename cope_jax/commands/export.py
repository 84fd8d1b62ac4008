r"""Writes text as shards of tokens for the task `sharded_text`, or the examples of a task as a TFDS
dataset.

cope-jax export --input='gs://BUCKET/web/*.parquet' --vocab=GPT2 --length=1024 --out=gs://BUCKET/shards
cope-jax export --corpus=wikitext-103-raw --corpora_dir=DATA --vocab=GPT2 --length=1024 --out=DIR
cope-jax export --task=counting --options=num_variables=3 \
    --sizes=train=10000,in_distribution=1000 --out=DIR

The first two write shards. They can be killed and run again, and `--shard=I/N` divides the work
over N hosts. The last one writes a dataset for `--config.training.data_dir` and for other programs.
"""

import ast
import contextlib
import io
from typing import Any, get_args

from absl import flags

from cope_jax import tasks
from cope_jax.cli import common_flags, outputs
from cope_jax.corpora import document_files
from cope_jax.corpora.export_sources import Corpus, Files
from cope_jax.corpora.shards import Manifest
from cope_jax.data.shard_export import Vocabulary, export
from cope_jax.data.shard_writer import Options
from cope_jax.errors import ConfigError
from cope_jax.registry import check_plain_numbers
from cope_jax.runs.grid.claims import cores
from cope_jax.storage.files import in_bucket

MIRRORED = ()
"""No folder is mirrored: shards for a bucket would not fit a disk."""

_OUT = common_flags.DEFINE_out("Folder to write to (required); shards may go to a bucket.")
_INPUT = flags.DEFINE_list(
    "input", [], "Files of text to export as shards: paths or globs of .txt, .jsonl, .parquet."
)
_CORPUS = flags.DEFINE_string("corpus", None, "Corpus to export as shards, as in the task text.")
_TASK = flags.DEFINE_string("task", None, "Name of the task whose examples to write.")

_SHARDS: dict[str, Any] = {
    "corpora_dir": flags.DEFINE_string(
        "corpora_dir", None, "Folder of --corpus; without this flag, the built-in sample."
    ),
    "globs": flags.DEFINE_list(
        "globs", [], "Patterns that choose the files of --corpus=files or --corpus=code."
    ),
    "text_field": flags.DEFINE_string(
        "text_field", "text", "Field of a record of .jsonl or .parquet with its text."
    ),
    "split_documents": flags.DEFINE_enum(
        "split_documents",
        "file",
        get_args(document_files.Division),
        "What is one document of a .txt, .md or .py file.",
    ),
    "held_out": flags.DEFINE_float(
        "held_out", 0.001, "Share of the documents of --input in validation, and in test."
    ),
    "tokenizer": flags.DEFINE_enum(
        "tokenizer", "bpe", ["bpe", "words", "bytes"], "Kind of the tokenizer."
    ),
    "vocab": flags.DEFINE_string(
        "vocab", None, "Path of a tokenizer to load; without it, one is learned."
    ),
    "vocab_size": common_flags.DEFINE_count("vocab_size", None, "Size of a learned vocabulary."),
    "sample": common_flags.DEFINE_count(
        "sample", 100_000_000, "Characters to learn a vocabulary from."
    ),
    "length": common_flags.DEFINE_count("length", 1024, "Number of tokens of an example."),
    "packing": flags.DEFINE_enum(
        "packing", "stream", ["stream", "documents"], "How documents fill examples."
    ),
    "shard_tokens": common_flags.DEFINE_count(
        "shard_tokens",
        1 << 22,
        "A shard ends after the document with which it has as many tokens; a process holds one shard in memory.",
    ),
    "shard": flags.DEFINE_string(
        "shard", "0/1", "I/N: write the part I of N, counted from 0, on each of N hosts."
    ),
    "workers": common_flags.DEFINE_count(
        "workers", None, "Number of processes; without this flag, one for each core."
    ),
}
_BELONGS = {
    **dict.fromkeys(("corpora_dir", "globs"), "--corpus"),
    **dict.fromkeys(("text_field", "split_documents", "held_out"), "--input"),
}
"""The flags of shards that belong to one source."""
_DATASET: dict[str, Any] = {
    "options": flags.DEFINE_string(
        "options",
        "",
        "Options of the task, as name=value,name=value; without this flag, each option has its default.",
    ),
    "sizes": flags.DEFINE_string(
        "sizes",
        "",
        "Number of examples per split, as split=number,split=number. Without this flag, all examples of a task with a "
        "fixed size, such as text, are written; other tasks need this flag.",
    ),
    "data_seed": flags.DEFINE_integer("data_seed", 0, "Random seed of the examples."),
}


def parse_assignments(text: str, flag: str) -> dict[str, Any]:
    """Reads `name=value,name=value`; values are Python literals.

    >>> parse_assignments("num_variables=3,ood_pass_weights=(100,10)", "options")
    {'num_variables': 3, 'ood_pass_weights': (100, 10)}
    """
    check_plain_numbers(text, f"--{flag}")
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if (
            not isinstance(call, ast.Call)
            or call.args
            or any(keyword.arg is None for keyword in call.keywords)
        ):
            raise ValueError
        values = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        return {name: ast.literal_eval(value) for name, value in values.items()}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ConfigError(f"--{flag} must look like name=value,name=value, got {text!r}") from None


def parse_part(text: str) -> tuple[int, int]:
    """Reads `I/N`.

    >>> parse_part("3/8")
    (3, 8)
    """
    index, slash, parts = text.partition("/")
    if not (slash and index.isdecimal() and parts.isdecimal() and int(index) < int(parts)):
        raise ConfigError(
            f"--shard must look like 0/8, with the first number less than the second, got {text!r}"
        )
    return int(index), int(parts)


def _write_shards() -> None:
    flag = {name: holder.value for name, holder in _SHARDS.items()}
    source: Files | Corpus
    if _INPUT.value:
        files = tuple(document_files.find(_INPUT.value))
        source = Files(files, flag["text_field"], flag["held_out"], flag["split_documents"])
    else:
        source = Corpus(_CORPUS.value or "", flag["corpora_dir"], tuple(flag["globs"]))
    vocabulary = Vocabulary(flag["tokenizer"], flag["vocab"], flag["vocab_size"], flag["sample"])
    options = Options(flag["length"], flag["packing"], flag["shard_tokens"])
    with outputs.writing(_OUT.value):
        manifest = export(
            source,
            _OUT.value,
            vocabulary,
            options,
            host=parse_part(flag["shard"]),
            workers=flag["workers"] or cores(),
        )
    if manifest is None:
        print(f"{_OUT.value}: this part has ended; the manifest is written when all parts have")
    else:
        print(_summary(manifest))


def _summary(manifest: Manifest) -> str:
    lines = [
        f"{split}: {counts.tokens:,} tokens of {manifest.documents[split]:,} documents, {counts.bytes:,} bytes"
        for split, counts in manifest.counts.items()
    ]
    counts = manifest.counts.items()
    if _CORPUS.value and not _SHARDS["corpora_dir"].present:
        lines.insert(
            0, f"{_CORPUS.value}: the small built-in sample, because --corpora_dir is not set"
        )
    lines += [f"{split}: {of_split.left_out}" for split, of_split in counts if of_split.left_out]
    option = "--config.task.options"
    lines += [
        f"{_OUT.value}: {len(manifest.shards)} shards",
        f"next: {outputs.program()} train --config=lm:125m {option}.folders=\"('{_OUT.value}',)\" "
        f"{option}.length={manifest.length} {option}.tokenizer={manifest.tokenizer} --workdir=…",
    ]
    return "\n".join(lines)


def _write_dataset() -> None:
    import tensorflow_datasets as tfds

    from cope_jax.data import tfds_builder

    task = tasks.create(str(_TASK.value), **parse_assignments(_DATASET["options"].value, "options"))
    sizes = parse_assignments(_DATASET["sizes"].value, "sizes")
    tfds.disable_progress_bar()  # TFDS nests its bars and does not know the sizes
    # TFDS prints a line about downloads.
    with outputs.writing(_OUT.value), contextlib.redirect_stdout(io.StringIO()):
        folder = tfds_builder.write(task, _OUT.value, sizes, _DATASET["data_seed"].value)
    print(folder)


def main() -> None:
    """Writes shards or a dataset, and prints where they are."""
    if sum((bool(_INPUT.value), _CORPUS.value is not None, _TASK.value is not None)) != 1:
        raise ConfigError("say what to export: give one of --input, --corpus and --task")
    of_task = _TASK.value is not None
    if of_task and in_bucket(_OUT.value):
        raise ConfigError(
            f"--out={_OUT.value} is in a bucket: write the dataset to a disk, then copy it"
        )
    if flags.FLAGS["input"].present > 1:
        raise ConfigError("--input is there twice: give it once, with a comma between paths")
    given = "--task" if of_task else "--input" if _INPUT.value else "--corpus"
    for name, holder in {**_SHARDS, **_DATASET}.items():
        belongs = "--task" if name in _DATASET else _BELONGS.get(name, "--input and --corpus")
        if holder.present and given not in belongs:
            raise ConfigError(f"--{name} belongs to {belongs}: leave it out")
    given = _SHARDS["vocab"].present or _SHARDS["tokenizer"].value == "bytes"
    for name in ("vocab_size", "sample"):
        if given and _SHARDS[name].present:
            raise ConfigError(f"--{name} is for a vocabulary that is learned: leave it out")
    (_write_dataset if of_task else _write_shards)()
