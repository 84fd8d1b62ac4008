r"""A language model of source code, CPU-sized: the standard library of the running Python, in contexts of 128 tokens.

Command:
    cope-jax train --config=code_small --workdir=runs/code_small
Hardware: 2 CPU cores. Wall time, and perplexity by token and byte: see experiments/RESULTS.md.

The tokenizer is byte-pair encoding of 2,048 tokens, learned from the training files. In Python 3.11, the training files
have 3.4 M tokens, and 1,000 steps read 2.0 M of them. Other versions of Python have other files, so perplexities are
comparable only within one version. Files are packed, so that no token sees another file.
`--config.task.options.globs` names other files.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("wikitext2_small")
    config.task.options.update(corpus="code", packing="documents")
    return config
