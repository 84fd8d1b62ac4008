r"""Addition of numbers of up to 6 digits, with the positions of abacus embeddings (arXiv
2405.17399), CPU-sized.

Command:
    cope-jax compare --config=addition --encodings=learned,none,cope --seeds=1 \
        --workdir=runs/addition_small
Hardware: 1 CPU core. Wall time: see experiments/RESULTS.md, which has the measured figures too.
Other positions: --config.task.options.positions=coupled (arXiv 2405.20671) or consecutive.

Our choice: everything but the positions; the paper trains models of 16 layers and width 1,024 on up
to 20 digits.
"""

from cope_jax.training.config_files import ConfigDict, adamw, experiment


def get_config() -> ConfigDict:
    return experiment(
        "addition",
        {"digits": 6, "positions": "abacus", "offsets": 20},
        # A table has a row for each position: offsets + 2·digits + 2.
        encodings={"learned": {"max_length": 34}, "cope": {"npos_max": 24}},
        model={"block": {"num_heads": 4, "head_dim": 32}},
        optimizer=adamw(3e-3, 100),
        training={"steps": 2000, "batch_size": 64, "evaluate_every": 500},
        evaluation={"examples": 1000},
    )
