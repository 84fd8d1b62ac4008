r"""The tasks of newer encodings at the sizes of their papers, with the papers' models where these
are known.

Command (the text after the colon is a setting, see SETTINGS):
    cope-jax compare --config=published:navigation_2d --encodings=cope_signed,mapformer,path \
        --seeds=1 --workdir=runs/navigation_2d
Hardware: 1 GPU. Wall time: none was run at full size.

Other published recipes are files of their own: flip_flop, flip_flop:one_layer, selective_copy,
selective_copy:mapformer and counting. Where a paper does not state the optimizer, it is the one of
this library. Our choice everywhere: warm-up of 1 % of the steps unless stated, gradient clipping at
1.
"""

from typing import Any

from cope_jax.training.config_files import ConfigDict, adamw, every, experiment


def _transformer(layers: int, heads: int, width: int, **block: Any) -> dict[str, Any]:
    return {"num_layers": layers, "block": {"model_dim": width, "num_heads": heads, **block}}


def _training(steps: int, batch_size: int, examples: int | None = None) -> dict[str, Any]:
    return {"steps": steps, "batch_size": batch_size, "examples": examples, **every(steps // 10)}


def _navigation(**options: Any) -> dict[str, Any]:
    """MapFormer, arXiv 2511.19279, B.3: 700,000 sequences; "(4L)" has 4 layers, 2 heads."""
    return {
        "task": ("navigation", options),
        "model": _transformer(1, 1, 64),
        "optimizer": adamw(3e-4, 55, weight_decay=0.05, schedule="linear"),
        "training": _training(5500, 128),
    }


def _mqar(**options: Any) -> dict[str, Any]:
    """Zoology, arXiv 2312.04927: 8192 tokens; 4, 8 or 16 pairs, or 64 in 512 tokens. Our choice:
    the training.

    Queries are at any place; with task.options.every=2 they are where the published generator has
    them.
    """
    return {
        "task": ("mqar", {"vocabulary": 8192, **options}),
        "model": _transformer(2, 1, 128),
        "optimizer": adamw(1e-3, 200, weight_decay=0.1),
        "training": _training(20_000, 256),
    }


def _length_generalisation(task: str, **options: Any) -> dict[str, Any]:
    """Kazemnejad et al., arXiv 2305.19466: a decoder of T5-base's size, 100,000 examples, warm-up
    of 6 %, linear decay.

    Our choice: the rate, decay, batch and steps, and the training lengths other than 20 items and 8
    variables.
    """
    return {
        "task": (task, options),
        "model": _transformer(12, 12, 768),
        "optimizer": adamw(3e-5, 2400, weight_decay=0.05, schedule="linear"),
        "training": _training(40_000, 64, 100_000),
    }


def _ruler(task: str, **options: Any) -> dict[str, Any]:
    """RULER, arXiv 2404.06654, at 4,096 tokens.

    It only tests trained models: the model and training are our choice.
    """
    return {
        "task": (task, {"tokens": 4096, **options}),
        "model": _transformer(4, 4, 256),
        "optimizer": adamw(1e-3, 100, weight_decay=0.1),
        "training": _training(10_000, 16),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "navigation_1d": _navigation(),
    "navigation_2d": _navigation(dimensions=2),
    "navigation_3d": _navigation(dimensions=3, steps=256, side=16),
    "navigation_5d": _navigation(dimensions=5, steps=16, side=5),
    # MapFormer, B.4: 560,000 sequences (here 563,200). Our choice: batches of 128.
    "dyck": {
        "task": ("dyck", {"length": 32, "depth": 4}),
        "model": _transformer(1, 1, 64),
        "optimizer": adamw(1e-4, 44, weight_decay=0.01),
        "training": _training(4400, 128),
    },
    # PoPE, arXiv 2509.10534, B.1: a million examples, 4,000 warm-up steps, minimum rate 2e-5.
    "indirect_indexing": {
        "task": ("indirect_indexing", {}),
        "model": _transformer(8, 8, 512, norm="rms"),
        "optimizer": adamw(2e-4, 4000, weight_decay=0.01, beta2=0.99, final_fraction=0.1),
        "training": _training(100_000, 64, 1_000_000),
    },
    # Our smaller version, of four layers.
    "indirect_indexing_small": {
        "task": ("indirect_indexing", {"shortest": 10, "longest": 20, "shift": 7}),
        "model": _transformer(4, 8, 128, norm="rms"),
        "optimizer": adamw(1e-3, 100, weight_decay=0.01, beta2=0.99, final_fraction=0.1),
        "training": _training(10_000, 64),
    },
    # PaTH, arXiv 2505.16381, 4.1: N is task.options.back, from 1 to 4. Our choice: the number of
    # values, the training.
    "mqrar": {
        "task": ("mqrar", {"back": 2}),
        "model": _transformer(2, 2, 256),
        "optimizer": adamw(1e-3, 100, weight_decay=0.1),
        "training": _training(10_000, 64),
    },
    # DeltaProduct: 128 elements, tested with 512. Our choice: 2 layers of width 128, 20,000 steps.
    "group_words": {
        "task": ("group_words", {"group": "S5", "length": 128}),
        "model": _transformer(2, 2, 128),
        "optimizer": adamw(1e-3, 200, weight_decay=1e-6),
        "training": _training(20_000, 1024),
    },
    # DaRoPE, arXiv 2609.34556, E: 4 layers of width 256, and a context of 256, which is 125 pairs.
    # Our choice: the training, heads of 64.
    "probes": {
        "task": ("probes", {"probe": "dup_key_recall", "symbols": 125}),
        "model": _transformer(4, 4, 256),
        "optimizer": adamw(1e-3, 100, weight_decay=0.1),
        "training": _training(10_000, 64),
    },
    "chomsky": {
        "task": ("chomsky", {"problem": "stack_manipulation", "length": 40}),
        "model": _transformer(4, 4, 256),
        "optimizer": adamw(1e-3, 100, weight_decay=0.1),
        "training": _training(10_000, 64),
    },
    "mqar": _mqar(pairs=16),
    "mqar_64": _mqar(pairs=64, space=4),
    # Strings of up to 64 letters as in selective RoPE: 4 layers, 16 heads, 10 % warm-up, linear
    # decay.
    "copying": {
        "task": ("copying", {"letters": 64}),
        "model": _transformer(4, 16, 512),
        "optimizer": adamw(2e-3, 500, weight_decay=0.1, schedule="linear"),
        "training": _training(5000, 256),
    },
    "addition": _length_generalisation("addition", digits=10),
    "sorting": _length_generalisation("sorting", items=20),
    "lego": _length_generalisation("lego", variables=8),
    "scan": _length_generalisation("scan"),
    "variable_tracking": _ruler("variable_tracking", hops=4, chains=1),
    "needle_keys": _ruler("needle_keys", keys=4, digits=7),
}
VARIANTS = tuple(SETTINGS)


def get_config(setting: str = "navigation_1d") -> ConfigDict:
    chosen = dict(SETTINGS[setting])
    task, options = chosen.pop("task")
    return experiment(
        task,
        options,
        encodings={"cope": {"npos_max": 512}},
        evaluation={"examples": 1000, "curve_examples": 200, "sweep_examples": 200},
        **chosen,
    )
