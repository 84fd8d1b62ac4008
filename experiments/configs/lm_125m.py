"""The paper's model for WikiText-103 (arXiv 2405.18719, section 5.4), GPT-2 small with CoPE, on tokens of Zipf's law.

Command:
    python -m experiments.train --config=experiments/configs/lm_125m.py --workdir=runs/lm_125m
Hardware: a v5e-16 slice (topology v5e:4x4), or any GPU or TPU with 16 GB and a smaller batch. Wall time: not measured.
Expected: the loss falls to 7.57 nats, the entropy of the tokens, which are sampled independently from Zipf's law.
`wikitext103.py` trains the same model on text, where the paper has perplexity 23.46 (test) and 22.55 (validation).

Sizes and training (123.7 M parameters, 180,000 steps) are the same as in `wikitext103.py`, which says what comes from
the paper.

Every device has all parameters and its share of the batch: 4 sequences on each of 16 devices.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    like = base.named("wikitext103").to_dict()
    same = {name: like[name] for name in ("model", "encodings", "optimizer", "training", "evaluation")}
    config = base.experiment("zipf", {"vocab_size": 50_257, "length": 1024}, **same)
    config.evaluation.examples = 256
    return config
