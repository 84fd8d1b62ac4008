"""The contenders that need PyTorch, eager, on all cores: the paper's listing, x-transformers, and fused RoPE."""

from collections.abc import Callable, Mapping

import jax
import torch
import torch.nn.functional as F

from experiments.benchmarks.case import LeftOut
from experiments.benchmarks.contenders import BACKWARD, FORWARD
from experiments.benchmarks.problem import Problem, cores
from experiments.benchmarks.timing import Task

# Matrices of all pairs, float32, that backward holds at its peak, roughly: indices are 64 bits wide.
OF_COPE = 18


def cope_listing(problem: Problem) -> Mapping[str, Task]:
    """What the listing in appendix B of the paper (arXiv 2405.18719) computes.

    Its steps, one operation for each: gates, their sums from the right, the clip, two gathers, their mixture.
    """
    problem.check_square(OF_COPE)
    table_NK = _table(problem)
    later_LL = torch.full((problem.length, problem.length), -torch.inf, dtype=_dtype(problem)).triu(1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = q @ k.mT / problem.head_dim**0.5 + later_LL
        counts = torch.sigmoid(logits).flip(-1).cumsum(-1).flip(-1)
        counts = counts.clamp(max=problem.npos_max - 1)
        below, above = counts.floor(), counts.ceil()
        z = q @ table_NK.mT
        share = counts - below
        at_below, at_above = z.gather(-1, below.long()), z.gather(-1, above.long())
        return torch.softmax(logits + share * at_above + (1 - share) * at_below, dim=-1) @ v

    return _tasks(attention, problem, table_NK)


def x_transformers_cope(problem: Problem) -> Mapping[str, Task]:
    """The attention of x-transformers with its own CoPE."""
    from x_transformers.attend import Attend
    from x_transformers.x_transformers import CoPE

    problem.check_square(OF_COPE)
    cope = CoPE(problem.head_dim, problem.heads, problem.npos_max)
    cope.pos_emb = torch.nn.Parameter(_table(problem))
    attend = Attend(heads=problem.heads, causal=True, scale=problem.head_dim**-0.5, cope=cope)
    return _tasks(lambda q, k, v: attend(q, k, v)[0], problem, cope.pos_emb)


def sdpa_with_rope(problem: Problem) -> Mapping[str, Task]:
    """`scaled_dot_product_attention` after a half-split rotation whose angles are computed beforehand."""
    half = problem.head_dim // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(problem.length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (turn.to(_dtype(problem)) for turn in (angles.cos(), angles.sin()))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    return _tasks(lambda q, k, v: F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True), problem)


def use_all_cores() -> None:
    """As JAX does. Raises LeftOut where JAX does not compute on the CPU: that would be no comparison."""
    if jax.default_backend() != "cpu":
        raise LeftOut("PyTorch is measured on a CPU only")
    torch.set_num_threads(cores())


def _dtype(problem: Problem) -> torch.dtype:
    return getattr(torch, problem.dtype)


def _table(problem: Problem) -> torch.Tensor:
    table_NK = torch.from_numpy(problem.parameter((problem.npos_max, problem.head_dim)))
    return table_NK.to(_dtype(problem)).requires_grad_()


def _tasks(attention: Callable[..., torch.Tensor], problem: Problem, *params: torch.Tensor) -> Mapping[str, Task]:
    """Tasks of a function of q, k, v in PyTorch's layout, [B, H, L, K]; what they return is in ours."""
    use_all_cores()
    q, k, v, cotangent = (
        torch.from_numpy(array).transpose(1, 2).to(_dtype(problem)).contiguous() for array in problem.arrays()
    )
    inputs = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*inputs).transpose(1, 2)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        out = attention(*inputs)
        gradients = torch.autograd.grad(out, [*inputs, *params], cotangent)
        return tuple(x.transpose(1, 2) for x in (out.detach(), *gradients[:3])) + gradients[3:]

    return {FORWARD: forward, BACKWARD: forward_and_backward}
