"""Several encodings at once, such as CoPE with RoPE, by composing their hooks."""

from collections.abc import Sequence

import jax
from flax import nnx

from cope_jax.encodings.base import AttentionShape, Encoding, NoOptions
from cope_jax.typing import Array, PyTree


class Composed(Encoding):
    """Applies several encodings to the same attention.

    `embed` and `rotate` are chained in order. What the parts' `score` add to the content logits is summed:
    logits + Σ_e (score_e(logits) − logits). So every part sees the content logits, CoPE's gates are σ(q·k) whatever
    stands beside it, and the order of the parts does not matter to `score`.
    """

    def __init__(self, parts: Sequence[Encoding], shape: AttentionShape):
        super().__init__(NoOptions(), shape, rngs=nnx.Rngs(0))
        self.parts = nnx.List(parts)

    def embed(self, x_BLD: Array, positions_BL: Array) -> Array:
        for part in self.parts:
            x_BLD = part.embed(x_BLD, positions_BL)
        return x_BLD

    def rotate(self, q_BLHK: Array, k_BMGK: Array, q_positions_BL: Array, k_positions_BM: Array) -> tuple[Array, Array]:
        for part in self.parts:
            q_BLHK, k_BMGK = part.rotate(q_BLHK, k_BMGK, q_positions_BL, k_positions_BM)
        return q_BLHK, k_BMGK

    def key_features(self, x_BMD: Array | None, k_BMGK: Array, v_BMGK: Array) -> PyTree:
        return tuple(part.key_features(x_BMD, k_BMGK, v_BMGK) for part in self.parts)

    def initial_carry(self, q_BLHK: Array) -> PyTree:
        return tuple(part.initial_carry(q_BLHK) for part in self.parts)

    def score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> tuple[Array, PyTree]:
        scored, carries = [], []
        for part, part_features, part_carry in zip(self.parts, features, carry, strict=True):
            part_scored, part_carry = part.score(
                q_BLHK, k_BMGK, part_features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, part_carry
            )
            scored.append(part_scored)
            carries.append(part_carry)
        return _sum_of_increments(logits_BHLM, scored), tuple(carries)

    def settled(self, carry: PyTree) -> Array | None:
        settled = None
        for part, part_carry in zip(self.parts, carry, strict=True):
            if not jax.tree.leaves(part_carry):  # a part without a carry has nothing to settle
                continue
            own = part.settled(part_carry)
            if own is None:
                return None
            settled = own if settled is None else settled & own
        return settled

    def settled_score(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> Array:
        scored = [
            part.settled_score(
                q_BLHK, k_BMGK, part_features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, part_carry
            )
            for part, part_features, part_carry in zip(self.parts, features, carry, strict=True)
        ]
        return _sum_of_increments(logits_BHLM, scored)

    def slopes(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
        carry: PyTree,
    ) -> PyTree | None:
        slopes = [
            part.slopes(
                q_BLHK, k_BMGK, part_features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, part_carry
            )
            for part, part_features, part_carry in zip(self.parts, features, carry, strict=True)
        ]
        return None if any(slope is None for slope in slopes) else tuple(slopes)

    def diagnostics(
        self,
        q_BLHK: Array,
        k_BMGK: Array,
        features: PyTree,
        logits_BHLM: Array,
        mask_B1LM: Array,
        q_positions_BL: Array,
        k_positions_BM: Array,
    ) -> dict[str, Array]:
        maps: dict[str, Array] = {}
        for part, part_features in zip(self.parts, features, strict=True):
            maps |= part.diagnostics(
                q_BLHK, k_BMGK, part_features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM
            )
        return maps


def _sum_of_increments(logits_BHLM: Array, scored: Sequence[Array]) -> Array:
    total = logits_BHLM
    for one in scored:
        if one is not logits_BHLM:  # a part that leaves the logits alone costs nothing
            total = one if total is logits_BHLM else total + (one - logits_BHLM)
    return total
