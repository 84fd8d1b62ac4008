"""The contenders in PyTorch, on all CPU cores: `cope_jax.torch`, the paper's listing, as it is and
compiled, x-transformers, and fused RoPE.
"""

from collections.abc import Callable, Mapping

import jax
import torch
import torch.nn.functional as F

from cope_jax import tasks
from cope_jax.layers.block_config import BlockConfig
from tools.benchmark.workloads import BACKWARD, FORWARD, STEP, Problem, Recipe, cores
from tools.timing import LeftOut, Task

# About how many float32 matrices [L, L] for each head the backward pass keeps at its peak. 64-bit
# indices count twice.
OF_COPE = 18


def cope_in_jax(problem: Problem) -> Mapping[str, Task]:
    """CoPE in `cope_jax.torch`, with tensors in our layout."""
    from cope_jax.torch import Encoding

    sizes = {"num_heads": problem.heads, "head_dim": problem.head_dim}
    cope = Encoding("cope", **sizes, npos_max=problem.npos_max)
    cope.table = torch.nn.Parameter(_table(problem).detach())
    return _tasks(cope, problem, cope.table, ours=True)


def cope_listing(problem: Problem, compiled: bool = False) -> Mapping[str, Task]:
    """CoPE as in the listing in appendix B of the paper (arXiv 2405.18719).

    Each step is one operation: gates, their sums from the right, the clip, two gathers, and the
    interpolation. `torch.compile` joins them if `compiled`.
    """
    problem.check_square(OF_COPE)
    table_NK = _table(problem)
    square, dtype = (problem.length, problem.length), getattr(torch, problem.dtype)
    later_LL = torch.full(square, -torch.inf, dtype=dtype).triu(1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = q @ k.mT / problem.head_dim**0.5 + later_LL
        counts = torch.sigmoid(logits).flip(-1).cumsum(-1).flip(-1)
        counts = counts.clamp(max=problem.npos_max - 1)
        below, above = counts.floor(), counts.ceil()
        z = q @ table_NK.mT
        share = counts - below
        at_below, at_above = z.gather(-1, below.long()), z.gather(-1, above.long())
        return torch.softmax(logits + share * at_above + (1 - share) * at_below, dim=-1) @ v

    return _tasks(torch.compile(attention) if compiled else attention, problem, table_NK)


def cope_listing_compiled(problem: Problem) -> Mapping[str, Task]:
    """The listing, compiled by `torch.compile`."""
    return cope_listing(problem, compiled=True)


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
    """`scaled_dot_product_attention` after a half-split rotation, whose angles are computed in
    advance.
    """
    half = problem.head_dim // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(problem.length, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (turn.to(getattr(torch, problem.dtype)) for turn in (angles.cos(), angles.sin()))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)

    return _tasks(attention, problem)


def x_transformers_step(recipe: Recipe, encoding: str) -> Mapping[str, Task]:
    """One training step of x-transformers' decoder with its own CoPE or rotary embedding, and with
    the recipe's sizes.

    The optimizer is AdamW. Attention is fused with the rotary embedding; x-transformers cannot fuse
    it with CoPE.
    """
    from x_transformers import Decoder, TransformerWrapper

    use_all_cores()
    config, block = recipe.config, recipe.config.model.block
    width, heads = block.model_dim, block.num_heads
    plain = BlockConfig(model_dim=width, num_heads=heads, head_dim=block.head_dim)
    if block != plain or config.model.tie_embeddings or config.optimizer.name != "adamw":
        raise LeftOut(
            "this recipe cannot be compared: choose one with the default block, untied embeddings "
            "and AdamW"
        )
    task = tasks.create(config.task.name, **config.task.options)
    head_dim, rows = block.attention_shape(None).head_dim, config.encodings["cope"]["npos_max"]
    options = {
        "cope": {"attn_use_cope": True, "attn_cope_max_pos": rows},
        "rope": {"rotary_pos_emb": True, "rotary_emb_dim": head_dim, "attn_flash": True},
    }[encoding]
    torch.manual_seed(0)
    layers = Decoder(
        dim=width,
        depth=config.model.num_layers,
        heads=heads,
        attn_dim_head=head_dim,
        verbose=False,
        **options,
    )
    model = TransformerWrapper(
        num_tokens=task.vocab_size,
        max_seq_len=task.max_length,
        attn_layers=layers,
        use_abs_pos_emb=False,
    )
    rule = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=rule.learning_rate,
        betas=(rule.beta1, rule.beta2),
        eps=rule.epsilon,
        weight_decay=rule.weight_decay,
    )
    batch = {name: torch.from_numpy(array) for name, array in recipe.batch().items()}
    inputs, targets, weights = batch["inputs"].long(), batch["targets"].long(), batch["weights"]

    def step() -> float:
        losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        loss = (weights * losses).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        if rule.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), rule.clip_norm)
        optimizer.step()
        return loss.item()

    return {STEP: step}


def use_all_cores() -> None:
    """Uses all cores, as JAX does.

    Raises LeftOut if JAX does not compute on the CPU: times would not be comparable.
    """
    if jax.default_backend() != "cpu":
        raise LeftOut("PyTorch is measured on a CPU only: set JAX_PLATFORMS=cpu")
    torch.set_num_threads(cores())


def _table(problem: Problem) -> torch.Tensor:
    table_NK = torch.from_numpy(problem.parameter((problem.npos_max, problem.head_dim)))
    return table_NK.to(getattr(torch, problem.dtype)).requires_grad_()


def _tasks(
    attention: Callable[..., torch.Tensor],
    problem: Problem,
    *params: torch.Tensor,
    ours: bool = False,
) -> Mapping[str, Task]:
    """The tasks of a function of q, k, v in PyTorch's layout, [B, H, L, K], or in ours.

    Their results have our layout.
    """
    use_all_cores()
    heads = 1 if ours else 2
    q, k, v, cotangent = (
        torch.from_numpy(array).transpose(1, heads).to(getattr(torch, problem.dtype)).contiguous()
        for array in problem.arrays()
    )
    inputs = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*inputs).transpose(1, heads)

    def forward_and_backward() -> tuple[torch.Tensor, ...]:
        out = attention(*inputs)
        gradients = torch.autograd.grad(out, [*inputs, *params], cotangent)
        return tuple(x.transpose(1, heads) for x in (out.detach(), *gradients[:3])) + gradients[3:]

    return {FORWARD: forward, BACKWARD: forward_and_backward}
