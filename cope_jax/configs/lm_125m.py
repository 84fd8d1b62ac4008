r"""The paper's model for WikiText-103 (arXiv 2405.18719, section 5.4), GPT-2 small with CoPE, on a corpus of any size.

Command:
    cope-jax export --input='gs://BUCKET/web/*.parquet' --vocab=GPT2 --length=1024 --out=gs://BUCKET/shards
    cope-jax train --config=lm_125m \
        --config.task.options.folders="('gs://BUCKET/shards',)" --workdir=gs://BUCKET/runs/lm_125m
    docs/corpora.md explains each step. For speed tests without a corpus, `lm_125m.py:noise` samples independent tokens
    from Zipf's law.
Hardware: a v5e-16 slice (topology v5e:4x4), or any GPU or TPU with 16 GB and a smaller batch. Wall time: not measured.
Expected: with `:noise`, the loss falls to 7.57 nats, the entropy of the tokens. `wikitext103.py` trains the same model
on the paper's text, where the paper has perplexity 23.46 (test) and 22.55 (validation).

Sizes and training (123.7 M parameters, 180,000 steps) are the same as in `wikitext103.py`, which says what comes from
the paper. The steps read 11.8 billion tokens, about 95 for each parameter; 20 for each (arXiv 2203.15556) would be
38,000 steps. The tokenizer is that of the shards: GPT2 is a folder with GPT-2's.

Every device has all parameters and its share of the batch: 4 sequences on each of 16 devices.
"""

from cope_jax.registry import unknown
from cope_jax.training import config_files as base

TEXTS = ("shards", "noise")


def get_config(text: str = "shards") -> base.ConfigDict:
    if text not in TEXTS:
        raise unknown("text of lm_125m", text, TEXTS)
    like = base.named("wikitext103").to_dict()
    same = {name: like[name] for name in ("model", "encodings", "optimizer", "training", "evaluation")}
    if text == "noise":
        config = base.experiment("zipf", {"vocab_size": 50_257, "length": 1024}, **same)
    else:
        config = base.experiment("sharded_text", {"tokenizer": "bpe", "length": 1024}, **same)
    config.evaluation.examples = 256
    return config
