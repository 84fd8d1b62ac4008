"""Uses trained and published models as embedders, sources of vectors, and encoders under a head."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cope_jax.data import pipeline
from cope_jax.errors import ConfigError, NonFiniteError, clear_storage_errors
from cope_jax.evaluation.contextual.embedders import embed
from cope_jax.exchange import bert_files
from cope_jax.exchange.safetensors_io import require
from cope_jax.models.embedder import ModelEmbedder
from cope_jax.models.encoder import EncoderConfig, EncoderOptions
from cope_jax.runs import workdir as workdirs
from cope_jax.runs.grid.grid import Grid
from cope_jax.runs.load import MINILM as MINILM
from cope_jax.runs.load import Loaded, load_run
from cope_jax.runs.load import load as load_folder
from cope_jax.storage.files import read_object
from cope_jax.training.experiment_config import ExperimentConfig, TaskConfig


def lowercase(loaded: Loaded) -> bool:
    """True if a pretrained model lowercases its text. ConfigError: it changes text unlike BERT."""
    if loaded.experiment is not None:
        return bool(loaded.experiment.task.options.get("lowercase", True))
    path = loaded.folder / "tokenizer_config.json"
    values = read_object(path) if path.exists() else {}
    lower = values.get("do_lower_case", True)
    require(values, str(path), do_lower_case=(True, False))
    require(values, str(path), strip_accents=(None, lower), tokenize_chinese_chars=(True,))
    if "do_lower_case" not in values and _cased(loaded.folder):
        raise ConfigError(
            f"the vocabulary of {loaded.folder} has capital letters, but no tokenizer_config.json says whether texts "
            'keep theirs: write {"do_lower_case": false} or true there'
        )
    return bool(lower)


def _cased(folder: Path) -> bool:
    """True if over 1 % of the pieces of a vocabulary have capital letters."""
    pieces = bert_files.vocabulary(folder) if (folder / bert_files.VOCABULARY).exists() else ()
    upper = [piece for piece in pieces if piece != piece.lower() and not piece.startswith("[")]
    return 100 * len(upper) > len(pieces)


def load(text: str | None, name: str | None = None) -> ModelEmbedder:
    """Loads an embedder from a run with word vectors, a published BERT or ELMo, or "minilm".

    `name` is the name of the embedder; if it is None, the kind of model is the name. Raises
    ConfigError if there is no such model.
    """
    loaded = load_folder(text)
    name = name or ("MiniLM" if text == MINILM else None)
    model, lower = loaded.model(), lowercase(loaded)
    embedder: ModelEmbedder = model.embedder(loaded.folder, lowercase=lower, name=name)
    return embedder


def write_vectors(model: str | None, config: ExperimentConfig, folder: Path, title: str) -> Path:
    """Writes the vectors of a treebank into a folder, unless it has them; returns the folder.

    The treebank is the task of `config`. The vectors of each split are in SPLIT.npy, float16
    `[words, J, D]` for J layers. `model` is a folder or "minilm", as in `load`; the title of its
    embedder must be `title`. Raises ConfigError if there is no such model, if it is of another
    kind, or if the folder has vectors of another model or of other data.
    """
    loaded = load_folder(model)
    stamp = {"folder": str(loaded.folder.resolve()), "step": loaded.step}
    task: Any = config.task.create()
    texts = json.dumps([task.sentences(split) for split in task.splits])
    digest = hashlib.sha256(texts.encode()).hexdigest()
    settings = {"model": stamp, "texts": digest}
    done = folder / "made.json"
    if done.exists():
        existing = workdirs.read_json(done, of=dict)["of"]
        if existing != settings:
            same = isinstance(existing, dict) and existing.get("model") == stamp
            other = "other sentences" if same else "another model"
            raise ConfigError(f"{folder} contains vectors of {other}: choose another --workdir")
        return folder
    embedder = load(model)
    if embedder.title != title:
        raise ConfigError(
            f"{model} does not contain {title}: choose a run or a published model of {title}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for split in task.splits:
        vectors = embed(embedder, task.sentences(split), chunk=512, label=f"vectors of {split}")
        parts = [np.swapaxes(vectors_JLD, 0, 1).astype(np.float16) for vectors_JLD in vectors]
        with clear_storage_errors(folder):
            np.save(folder / f"{split}.npy", np.concatenate(parts))
    workdirs.write_json(done, {"of": settings})
    return folder


def on_encoder(
    config: ExperimentConfig, model: str | None, *, frozen: bool, vocabulary: str
) -> ExperimentConfig:
    """Returns the config of a head, such as bert_tagger, on a pretrained encoder.

    The encoder decides the sizes, the encoding, the vocabulary and the initial parameters.

    Args:
      config: the config of the head and its task.
      model: the folder of the encoder, or "minilm".
      frozen: whether training leaves the encoder unchanged.
      vocabulary: the name of the task option that is set to the path of the encoder's vocabulary.

    Raises:
      ConfigError: there is no such model, or it is not an encoder.
    """
    loaded = load_folder(model)
    encoder = loaded.config
    if not isinstance(encoder, EncoderConfig):
        raise ConfigError(
            f"{loaded.folder} contains {loaded.name}: choose a run of bert, or a Hugging Face folder of BERT"
        )
    chosen = {vocabulary: str(loaded.folder / "vocab.txt"), "lowercase": lowercase(loaded)}
    same = {
        f.name: getattr(encoder, f.name)
        for f in dataclasses.fields(EncoderOptions)
        if f.name != "name"
    }
    return dataclasses.replace(
        config,
        task=TaskConfig(config.task.name, {**config.task.options, **chosen}),
        model=dataclasses.replace(config.model, **same, frozen=frozen),
        encoding=encoder.encoding.text(),
        training=dataclasses.replace(
            config.training, start=str(loaded.folder), max_position=encoder.max_length
        ),
    )


def check_sources(grid: Grid) -> None:
    """Raises ConfigError if a cell that has been trained has other data than there are now."""
    for cell in grid.cells:
        folder = cell.folder(grid.workdir)
        if (folder / "result.json").exists():
            task = cell.config.task.create()
            workdirs.Workdir(folder).check_sources(task, task.splits)


def classify(workdir: Path, split: str = "test") -> np.ndarray:
    """Predicts the class of each example of a split with the bert_classifier in `workdir`.

    NonFiniteError: a logit is not finite.
    """
    run = load_run(workdir)
    task = run.task  # with the vocabulary of the encoder
    graph, state = nnx.split(run.model())

    @jax.jit
    def predict(state: Any, batch: Mapping[str, Any]) -> Any:
        logits_BC = nnx.merge(graph, state)(batch["inputs"], batch["segments"], batch["mask"])
        return jnp.where(jnp.isfinite(logits_BC).all(axis=-1), jnp.argmax(logits_BC, axis=-1), -1)

    size, classes = task.size(split), []
    assert size is not None
    for batch in pipeline.evaluation_batches(task, split, examples=size, batch_size=64, seed=0):
        classes.append(np.asarray(predict(state, batch)))
    predicted = np.concatenate(classes)[:size]
    if (predicted < 0).any():
        raise NonFiniteError(
            f"the logits of example {np.argmax(predicted < 0)} of {split!r} in {workdir} are not "
            "finite: set a lower --config.optimizer.learning_rate and a new --workdir"
        )
    return predicted


def mix_weights(workdir: Path) -> list[float] | None:
    """The weights of layers in the mix of a run, with sum 1; None if the model has no mix."""
    mix = getattr(load_run(workdir).model(), "mix", None)
    return None if mix is None else np.asarray(mix.shares()).tolist()
