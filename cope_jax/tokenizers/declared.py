"""Judges a tokenizer by its file: if texts come back, and if a text has the tokens of its parts.

Only types that are listed here, with the options that are checked here, keep every byte. Others may
change text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Part = Mapping[str, Any]

_NORMALIZERS = frozenset({"ByteLevel"})
_SPLITTERS = frozenset({"ByteLevel", "Digits", "FixedLength", "Punctuation", "Split"})
"""Pre-tokenizers that keep all characters, unless they remove those at which they split.

UnicodeScripts is not among them: it loses some rare characters, such as U+25AF3.
"""


def alphabet() -> list[str]:
    """The characters that GPT-2 writes for the bytes 0 … 255; visible ones represent themselves."""
    seen = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def may_change(tokenizer: Any) -> str:
    """Names the first stage of a tokenizer that may change a text; "" if all texts come back."""
    content = json.loads(tokenizer.to_str())
    normalizers, splitters, decoders = _stages(tokenizer)
    for stage in normalizers:
        if stage["type"] not in _NORMALIZERS:
            return f"the normalizer {stage['type']}"
    for stage in splitters:
        if (
            stage["type"] not in _SPLITTERS
            or stage.get("behavior") == "Removed"
            or stage.get("add_prefix_space")
        ):
            return f"the pre-tokenizer {stage['type']}"
    if [stage["type"] for stage in (*normalizers, *splitters)].count("ByteLevel") != 1:
        return "text that is not turned into bytes once"
    if [stage["type"] for stage in decoders] not in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return f"the decoder {', '.join(stage['type'] for stage in decoders) or 'that is missing'}"
    model = content["model"]
    whole = model["type"] == "BPE" and not (
        model["continuing_subword_prefix"] or model["end_of_word_suffix"]
    )
    if not whole or not model["vocab"].keys() >= set(alphabet()):
        return f"the model {model['type']}, which does not have all bytes"
    if any(
        tokenizer.id_to_token(number) != token
        for token, number in tokenizer.get_vocab(True).items()
    ):
        return "a number of two tokens"
    for token in _added(content):
        if (
            token["lstrip"]
            or token["rstrip"]
            or tokenizer.decode([token["id"]], False) != token["content"]
        ):
            return f"the added token {token['content']!r}"
    return ""


def divides(tokenizer: Any) -> bool:
    """True if a text has the tokens of its parts, cut at single line ends or before single spaces.

    This holds if words are split as by GPT-2, and nothing depends on where a text begins. Other
    splits are not judged.
    """
    content = json.loads(tokenizer.to_str())
    normalizers, splitters, _ = _stages(tokenizer)
    if normalizers or [stage["type"] for stage in splitters] != ["ByteLevel"]:
        return False
    if splitters[0]["add_prefix_space"] or not splitters[0]["use_regex"]:
        return False
    texts = [token["content"] for token in _added(content)]
    return all(text.isspace() or not any(map(str.isspace, text)) for text in texts)


def _stages(tokenizer: Any) -> list[list[Part]]:
    """The normalizers, pre-tokenizers and decoders, in their order, without enclosing sequences."""
    stages = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    return [
        [] if stage is None else list(_flat(json.loads(stage.__getstate__()))) for stage in stages
    ]


def _flat(stage: Part) -> Iterable[Part]:
    if stage["type"] != "Sequence":
        yield stage
        return
    for inner in next(value for value in stage.values() if isinstance(value, list)):
        yield from _flat(inner)


def _added(content: Part) -> list[Part]:
    """The added tokens that are matched in a text, in contrast to special ones."""
    return [token for token in content["added_tokens"] if not token["special"]]
