r"""A two-layer LSTM language model on the words of WikiText-2, CPU-sized: 9.6 M parameters.

Command:
    cope-jax train --config=lstm_wikitext2 \
        --config.task.options.data_dir=DATA --workdir=runs/lstm_wikitext2
Hardware: 2 CPU cores. Wall time and word perplexity: see experiments/RESULTS.md.
Expected: a perplexity far above other reports, for the reasons in `rnn_wikitext2.py`.

`rnn_wikitext2.py` and `transformer_wikitext2.py` have the same number of parameters and the same batches.
"""

from cope_jax.training import config_files as base


def get_config() -> base.ConfigDict:
    config = base.named("rnn_wikitext2")
    config.model.update(cell="lstm", embed_dim=256, hidden_dim=256)
    return config
