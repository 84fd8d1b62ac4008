"""Several encodings at once, such as CoPE with RoPE, by composing their hooks."""

from collections.abc import Sequence

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
        total, carries = logits_BHLM, []
        for part, part_features, part_carry in zip(self.parts, features, carry, strict=True):
            scored, part_carry = part.score(
                q_BLHK, k_BMGK, part_features, logits_BHLM, mask_B1LM, q_positions_BL, k_positions_BM, part_carry
            )
            carries.append(part_carry)
            if scored is logits_BHLM:  # a part that leaves the logits alone costs nothing
                continue
            total = scored if total is logits_BHLM else total + (scored - logits_BHLM)
        return total, tuple(carries)

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
