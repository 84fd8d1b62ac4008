"""Applies several encodings together, such as CoPE with RoPE, by composing their hooks."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping

import jax
from flax import nnx

from cope_jax.array_types import Array, PyTree
from cope_jax.encodings.base import (
    AttentionShape,
    Carry,
    Encoding,
    NoOptions,
    Pairs,
    Tokens,
    Traits,
)
from cope_jax.errors import ConfigError


class Composed(Encoding):
    """Applies any number of encodings, called parts, to the same attention; each part is an
    attribute with its name.

    `embed` and `rotate` are chained in order. `score` adds up the changes that the parts make to
    the content logits: logits + Σ_e (score_e(logits) − logits). Every part sees the content logits,
    so the order of the parts does not matter to `score`. CoPE's gates (with gate="query_key") are
    σ(q·k/√K) with any other part. With rope, q and k are the rotated queries and keys.

    Raises:
      ConfigError: a part excludes another, two parts replace q·k, two parts have a sink, or the
        name of a part is an attribute of every encoding.
    """

    def __init__(self, parts: Mapping[str, Encoding], shape: AttentionShape):
        super().__init__(NoOptions(), shape, rngs=nnx.Rngs(0))
        for name in parts:
            if name in (*dir(self), "names"):
                raise ConfigError(
                    f"rename the encoding {name!r}: every encoding already has an attribute of that name"
                )
        for name, encoding in parts.items():
            for other, theirs in parts.items():
                if other != name and any(
                    _overrides(theirs, hook) for hook in encoding.traits.excludes
                ):
                    excluded = {
                        "rotate": "rotates",
                        "rotate_values": "turns values",
                        "score": "changes logits",
                    }
                    roles = " or ".join(excluded[hook] for hook in encoding.traits.excludes)
                    raise ConfigError(
                        f"{name} and {other} cannot be combined: {name} excludes what {roles}"
                    )
        self.names = tuple(parts)
        for name, encoding in parts.items():
            setattr(self, name, encoding)
        self.traits = Traits.of_composition([encoding.traits for encoding in parts.values()])
        replacing = [name for name, encoding in parts.items() if not encoding.traits.reads_logits]
        if len(replacing) > 1:
            raise ConfigError(f"{' and '.join(replacing)} each replace q·k: keep only one of them")
        with_sink = [
            name for name, encoding in parts.items() if type(encoding).sink is not Encoding.sink
        ]
        if len(with_sink) > 1:
            raise ConfigError(
                f"{' and '.join(with_sink)} each have a sink for the softmax: keep only one of them"
            )

    @property
    def parts(self) -> dict[str, Encoding]:
        """The parts by name, in order."""
        return {name: getattr(self, name) for name in self.names}

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        for encoding in self.parts.values():
            x_BLD = encoding.embed(x_BLD, positions_BL)
        return x_BLD

    def features(self, tokens: Tokens, state: PyTree) -> tuple[PyTree, PyTree]:
        both = {
            name: encoding.checked_features(tokens, None if state is None else state[name])
            for name, encoding in self.parts.items()
        }
        features, after = ({name: pair[which] for name, pair in both.items()} for which in (0, 1))
        return features, after

    def rotate(self, x_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        for name, encoding in self.parts.items():
            x_BLHK = encoding.rotate(x_BLHK, features[name], positions_BL)
        return x_BLHK

    def rotate_keys(self, k_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        for name, encoding in self.parts.items():
            k_BMGK = encoding.rotate_keys(k_BMGK, features[name], positions_BM)
        return k_BMGK

    def rotate_values(self, v_BMGK: Array, features: PyTree, positions_BM: Array) -> Array:
        for name, encoding in self.parts.items():
            v_BMGK = encoding.rotate_values(v_BMGK, features[name], positions_BM)
        return v_BMGK

    def rotate_back(self, out_BLHK: Array, features: PyTree, positions_BL: Array) -> Array:
        for name, encoding in reversed(self.parts.items()):
            out_BLHK = encoding.rotate_back(out_BLHK, features[name], positions_BL)
        return out_BLHK

    def initial_carry(self, q_BHLK: Array, q_features: PyTree) -> Carry:
        return _join(
            {
                name: encoding.initial_carry(q_BHLK, q_features[name])
                for name, encoding in self.parts.items()
            }
        )

    def score(self, pairs: Pairs, carry: Carry) -> tuple[Array, Carry]:
        scored = {
            name: encoding.checked_score(_of(name, pairs), _part(name, carry))
            for name, encoding in self.parts.items()
        }
        logits_BHLM = _sum_of_increments(pairs.logits, (logits for logits, _ in scored.values()))
        return logits_BHLM, _join({name: after for name, (_, after) in scored.items()})

    def saturated(self, carry: Carry) -> Array | None:
        # A part without a carry, or that does not change the logits, cannot saturate.
        carries = {name: _part(name, carry) for name in self.names}
        counting = {
            name: encoding
            for name, encoding in self.parts.items()
            if jax.tree.leaves(carries[name]) and type(encoding).score is not Encoding.score
        }
        return _in_all(encoding.saturated(carries[name]) for name, encoding in counting.items())

    def tail(self, pairs: Pairs, carry: Carry) -> Array:
        scored = (
            encoding.tail(_of(name, pairs), _part(name, carry))
            for name, encoding in self.parts.items()
        )
        return _sum_of_increments(pairs.logits, scored)

    def sink(self, carry: Carry) -> Array | None:
        sinks = (encoding.sink(_part(name, carry)) for name, encoding in self.parts.items())
        return next((logit for logit in sinks if logit is not None), None)

    def done(self, carry: Carry) -> Array | None:
        # A part that does not change the logits cannot restore weight that another part has
        # removed.
        scoring = {
            name: encoding
            for name, encoding in self.parts.items()
            if type(encoding).score is not Encoding.score
        }
        return _in_all(encoding.done(_part(name, carry)) for name, encoding in scoring.items())

    def maps(self, pairs: Pairs) -> dict[str, Array]:
        maps = {name: encoding.maps(_of(name, pairs)) for name, encoding in self.parts.items()}
        counts = collections.Counter(key for named in maps.values() for key in named)
        return {
            key if counts[key] == 1 else f"{name}.{key}": values
            for name, named in maps.items()
            for key, values in named.items()
        }


def _of(name: str, pairs: Pairs) -> Pairs:
    return dataclasses.replace(
        pairs, q_features=pairs.q_features[name], k_features=pairs.k_features[name]
    )


def _part(name: str, carry: Carry) -> Carry:
    return Carry(*(kind[name] for kind in carry))


def _join(carries: dict[str, Carry]) -> Carry:
    """Joins the carries of the parts: each field of the result is a dict by name of the part."""
    return Carry(
        *(
            {name: carry[kind] for name, carry in carries.items()}
            for kind in range(len(Carry._fields))
        )
    )


def _in_all(rows: Iterable[Array | None]) -> Array | None:
    """True where all entries are True; None if there are no entries, or if any entry is None."""
    answers = list(rows)
    if not answers or any(answer is None for answer in answers):
        return None
    return functools.reduce(operator.and_, answers)


def _sum_of_increments(logits_BHLM: Array, scored: Iterable[Array]) -> Array:
    total = logits_BHLM
    for scored_BHLM in scored:
        if scored_BHLM is not logits_BHLM:  # a part that leaves the logits alone costs nothing
            total = scored_BHLM if total is logits_BHLM else total + (scored_BHLM - logits_BHLM)
    return total


def _overrides(encoding: Encoding, hook: str) -> bool:
    if hook == "rotate_values" and not encoding.traits.turns_values:
        return False
    hooks = ("rotate", "rotate_keys") if hook == "rotate" else (hook,)
    return any(getattr(type(encoding), name) is not getattr(Encoding, name) for name in hooks)
