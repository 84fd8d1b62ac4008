r"""A language model of 8 billion parameters: Llama 3 8B with CoPE instead of RoPE.

Command:
    cope-jax export --input='gs://BUCKET/web/*.parquet' --vocab=LLAMA3 --length=4096 \
        --out=gs://BUCKET/shards
    cope-jax train --config=lm_8b \
        --config.task.options.folders="('gs://BUCKET/shards',)" --workdir=gs://BUCKET/runs/lm_8b
    LLAMA3 is the tokenizer.json of Llama 3. `lm_8b.py:noise` is for speed tests without a corpus; see `lm_125m.py`.
Hardware: a v5e-256 slice (topology v5e:16x16). Wall time: not measured.
Expected: with `:noise`, the loss falls to 8.11 nats, the entropy of the tokens.

From Llama 3 8B (arXiv 2407.21783, table 3): 32 layers of width 4096, 32 heads that share 8 key/value heads, SwiGLU of
width 14,336, RMSNorm, no biases, a vocabulary of 128,256 tokens, learning rate 3e-4. Our choice: context 4096 (Llama 3
starts with 8192), a million tokens a step, 160 billion tokens, which are 20 for each parameter (arXiv 2203.15556), and
GPT-3's weight decay.

Parameters and batch are split over all devices. The backward pass recomputes each block except the output of attention.
"""

from cope_jax.training import config_files as base


def get_config(text: str = "shards") -> base.ConfigDict:
    config = base.named(f"lm_1b:{text}")
    config.task.options.update(length=4096, **({"vocab_size": 128_256} if text == "noise" else {}))
    config.model.update(num_layers=32, remat="attention", tie_embeddings=False)
    config.model.block.update(model_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336)
    config.model.block.update(activation="swiglu", norm="rms", use_bias=False)
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    config.training.update(steps=153_000, batch_size=256, steps_per_dispatch=1, evaluate_every=1000)
    config.evaluation.update(curve_examples=256, batch_size=256)
    return config
