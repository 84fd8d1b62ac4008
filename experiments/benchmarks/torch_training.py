"""Training steps of x-transformers."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from x_transformers import Decoder, TransformerWrapper

from cope_jax import tasks
from cope_jax.layers.config import BlockConfig
from experiments.benchmarks.case import LeftOut
from experiments.benchmarks.timing import Task
from experiments.benchmarks.torch_contenders import use_all_cores
from experiments.benchmarks.training import STEP, Recipe


def x_transformers(recipe: Recipe, encoding: str) -> Mapping[str, Task]:
    """One step of a decoder with the sizes of the recipe, its own CoPE or rotary embedding, and AdamW.

    Attention is fused where it can be; x-transformers' CoPE cannot.
    """
    use_all_cores()
    config, block = recipe.config, recipe.config.model.block
    plain = BlockConfig(model_dim=block.model_dim, num_heads=block.num_heads, head_dim=block.head_dim)
    if block != plain or config.model.tie_embeddings or config.optimizer.name != "adamw":
        raise LeftOut("compared on recipes with our default block, untied tables and AdamW only")
    task = tasks.create(config.task.name, **config.task.options)
    head_dim = block.attention_shape(None).head_dim
    options = {
        "cope": {"attn_use_cope": True, "attn_cope_max_pos": config.encodings["cope"]["npos_max"]},
        "rope": {"rotary_pos_emb": True, "rotary_emb_dim": head_dim, "attn_flash": True},
    }[encoding]
    torch.manual_seed(0)
    layers = Decoder(
        dim=block.model_dim,
        depth=config.model.num_layers,
        heads=block.num_heads,
        attn_dim_head=head_dim,
        verbose=False,
        **options,
    )
    model = TransformerWrapper(
        num_tokens=task.vocab_size, max_seq_len=task.max_length, attn_layers=layers, use_abs_pos_emb=False
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
