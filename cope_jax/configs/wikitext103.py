r"""The paper's language model of WikiText-103 (arXiv 2405.18719, section 5.4).

Command:
    cope-jax train --config=wikitext103 --config.task.options.data_dir=DATA \
        --config.task.options.vocab=GPT2 --workdir=runs/wikitext103
    GPT2 is a folder with the vocabulary of GPT-2; without it, a vocabulary of the same size is learned.
    `wikitext103:shards` reads text that is tokenised once, for all runs, instead of the corpus:
    cope-jax export --corpus=wikitext-103-raw --corpora_dir=DATA --vocab=GPT2 --length=1024 --out=SHARDS
    cope-jax train --config=wikitext103:shards \
        --config.task.options.folders="('SHARDS',)" --workdir=runs/wikitext103
Hardware: GPUs or a slice of TPUs, as for `lm:125m`. Wall time: not measured yet.
Expected: the table of `compare` shows the paper's perplexities next to ours. The paper does not say whether its
perplexities are per token or per word, nor which text precedes the predicted text. Our perplexities are per word, as
usual for WikiText.

From the paper: 12 layers, width 768, context 1024, p_max 64 in a table that the layers share, batch
64, 100 epochs. The paper counts 123.7 M parameters, and 124.4 M with absolute positions. These
counts imply the vocabulary of GPT-2 and tied embeddings. The paper leaves the rest open. As in
GPT-2 small: 12 heads, dropout 0.1. Our choice: the raw text, which is 118 M tokens in GPT-2's
vocabulary, so 100 epochs are 180,000 steps; and the AdamW of GPT-3 (arXiv 2005.14165) for this
size.

Variants in the paper: `--encodings=` with "cope(gate=value)", "cope(gate=separate_key)",
"cope(npos_max=16)", "cope(npos_max=1024)" or "cope+relative". Another variant is
`--config.model.encoding_sharing=layer`. Its perplexities in the paper are 22.56 (validation) and
23.58 (test).
"""

from cope_jax.training.config_files import GPT3, ConfigDict, adamw, every, experiment, measured

TEXTS = {
    "text": {"corpus": "wikitext-103-raw", "vocab_size": 50_257, "length": 1024},
    "shards": {"tokenizer": "bpe", "length": 1024},
}
"""The options of the text, tokenised at each start or stored as shards."""
VARIANTS = tuple(TEXTS)


def get_config(text: str = "text") -> ConfigDict:
    return experiment(
        "text" if text == "text" else "sharded_text",
        TEXTS[text],
        model={
            "num_layers": 12,
            "encoding_sharing": "model",
            "tie_embeddings": True,
            "block": {
                "model_dim": 768,
                "num_heads": 12,
                "dropout": 0.1,
                "compute_dtype": "bfloat16",
            },
        },
        encodings={"cope": {"npos_max": 64}},
        optimizer=adamw(6e-4, 2000, **GPT3),
        training={"steps": 180_000, "batch_size": 64, "steps_per_dispatch": 10, **every(1000)},
        evaluation=measured(100_000, curve=64, batch_size=64),
        paper={
            "learned": {"validation": "23.96", "test": "24.87"},
            "relative": {"validation": "22.90", "test": "23.81"},
            "cope": {"validation": "22.55", "test": "23.46"},
            "cope+relative": {"validation": "22.31", "test": "23.23"},
            "cope(gate=value)": {"validation": "22.40", "test": "23.33"},
            "cope(gate=separate_key)": {"validation": "22.39", "test": "23.18"},
            "cope(npos_max=16)": {"validation": "22.45", "test": "23.22"},
            "cope(npos_max=1024)": {"validation": "22.46", "test": "23.31"},
        },
    )
