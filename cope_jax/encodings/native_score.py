"""Descriptions of an encoding's term of the logits, for kernels written by hand."""

from typing import Literal, NamedTuple

from cope_jax.array_types import Array


class NativeScore(NamedTuple):
    """The term that `score` adds to the logits, described for kernels written by hand.

    The logit of a pair is s_ij + z_i(p_ij) with a table, s_ij + m·p_ij with slopes, and s_ij
    without gates, where p_ij is the sum of the gates from the key to the query, and z_i(p) = q_i·e
    interpolated at min(p, N−1).

    Attributes:
      gates: what the sigmoid of a gate is taken of: "logits" means s_ij, "keys" means q_i·u_j/√K.
        None means that `score` adds nothing.
      gate_keys: u_BMGK, the keys of the gates.
      table: e_NK.
      slopes: m_H.
    """

    gates: Literal["logits", "keys"] | None = None
    gate_keys: Array | None = None
    table: Array | None = None
    slopes: Array | None = None
