"""What an encoding adds to the logits, as data for kernels that are written by hand."""

import inspect
from typing import Any, Literal, NamedTuple

from cope_jax.array_types import Array, PyTree


class NativeScore(NamedTuple):
    """What `score` adds to the logits, as data for kernels that are written by hand.

    The logit of a pair is s_ij + z_i(p_ij) with a table, s_ij + m·p_ij with slopes, and s_ij without gates, where p_ij
    is the sum of the gates from the key to the query, and z_i(p) = q_i·e interpolated at min(p, N−1).

    Attributes:
      gates: what the sigmoid of a gate is taken of: "logits" means s_ij, "keys" means q_i·u_j/√K. None means that
        `score` adds nothing.
      gate_keys: u_BGMK, the keys of the gates.
      table: e_NK.
      slopes: m_H.
    """

    gates: Literal["logits", "keys"] | None = None
    gate_keys: Array | None = None
    table: Array | None = None
    slopes: Array | None = None


def native_score_of(encoding: Any, v_BGMK: Array, k_features: PyTree) -> NativeScore | None:
    """Returns `encoding.native_score(…)`, or None if a subclass overrides what the method describes."""
    kinds = type(encoding).__mro__
    own = next(number for number, kind in enumerate(kinds) if "native_score" in vars(kind))
    described = {"initial_carry", "score", "saturated", "tail", "done", "sink"}
    # The private methods that it may call count too.
    functions = (name for name, value in vars(kinds[own]).items() if inspect.isfunction(value))
    described |= {name for name in functions if name.startswith("_") and not name.startswith("__")}
    changed = any(described & set(vars(kind)) for kind in kinds[:own])
    return None if changed else encoding.native_score(v_BGMK, k_features)
