r"""A language model of 1.3 billion parameters: GPT-3 XL with CoPE.

Command:
    cope-jax export --input='gs://BUCKET/web/*.parquet' --vocab=GPT2 --length=2048 --out=gs://BUCKET/shards
    cope-jax train --config=lm_1b \
        --config.task.options.folders="('gs://BUCKET/shards',)" --workdir=gs://BUCKET/runs/lm_1b
    `lm_1b.py:noise` is for speed tests without a corpus; see `lm_125m.py`.
Hardware: a v5p-64 slice, 32 chips (topology v5p:2x4x4). Wall time: not measured.
Expected: with `:noise`, the loss falls to 7.57 nats, the entropy of the tokens.

From GPT-3 XL (arXiv 2005.14165, table 2.1): 24 layers of width 2048, context 2048, a million tokens a step, and the
optimizer. There are 16 heads of width 128, which fill the width of the model. The vocabulary is GPT-2's, padded to a
multiple of 128, and embeddings are tied. Training reads 26 billion tokens, 20 for each parameter (arXiv 2203.15556).

Parameters and batch are split over all devices. The backward pass recomputes everything between the matrix products.
"""

from cope_jax.training import config_files as base


def get_config(text: str = "shards") -> base.ConfigDict:
    config = base.named(f"lm_125m:{text}")
    config.task.options.update(length=2048, **({"vocab_size": 50_304} if text == "noise" else {"vocab_multiple": 128}))
    config.model.update(num_layers=24, remat="dots")
    config.model.block.update(model_dim=2048, num_heads=16, mlp_dim=8192, dropout=0.0)
    config.optimizer.update(learning_rate=2e-4, warmup_steps=500)
    config.training.update(steps=25_000, batch_size=512, steps_per_dispatch=5, evaluate_every=500, checkpoint_every=250)
    config.job.mesh.update(data=1, fsdp=-1)
    return config
