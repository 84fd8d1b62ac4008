"""Learns tokenizers of running text, or loads them from published files."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from etils import epath

from cope_jax.errors import ConfigError, first_line, without_stderr
from cope_jax.registry import unknown
from cope_jax.storage.files import glob_in, in_bucket, read_object, read_text
from cope_jax.tokenizers.byte_level import BPE, ENDS, Bytes, clear_panics
from cope_jax.tokenizers.tokenizer import Tokenizer
from cope_jax.tokenizers.word_level import Words

Kind = Literal["bpe", "words", "bytes"]
DEFAULT_SIZE = 8192
FILES = {"bpe": BPE.file, "words": Words.file}
"""The name of the file in which a run stores a learned tokenizer, for each kind of tokenizer."""

_PAIRS = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
"""The names of the files of GPT-2's vocabulary from OpenAI and from Hugging Face."""

_END_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)
"""Files of Hugging Face with the name (`eos_token`) or number (`eos_token_id`) of the end token."""

_PROBE = "Aa  Bé\n\tÉ 日本 😀 12"
"""A text that changes in tokenizers that lowercase, split at spaces or lack some bytes."""


def train(kind: Kind, texts: Iterable[str], size: int | None = None) -> Tokenizer:
    """Learns a tokenizer of at most `size` tokens from texts; "bytes" needs no texts.

    If `size` is None, the limit is 8,192 tokens for "bpe", and there is no limit for "words".

    Raises:
      ConfigError: the kind is unknown, `texts` is a single text, or `size` has no room for the
        tokens that every vocabulary must have.
    """
    _check_kind(kind)
    if isinstance(texts, str | bytes):
        raise ConfigError("a tokenizer learns from a list of texts, got a text: pass [text]")
    if kind == "words":
        return Words.train(texts, size)
    if kind == "bytes":
        return Bytes()
    return BPE.train(texts, DEFAULT_SIZE if size is None else size)


def load(kind: Kind, path: epath.PathLike) -> Tokenizer:
    """Loads the tokenizer in a file, or in the files of a folder.

    For "words", `path` is a file with one word per line, or a folder with such a `words.txt`. For
    "bpe", `path` is a `tokenizer.json`, or a folder with a `tokenizer.json` or with the two files
    of GPT-2. These are `encoder.json` and `vocab.bpe`, or `vocab.json` and `merges.txt`. In a
    folder, the names of the files for "bpe" may have a prefix, and `.gz` at the end. The end token
    may have any name that published files in the same folder give. "bytes" reads no file.

    Raises:
      ConfigError: there is no tokenizer of this kind, or the tokenizer is damaged or does not
        preserve text.
    """
    _check_kind(kind)
    in_bucket(path)  # an error names another kind of URL
    file = epath.Path(path)
    if kind == "bytes":
        return Bytes()
    if kind == "words":
        return Words.load(file / Words.file if file.is_dir() else file)
    if not file.exists():
        raise ConfigError(
            f"there is no tokenizer at {path}: give a tokenizer.json, or a folder with GPT-2's vocabulary"
        )
    if not file.is_dir():
        return _tokenizer_json(file)
    if tokenizer := _byte_level(file):
        return tokenizer
    raise ConfigError(
        f"{path} has no tokenizer: put tokenizer.json, encoder.json with vocab.bpe, or vocab.json with merges.txt there"
    )


def find(folder: epath.PathLike) -> Tokenizer | None:
    """Loads the tokenizer of any kind in a folder; None if it has none that `load` can read.

    Raises:
      ConfigError: the tokenizer is damaged.
    """
    words = epath.Path(folder) / Words.file
    return Words.load(words) if words.exists() else _byte_level(epath.Path(folder))


def files(tokenizer: Tokenizer) -> dict[str, str]:
    """The files from which `load` restores a tokenizer, by name; `tokenizer.file` is the last."""
    end = getattr(tokenizer, "end_name", ENDS[0])
    beside = {} if end in ENDS else {_END_FILES[0]: json.dumps({"eos_token": end}) + "\n"}
    return beside | {tokenizer.file: tokenizer.text}


def _check_kind(kind: str) -> None:
    if kind not in get_args(Kind):
        raise unknown("tokenizer", kind, get_args(Kind))


def same(first: Tokenizer, second: Tokenizer) -> bool:
    """True if both tokenizers have the same tokens, numbers and merges, in files of any format."""
    return first.file == second.file and _meaning(first) == _meaning(second)


def _meaning(tokenizer: Tokenizer) -> Any:
    if tokenizer.file != BPE.file:
        return tokenizer.text, tokenizer.end
    content = json.loads(tokenizer.text)
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary = {**content["model"]["vocab"], **added}
    return vocabulary, content["model"].get("merges"), tokenizer.end


def _end_beside(path: epath.Path, vocabulary: Mapping[str, int]) -> str | None:
    """The end token, from published files next to `path`, if it is not one of `ENDS`."""
    names = {number: name for name, number in vocabulary.items()}
    if any(name in vocabulary for name in ENDS):
        names = {}
    for file in (path.parent / name for name in _END_FILES if names):
        values = read_object(file) if file.exists() else {}
        end = values.get("eos_token", values.get("eos_token_id"))
        end = (
            end.get("content")
            if isinstance(end, dict)
            else next(iter(end), None)
            if isinstance(end, list)
            else end
        )
        name = names.get(end) if type(end) is int else end
        if isinstance(name, str) and name in vocabulary:
            return name
    return None


def _byte_level(folder: epath.Path) -> BPE | None:
    single = _named(folder, BPE.file)
    if single is not None:
        return _tokenizer_json(single)
    for names in _PAIRS:
        vocabulary, merges = (_named(folder, name) for name in names)
        if vocabulary is not None and merges is not None:
            return _gpt2(vocabulary, merges)
    return None


def _tokenizer_json(path: epath.Path) -> BPE:
    from tokenizers import Tokenizer as Library

    content = read_text(path)
    try:
        with without_stderr(), clear_panics():
            tokenizer = Library.from_str(content)
    except Exception as error:  # the library raises this class itself
        raise ConfigError(
            f"{path} is not a valid tokenizer.json ({first_line(error)}): fetch it again"
        ) from error
    try:
        bpe = BPE(tokenizer, _end_beside(path, tokenizer.get_vocab(with_added_tokens=True)))
    except ConfigError as error:
        raise ConfigError(f"in {path}, {error}") from error
    another = (
        "give a tokenizer of all bytes, such as GPT-2's, or leave the vocabulary out to learn one"
    )
    try:
        with without_stderr():  # where the library prints a panic
            back = bpe.decode(bpe.encode([_PROBE])[0])
    except (
        Exception
    ) as error:  # the library raises this class itself if there is no token for unknown text
        raise ConfigError(
            f"{path} cannot encode every text ({first_line(error)}): {another}"
        ) from error
    # Some tokenizers add a space before every text, which loses nothing.
    if back.removeprefix(" ") != _PROBE:
        raise ConfigError(f"{path} loses text ({_PROBE!r} comes back as {back!r}): {another}")
    end = bpe.decode(np.array([bpe.end]))
    if bpe.end in bpe.encode([end])[0]:
        raise ConfigError(f"{path} takes the text {end!r} for the end of a text: {another}")
    return bpe


def _gpt2(vocabulary: epath.Path, merges: epath.Path) -> BPE:
    numbers = read_object(vocabulary)
    if not all(type(line_number) is int for line_number in numbers.values()):
        raise ConfigError(f"{vocabulary} does not map tokens to their numbers: fetch it again")
    pairs = []
    for line_number, line in enumerate(read_text(merges).split("\n"), start=1):
        if (line_number == 1 and line.startswith("#version")) or not line:
            continue
        pieces = line.removesuffix("\r").split(" ")
        if len(pieces) != 2 or not all(pieces):
            raise ConfigError(
                f"{merges}, line {line_number} must have two tokens with a space between: fetch the file again"
            )
        pairs.append((pieces[0], pieces[1]))
    try:
        return BPE.create(numbers, pairs, _end_beside(vocabulary, numbers))
    except ConfigError as error:
        raise ConfigError(f"in {vocabulary} and {merges.name}, {error}") from error


def _named(folder: epath.Path, name: str) -> epath.Path | None:
    """Returns the file of this name in a folder, or else a file whose name ends with this name."""
    paths = sorted(path for suffix in ("", ".gz") for path in glob_in(folder, f"*{name}{suffix}"))
    exact = [path for path in paths if path.name in (name, f"{name}.gz")]
    return next(iter(exact or paths), None)
