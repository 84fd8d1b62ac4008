"""No position encoding at all."""

from cope_jax.encodings.base import ENCODINGS, Encoding


@ENCODINGS.register("none")
class NoPE(Encoding):
    """No position encoding (NoPE): the model knows the order of tokens only through the causal
    mask.

    a_ij = softmax_j(q_i·k_j/√K). Kazemnejad et al. (arXiv 2305.19466).
    """
