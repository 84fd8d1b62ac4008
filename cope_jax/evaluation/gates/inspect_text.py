"""What the gates of a model count in a text: what experiments.inspect shows of a run on text."""

import csv
from pathlib import Path

import numpy as np
from rich.console import Console

from cope_jax.errors import ConfigError
from cope_jax.evaluation.gates import head_scores, views
from cope_jax.evaluation.gates.text_features import features, pieces
from cope_jax.runs.load import LoadedRun
from cope_jax.tasks import Task
from cope_jax.tasks.task import TextTask
from cope_jax.tokenizers.tokenizer import Codec

_FEWEST = 16  # tokens of which anything can be said


def windows(task: Task, codec: Codec, text: str | None, split: str, count: int) -> np.ndarray:
    """The tokens that are looked at, `[B, L]`: a text of the user's, or the first windows of a split.

    Args:
      task: of the run.
      codec: of the task.
      text: of the user; None: none.
      split: of the task.
      count: how many windows at most.

    Raises:
      ConfigError: an empty or too short text, or a split that there is not.
    """
    if text is not None:
        tokens_L = np.array([*codec.begin, *codec.read(text, "--input")], np.int32)
        if len(tokens_L) < _FEWEST:
            raise ConfigError(f"--input has {len(tokens_L)} tokens: give at least {_FEWEST}, or leave it to a split")
        return tokens_L[None]
    if isinstance(task, TextTask):  # the whole text, however the run's examples are packed
        texts = [entries.tokens for entries in task.token_streams(split)]
        length = min(task.length(split), max(map(len, texts)))
        parts = [text[: len(text) // length * length].reshape(-1, length) for text in texts]
        # Of a mixture windows of each corpus, by its size.
        places = np.concatenate([(np.arange(len(part)) + 0.5) / len(part) for part in parts])
        return np.concatenate(parts)[np.argsort(places, kind="stable")[:count]]
    size = task.size(split)
    batch = task.dataset(split, count if size is None else min(count, size))
    whole = batch["weights"].all(axis=1)  # the last window may be filled up
    return batch["inputs"][whole] if whole.any() else batch["inputs"]


def show(
    console: Console,
    run: LoadedRun,
    seed: int | None,
    tokens_BL: np.ndarray,
    chosen: tuple[int | None, int | None],
    top: int,
) -> list[head_scores.Head]:
    """Prints what the heads follow, and the first window coloured by the `top` heads; gives all heads, ranked.

    Args:
      console: to print to.
      run: of a decoder on text.
      seed: None: the first.
      tokens_BL: what is looked at.
      chosen: the only layer and head that are coloured; None: the first of the ranking.
      top: how many are.
    """
    codec, model = run.task.codec(), run.model(seed)
    gates_LHBL = head_scores.mean_gates(model, tokens_BL)
    parts_BL = [pieces(codec.decode, row_L) for row_L in tokens_BL]
    has = [features(parts) for parts in parts_BL]
    # What only says that a text begins is no part of it; the end of a line may be the same token.
    counted_N = np.array(
        [
            token not in codec.begin or part.isspace()
            for row_L, parts in zip(tokens_BL, parts_BL, strict=True)
            for token, part in zip(row_L.tolist(), parts, strict=True)
        ]
    )
    gates_LHN = gates_LHBL.reshape(*gates_LHBL.shape[:2], -1)[..., counted_N]
    has_N = {name: np.concatenate([row[name] for row in has])[counted_N] for name in has[0]}
    words = [part for parts in parts_BL for part in parts]
    words_N = [word for word, counted in zip(words, counted_N, strict=True) if counted]
    tokens_N = tokens_BL.reshape(-1)[counted_N]
    rng = np.random.default_rng(0)
    bound = head_scores.chance(gates_LHN.reshape(-1, gates_LHN.shape[-1]), has_N, rng)
    heads = head_scores.rank(gates_LHN, has_N, tokens_N, rng)
    widest = [
        " ".join(
            f"{word!r} {gate:.2f}" for word, gate in head_scores.widest(gates_LHN[head.layer, head.head], words_N, 3)
        )
        for head in heads
    ]
    console.print(f"{len(tokens_N):,} tokens in {len(tokens_BL)} windows of {tokens_BL.shape[1]}\n", markup=False)
    console.print(views.ranking(heads, bound, widest))
    for line in views.sentences(heads, bound):
        console.print(line, markup=False, soft_wrap=True)
    layer, head = chosen
    shown = [found for found in heads if layer in (None, found.layer) and head in (None, found.head)]
    for found in shown[: top if chosen == (None, None) else None]:
        console.print(f"\nlayer {found.layer}, head {found.head}: mean gates", style="bold", markup=False)
        console.print(views.coloured(parts_BL[0], gates_LHBL[found.layer, found.head, 0]), soft_wrap=True)
    return heads


def write(folder: Path, heads: list[head_scores.Head]) -> list[Path]:
    """Writes the ranking as `heads.csv`, and the heat map of heads and features as `features.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    table, plot = folder / "heads.csv", folder / "features.png"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = list(heads[0].aucs)
        numbers = ("auc", "low", "high", "gate_there", "gate_elsewhere", "identity")
        writer.writerow(["layer", "head", "best", *numbers, *(f"auc {name}" for name in names)])
        for head in heads:
            best = head.aucs.get(head.best, float("nan"))
            values = (best, *head.interval, head.at, head.elsewhere, head.identity, *head.aucs.values())
            writer.writerow([head.layer, head.head, head.best, *(f"{value:.6g}" for value in values)])
    views.feature_map(heads).savefig(plot, dpi=150)
    return [table, plot]
