r"""Language models with CoPE on a corpus of any size: GPT-2 small, GPT-3 XL and Llama 3 8B.

Command:
    cope-jax export --input='gs://BUCKET/web/*.parquet' --vocab=GPT2 --length=1024 --out=gs://BUCKET/shards
    cope-jax train --config=lm:125m \
        --config.task.options.folders="('gs://BUCKET/shards',)" --workdir=gs://BUCKET/runs/lm_125m
    docs/corpora.md explains each step. The tokenizer is that of the shards: GPT2 is a folder with GPT-2's; for `lm:8b`
    it is Llama 3's tokenizer.json. `lm:1b` needs shards of length 2048, `lm:8b` of length 4096. For speed tests without
    a corpus, `lm:125m_noise`, `lm:1b_noise` and `lm:8b_noise` sample independent tokens from Zipf's law.
Hardware: a v5e-16 slice (topology v5e:4x4) for 125m, or any GPU or TPU with 16 GB and a smaller batch; v5p-64, 32 chips
(v5p:2x4x4) for 1b; v5e-256 (v5e:16x16) for 8b. Wall time: not measured.
Expected: with noise, the loss falls to the entropy of the tokens: 7.57 nats for 125m, 7.57 nats for 1b, 8.11 nats for
8b. `wikitext103` trains the model of 125m on the paper's text, where the paper has perplexity 23.46 (test).

`lm:125m` is the paper's model for WikiText-103 (arXiv 2405.18719, section 5.4). Sizes and training
(123.7 M parameters, 180,000 steps) are the same as in `wikitext103`, which says what comes from the
paper. The steps read 11.8 billion tokens, about 95 for each parameter; 20 for each (arXiv
2203.15556) would be 38,000 steps. Every device has all parameters and its share of the batch: 4
sequences on each of 16 devices.

`lm:1b` has, from GPT-3 XL (arXiv 2005.14165, table 2.1): 24 layers of width 2048, context 2048, a
million tokens in a step, and the optimizer. There are 16 heads of width 128, which fill the width
of the model. The vocabulary is GPT-2's, padded to a multiple of 128, and embeddings are tied.
Training reads 26 billion tokens, 20 for each parameter. Parameters and batch are split over all
devices. The backward pass recomputes everything between the matrix products.

`lm:8b` has, from Llama 3 8B (arXiv 2407.21783, table 3): 32 layers of width 4096, 32 heads that
share 8 key/value heads, SwiGLU of width 14,336, RMSNorm, no biases, a vocabulary of 128,256 tokens,
learning rate 3e-4. Our choice: context 4096 (Llama 3 starts with 8192), a million tokens in a step,
160 billion tokens, 20 for each parameter, and GPT-3's weight decay. Parameters and batch are split
too. The backward pass recomputes each block except the output of attention.
"""

from cope_jax.training.config_files import ConfigDict, experiment, named

VARIANTS = ("125m", "1b", "8b", "125m_noise", "1b_noise", "8b_noise")


def get_config(variant: str = "125m") -> ConfigDict:
    size, _, text = variant.partition("_")
    like = named("wikitext103").to_dict()
    same = {
        name: like[name] for name in ("model", "encodings", "optimizer", "training", "evaluation")
    }
    if text == "noise":
        config = experiment("zipf", {"vocab_size": 50_257, "length": 1024}, **same)
    else:
        config = experiment("sharded_text", {"tokenizer": "bpe", "length": 1024}, **same)
    config.evaluation.examples = 256
    if size in ("1b", "8b"):
        _enlarge_to_1b(config)
    if size == "8b":
        _enlarge_to_8b(config)
    return config


def _enlarge_to_1b(config: ConfigDict) -> None:
    padded = {"vocab_size": 50_304} if config.task.name == "zipf" else {"vocab_multiple": 128}
    config.task.options.update(length=2048, **padded)
    config.model.update(num_layers=24, remat="dots")
    config.model.block.update(model_dim=2048, num_heads=16, mlp_dim=8192, dropout=0.0)
    config.optimizer.update(learning_rate=2e-4, warmup_steps=500)
    config.training.update(
        steps=25_000, batch_size=512, steps_per_dispatch=5, evaluate_every=500, checkpoint_every=250
    )
    config.job.mesh.update(data=1, fsdp=-1)


def _enlarge_to_8b(config: ConfigDict) -> None:
    config.task.options.update(
        length=4096, **({"vocab_size": 128_256} if config.task.name == "zipf" else {})
    )
    config.model.update(num_layers=32, remat="attention", tie_embeddings=False)
    config.model.block.update(model_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14_336)
    config.model.block.update(activation="swiglu", norm="rms", use_bias=False)
    config.optimizer.update(learning_rate=3e-4, warmup_steps=2000)
    config.training.update(steps=153_000, batch_size=256, steps_per_dispatch=1, evaluate_every=1000)
    config.evaluation.update(curve_examples=256, batch_size=256)
