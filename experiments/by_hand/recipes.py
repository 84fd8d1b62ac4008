"""A recipe for each ability: which registers a decoder has, and what each head moves.

A recipe needs only gadgets, so it works with every encoding that has them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.by_hand.gadgets import Gadgets
from experiments.by_hand.weights import Weights, codes

Tokens = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Weights for one ability.

    Attributes:
      write: writes the weights, given the numbers of the tokens by text.
      registers: the width of each register.
      sizes: what differs from the model of the ability's config, for an encoding.
    """

    write: Callable[[Weights, Gadgets, Tokens], None]
    registers: Mapping[str, int]
    sizes: Callable[[type[Gadgets]], Mapping[str, Any]] = lambda gadgets: {}


def _ignore(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    for name, texts in {"write": "w", "read": "r", "bit": "01"}.items():
        w.embed(name, {tokens[text]: 1 for text in texts})
    w.embed("sign", {tokens["0"]: -1, tokens["1"]: 1})
    gadgets.first_since(0, 0, w.pick("write"), w.pick("read"), w.pick("bit"))
    w.move(0, 0, w.pick("sign"), w.pick("answer"))
    w.answers({tokens["0"]: -w.pick("answer"), tokens["1"]: w.pick("answer")})


def _count(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    """The shares of the last `=` and of the `++;` after it are as 1 to n: 2mn − m² is largest at
    m = n, so logits are linear in the shares. With a stick, the share of `=` is 0.9^n instead.
    """
    w.embed("set", {tokens["="]: 1})
    w.embed("increment", {tokens["++;"]: 1})
    gadgets.since(0, 0, w.pick("set"), w.pick("increment"))
    w.move(0, 0, np.hstack([w.pick("set"), w.pick("increment")]), w.pick("shares"))
    share_of_set, share = np.hsplit(w.pick("shares"), 2)
    values = range(11)
    if gadgets.taken is None:
        forms = {n: 2 * n * share - n**2 * share_of_set for n in values}
    else:
        left = {n: (1 - gadgets.taken) ** n for n in values}
        forms = {n: 2 * left[n] * share_of_set - left[n] ** 2 * w.one for n in values}
    w.answers({tokens[str(n)]: form for n, form in forms.items()})


def _recall(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    half = len(tokens) // 2
    code = codes(len(tokens))
    values = {token: code[token] for token in range(half, len(tokens))}
    w.embed("value", values)
    w.spell("answer", values)
    if gadgets.reads_prefix:
        _recall_by_share(w, gadgets, half)
        return
    w.embed("token", dict(enumerate(code)))
    gadgets.previous(0, 0, w.pick("token"), w.pick("previous"))
    gadgets.match(1, 0, w.pick("token"), w.pick("previous"), signed=True)
    w.move(1, 0, w.pick("value"), w.pick("answer"))


def _recall_by_share(w: Weights, gadgets: Gadgets, half: int) -> None:
    """The share of a key in the prefix falls after the key: among values, it is largest at the next."""
    w.embed("key", {token: np.eye(half)[token] for token in range(half)})
    w.embed("is_key", {token: 1 for token in range(half)})
    w.move(0, 0, w.pick("key"), 0.01 * w.pick("key"))
    scale, keys = 4e5, w.pick("key")[:, 1:]  # token 0 is no key
    query = scale * np.hstack([keys, w.one])
    w.compare(1, 1, query, np.hstack([keys, -10 * w.pick("is_key")]), range(half))
    w.move(1, 1, w.pick("value"), w.pick("answer"))


def _occurrence(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    """With four layers, each key finds its last value, and the value after it keeps it."""
    keys = [token for text, token in tokens.items() if text.startswith("k")]
    values = dict(zip(sorted(set(tokens.values()) - set(keys)), codes(8), strict=True))
    w.embed("key", {token: np.eye(4)[token] for token in keys})
    w.embed("value", values)
    gadgets.previous(0, 0, w.pick("key"), w.pick("previous"))
    key, previous = w.pick("key"), w.pick("previous")
    if gadgets.second_latest:
        gadgets.match(1, 0, key, previous, signed=False, back=2)
        w.move(1, 0, w.pick("value"), w.pick("answer"))
    else:
        gadgets.match(1, 0, key, previous, signed=False, back=1)
        w.move(1, 0, w.pick("value"), w.pick("last"))
        gadgets.previous(2, 0, w.pick("last"), w.pick("before"))
        gadgets.match(3, 0, key, previous, signed=False, back=1)
        w.move(3, 0, w.pick("before"), w.pick("answer"))
    w.spell("answer", values)


def _steps(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    w.embed("up", {tokens["+x"]: 1})
    w.embed("down", {tokens["-x"]: 1})
    objects = {tokens[str(number)]: code for number, code in enumerate(codes(8))}
    w.embed("object", objects)
    w.embed("is_object", {token: 1 for token in objects})
    gadgets.balanced(0, 0, w.pick("up"), w.pick("down"), w.pick("is_object"))
    w.move(0, 0, w.pick("object"), w.pick("answer"))
    w.spell("answer", objects)


FOLD = 32
"""Parity of a count up to FOLD²: a layer folds the count into FOLD, the next one into 1."""


def _parity(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    """The shares of 1 and of `=` are n/t and 1/t. A fold has corners at multiples of 1/t, so it
    returns the folded count divided by t.
    """
    w.embed("bit", {tokens["1"]: 1})
    w.embed("end", {tokens["="]: 1})
    gadgets.average()
    w.move(0, 0, np.hstack([w.pick("bit"), w.pick("end")]), w.pick("shares"))
    count, unit = np.hsplit(w.pick("shares"), 2)
    for layer, width, target in ((0, FOLD, "folded"), (1, 1, "odd")):
        for corner in range(FOLD):
            slope = 1 if corner == 0 else 2 * (-1) ** corner
            w.relu(layer, count - corner * width * unit, slope * w.pick(target))
        count = w.pick(target)
    w.answers({tokens["0"]: 0 * unit, tokens["1"]: 2 * w.pick("odd") - unit})


def _index(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    letters = {token: code for token, code in zip(range(52), codes(52), strict=True)}
    w.embed("letter", letters)
    w.embed("is_letter", {token: 1 for token in letters})
    w.embed("is_sign", {tokens["+"]: 1, tokens["-"]: 1})
    w.embed("minus", {tokens["-"]: 1})
    w.embed("is_digit", {tokens["0"]: 1, tokens["1"]: 1})
    w.embed("zero", {tokens["0"]: 1})
    letter, is_letter, unit = w.pick("letter"), w.pick("is_letter"), w.one
    before, asked, shift = w.pick("before"), w.pick("asked"), w.pick("shift")
    gadgets.previous(0, 0, np.hstack([letter, is_letter]), before)
    gadgets.match(0, 2, unit, is_letter, signed=False, back=1)
    w.move(0, 2, letter, asked)
    gadgets.match(0, 3, unit, w.pick("is_sign"), signed=False)
    w.move(0, 3, w.pick("minus"), shift[:, :1])
    gadgets.match(0, 4, unit, w.pick("is_digit"), signed=False)
    w.move(0, 4, w.pick("zero"), shift[:, 1:])
    # The letter after the one asked for, and the letter before it, in the string. The first letter
    # has itself before it, so the nearest counts, or what is most unlike the token before it. The
    # letter in the question has a comma before it.
    query, key = np.hstack([asked, unit]), np.hstack([before[:, :-1], 2 * is_letter - unit])
    if gadgets.signed_latest:
        gadgets.match(1, 0, query, key, signed=True, back=1)
    else:
        alike = np.hstack([letter + key[:, :-1], -letter - key[:, :-1]])
        w.relu(0, alike, np.repeat(w.pick("alike"), 12, axis=1))
        query_and_less = np.hstack([10 * query, -unit])
        gadgets.match(1, 0, query_and_less, np.hstack([key, w.pick("alike")]), signed=True)
    w.move(1, 0, letter, w.pick("after"))
    gadgets.match(1, 1, query, np.hstack([letter, 2 * before[:, -1:] - unit]), signed=True)
    w.move(1, 1, before[:, :-1], w.pick("earlier"))
    minus, zero = np.hsplit(shift, 2)
    wrong = {"after": minus + zero, "earlier": unit - minus, "asked": unit - zero}
    for name, otherwise in wrong.items():
        for sign in (1, -1):
            w.relu(1, sign * w.pick(name) - 2 * otherwise, sign * w.pick("answer"))
    w.spell("answer", letters)


def _stack(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    w.embed("up", {tokens["("]: 1, tokens["["]: 1})
    w.embed("down", {tokens[")"]: 1, tokens["]"]: 1})
    w.embed("kind", {tokens["("]: 1, tokens["["]: -1})
    up, down, top, unit = (w.pick(name) for name in ("up", "down", "top", "one"))
    gadgets.top(0, 0, up, down)
    w.move(0, 0, w.pick("kind"), top)
    w.move(0, 1, up - down, w.pick("depth"))  # divided by the number of tokens
    w.step(0, w.pick("depth"), w.pick("inside"), sharpness=3000)
    closed = 100 * (w.pick("inside") - unit)
    w.answers(
        {
            tokens["("]: 0 * unit,
            tokens["["]: 0 * unit,
            tokens[")"]: closed + 50 * (top - unit),
            tokens["]"]: closed - 50 * (top + unit),
        }
    )


SLOTS = 8
"""The letters that say where a copy is: of 1,024 letters, 8 repeat once in 400,000 strings."""


def _copy(w: Weights, gadgets: Gadgets, tokens: Tokens) -> None:
    """Each layer moves one more letter from the token before; `=` looks at nothing, so that what
    follows it has the same letters before it as in the string.
    """
    letters = {token: code for token, code in zip(range(26), codes(26), strict=True)}
    w.embed("slot0", {token: [*code, 1] for token, code in letters.items()})
    w.embed("end", {tokens["="]: 1})
    for layer in range(SLOTS):
        gadgets.previous_unless(
            layer, 0, w.pick(f"slot{layer}"), w.pick(f"slot{layer + 1}"), w.pick("end")
        )
    slots = [w.pick(f"slot{slot}") for slot in range(SLOTS + 1)]
    signed = [np.hstack([slot[:, :-1], 2 * slot[:, -1:] - w.one]) for slot in slots]
    letters_known = sum(slot[:, -1:] for slot in slots[:-1])
    query = np.hstack([*signed[:-1], SLOTS * w.one + 5 * letters_known - w.one])
    scale = 40.0
    w.compare(SLOTS, 0, scale * query, np.hstack([*signed[1:], -w.one]), range(query.shape[1]))
    w.move(SLOTS, 0, slots[0][:, :-1], w.pick("answer"))
    w.spell("answer", letters)


def _wide(gadgets: type[Gadgets]) -> Mapping[str, Any]:
    return {"block": {"head_dim": gadgets.far_match}} if gadgets.far_match else {}


def _deep(gadgets: type[Gadgets]) -> Mapping[str, Any]:
    return {} if gadgets.second_latest else {"num_layers": 4}


RECIPES: dict[str, Recipe] = {
    "ignore": Recipe(_ignore, {"write": 1, "read": 1, "bit": 1, "sign": 1, "answer": 1}),
    "count": Recipe(_count, {"set": 1, "increment": 1, "shares": 2}),
    "recall": Recipe(
        _recall, {"value": 6, "answer": 6, "token": 6, "previous": 6, "key": 32, "is_key": 1}, _wide
    ),
    "occurrence": Recipe(
        _occurrence,
        {"key": 4, "value": 3, "previous": 4, "last": 3, "before": 3, "answer": 3},
        _deep,
    ),
    "steps": Recipe(_steps, {"up": 1, "down": 1, "object": 3, "is_object": 1, "answer": 3}),
    "parity": Recipe(_parity, {"bit": 1, "end": 1, "shares": 2, "folded": 1, "odd": 1}),
    "index": Recipe(
        _index,
        {
            **{"letter": 6, "is_letter": 1, "is_sign": 1, "minus": 1, "is_digit": 1, "zero": 1},
            **{"before": 7, "asked": 6, "shift": 2, "after": 6, "earlier": 6, "alike": 1},
            "answer": 6,
        },
        lambda gadgets: {"block": {"num_heads": 5, "head_dim": 64}},
    ),
    "stack": Recipe(_stack, {"up": 1, "down": 1, "kind": 1, "top": 1, "depth": 1, "inside": 1}),
    "copy": Recipe(
        _copy,
        {**{f"slot{slot}": 6 for slot in range(SLOTS + 1)}, "end": 1, "answer": 5},
        lambda gadgets: {"num_layers": SLOTS + 1, "block": {"head_dim": 64}},
    ),
}
