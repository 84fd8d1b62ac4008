r"""Language models of source code: the paper's (arXiv 2405.18719, section 5.5), and CPU-sized.

Command:
    cope-jax train --config=code --config.task.options.data_dir=DATA \
        --workdir=runs/code
    DATA/code is a tree of Python; `--config.task.options.globs` names other files. Without either, the config uses the
    standard library of the running Python, which is far too small.
    `code:shards` reads text that is tokenised once, for all runs, instead of the files:
    cope-jax export --corpus=code --corpora_dir=DATA --vocab_size=32000 --length=4096 \
        --packing=documents --out=SHARDS
    cope-jax train --config=code:shards \
        --config.task.options.folders="('SHARDS',)" --workdir=runs/code
Hardware: GPUs or a slice of TPUs. Wall time: not measured yet.
Expected: the table of `compare` shows the paper's perplexities per token next to ours. The paper has another mix of
code, and Llama 2's tokens, so only the order of the encodings is comparable.

From the paper: a model like Llama 2 with 4 layers, 8 heads, width 256, context 4096, learning rate
5e-4, 100 billion tokens. The paper's count of parameters, 19.8 M with RoPE, implies Llama 2's
vocabulary size of 32,000, SwiGLU of width 768, RMSNorm, no biases and untied embeddings. The paper
leaves the rest open. The paper does not state p_max. With CoPE, the paper's model has 1.0 M more
parameters, as many as tables of 4096 positions of the full width. Our p_max is 64, as on
WikiText-103. Our choice: half a million tokens a step, a vocabulary learned from the training
files, packed files, and the AdamW of Llama 2 (arXiv 2307.09288).

`code:small` has contexts of 128 tokens:
    cope-jax train --config=code:small --workdir=runs/code_small
Hardware: 2 CPU cores. Wall time, and perplexity by token and byte: see experiments/RESULTS.md.
The text is the standard library of the running Python; `--config.task.options.globs` names other files. The tokenizer
is byte-pair encoding of 2,048 tokens, learned from the training files. In Python 3.11, the training files have 3.4 M
tokens, and 1,000 steps read 2.0 M of them. Other versions of Python have other files, so perplexities are comparable
only within one version. Files are packed, so that no token sees another file.
"""

from cope_jax.training.config_files import (
    GPT3,
    ConfigDict,
    adamw,
    every,
    experiment,
    measured,
    named,
)

TEXTS = {
    "text": {"corpus": "code", "vocab_size": 32_000, "length": 4096, "packing": "documents"},
    "shards": {"tokenizer": "bpe", "length": 4096},
}
"""The options of the text, tokenised at each start or stored as shards."""
VARIANTS = (*TEXTS, "small")


def get_config(text: str = "text") -> ConfigDict:
    if text == "small":
        config = named("wikitext2")
        config.task.options.update(corpus="code", packing="documents")
        return config
    return experiment(
        "text" if text == "text" else "sharded_text",
        TEXTS[text],
        model={
            "num_layers": 4,
            "block": {
                "model_dim": 256,
                "num_heads": 8,
                "mlp_dim": 768,
                "activation": "swiglu",
                "norm": "rms",
                "norm_epsilon": 1e-5,
                "use_bias": False,
                "compute_dtype": "bfloat16",
            },
        },
        encodings={"cope": {"npos_max": 64}},
        optimizer=adamw(5e-4, 2000, **GPT3, epsilon=1e-5),
        training={"steps": 190_000, "batch_size": 128, "steps_per_dispatch": 10, **every(1000)},
        # 8 M tokens of each split, which are held in memory.
        evaluation=measured(2_000, curve=128, batch_size=128),
        paper={
            "learned": {"test": "4.7"},
            "rope": {"test": "4.1"},
            "cope": {"test": "3.9"},
            "cope+rope": {"test": "4.0"},
        },
    )
