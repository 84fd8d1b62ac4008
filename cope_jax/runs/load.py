"""Loads a run, or an exported or published model: config, task, tokenizer and parameters."""

import dataclasses
import difflib
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from cope_jax import models, tasks
from cope_jax.errors import ConfigError
from cope_jax.exchange import bert_files, formats, safetensors_io
from cope_jax.registry import checked
from cope_jax.runs.workdir import Workdir, check_encoding_files, check_seeds, read_json
from cope_jax.storage.checkpoint_io import step_of
from cope_jax.storage.checkpoints import Checkpoints
from cope_jax.storage.files import read_object
from cope_jax.tasks import Task
from cope_jax.tokenizers import loading
from cope_jax.tokenizers.tokenizer import Codec
from cope_jax.tokenizers.word_level import Words as WordTokenizer
from cope_jax.training.experiment_config import ExperimentConfig, JobConfig, MeshConfig
from cope_jax.training.from_config import create_learner
from cope_jax.training.program import SeedBatch

MINILM = "minilm"
"""This name, instead of a path, means the folder of the installed MiniLM."""
TRAINED = Path(__file__).parents[1] / "trained"
"""The folder of the package's small trained models.

A model's name means its folder here, unless the name is a path.
"""
RUN = "run.json"
"""The file about the run of a converted model: config, seeds, step, seconds and environment."""


class Restored(NamedTuple):
    """A checkpoint: step, parameters (several seeds along a leading axis), seconds of training."""

    step: int
    params: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The content of a folder: an exported or published model, or a run.

    Arrays are read only by `params`, by `model`, by the `title` of a run, and by the `step` of a
    converted run.

    Attributes:
      folder: the path of the folder.
      kind: the format: "run", "elmo", or a name of `cope_jax.exchange.formats`.
      experiment: the config of a run; None for anything else.
      seeds: the seeds of a run, which were trained side by side; () for anything else.
    """

    folder: Path
    kind: str
    experiment: ExperimentConfig | None = None
    seeds: tuple[int, ...] = ()

    @property
    def task(self) -> Task | None:
        """The task of a run; None for anything else."""
        return None

    @property
    def output(self) -> Path:
        """The folder of results about the model: its own, or runs/trained/NAME for ours."""
        is_ours = self.folder.parent == TRAINED
        return Path("runs", "trained", self.folder.name) if is_ours else self.folder

    @functools.cached_property
    def config(self) -> Any:
        """The config of the model, such as a `DecoderConfig`."""
        return formats.read_config(self.folder)

    @property
    def name(self) -> str:
        """The name of the model in the registry."""
        return str(self.config.name)

    @property
    def step(self) -> int | None:
        """The step of a run's newest checkpoint.

        None: the run has no checkpoint, or the folder is not a run.
        """
        return None

    @functools.cached_property
    def codec(self) -> Codec | None:
        """The codec from text to tokens and back; None if the model does not generate text, or has
        no tokenizer.

        Raises:
          ConfigError: the tokenizer is damaged, or its vocabulary does not fit the model.
        """
        generates = self.name in models.able("generate")
        return _codec_beside(self.folder, self.config) if generates else None

    def params(self, seed: int | None = None) -> Any:
        """The parameters, as nested dicts; for a run, the parameters of `seed`, or of the first
        seed if `seed` is None.

        Raises:
          ConfigError: there is no such seed, or the parameters cannot be read.
        """
        if seed is not None:
            raise ConfigError(f"{self.folder} holds one model, not a run: omit the seed")
        return formats.load(self.folder)[1]

    def model(self, seed: int | None = None) -> Any:
        """The model with the parameters of `params`; heads that are absent are initialised."""
        return formats.build(self.config, self.params(seed))

    def title(self, seed: int | None = None) -> str:
        """A description in one line."""
        del seed
        encoding = getattr(self.config, "encoding", None)
        text = f", {encoding.text() or 'none'}" if encoding else ""
        return f"{self.name} of {self.folder}{text}"


@dataclasses.dataclass(frozen=True)
class LoadedRun(Loaded):
    """A run of `Experiment.train`.

    Only the parameters of a checkpoint are read, not the optimizer state.
    """

    experiment: ExperimentConfig = ExperimentConfig()

    @functools.cached_property
    def task(self) -> Task:
        """The task, with the files that it made when the run began, such as a vocabulary."""
        return self._create_task()

    def _create_task(self) -> Task:
        chosen = self.experiment.task
        kind = tasks.TASKS.get(chosen.name)
        return tasks.create(chosen.name, **kind.with_saved_files(chosen.options, self.folder))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and commit of the run's last start; empty if they are not known."""
        file = self.folder / "environment.json"
        return dict(read_json(file)) if file.exists() else {}

    @functools.cached_property
    def config(self) -> Any:
        return self.experiment.model_config(self.task)

    @property
    def name(self) -> str:
        return str(self.experiment.model.name)

    @property
    def step(self) -> int | None:
        steps = (step_of(path.name) for path in (self.folder / "checkpoints").glob("*"))
        return max((step for step in steps if step is not None), default=None)

    @functools.cached_property
    def codec(self) -> Codec | None:
        return self.task.codec() if self.name in models.able("generate") else None

    @functools.cached_property
    def restored(self) -> Restored:
        """The newest checkpoint that can be read. ConfigError: no checkpoint can be read."""
        learner, seed_batch = create_learner(self.experiment, self.task), SeedBatch(len(self.seeds))
        seeds = seed_batch.stack([np.int32(seed) for seed in self.seeds])
        params = jax.eval_shape(seed_batch.lift(learner.init), seeds).params
        with Checkpoints(self.folder / "checkpoints", read_only=True) as checkpoints:
            checkpoint = checkpoints.restore({"params": params}, partial=True)
        if checkpoint is None:
            raise ConfigError(f"{self.folder} has no checkpoint yet: train it first")
        step, state, progress = checkpoint
        return Restored(step, state["params"], progress["seconds"])

    def params(self, seed: int | None = None) -> Any:
        return SeedBatch(len(self.seeds)).unstack(self.restored.params)[self._place(seed)]

    def title(self, seed: int | None = None) -> str:
        number, run = self.seeds[self._place(seed)], self.experiment
        names = filter(None, (run.task.name, run.encoding, run.variant))
        return f"{', '.join(names)}, seed {number}, step {self.restored.step:,}"

    def _place(self, seed: int | None) -> int:
        """The index of a seed in the run."""
        if checked(seed, int | None, "the seed of a run") is not None and seed not in self.seeds:
            raise ConfigError(
                f"{self.folder} holds no seed {seed}: choose from {', '.join(map(str, self.seeds))}"
            )
        return 0 if seed is None else self.seeds.index(seed)


@dataclasses.dataclass(frozen=True)
class ConvertedRun(LoadedRun):
    """A run that cope-jax convert copied: the parameters of one seed, without a checkpoint."""

    @property
    def environment(self) -> dict[str, Any]:
        return dict(_about(self.folder).get("environment", {}))

    def _create_task(self) -> Task:
        task = super()._create_task()
        # Without them the task would learn them again, perhaps from other data.
        for name in task.saved_files():
            if not (self.folder / name).exists():
                raise ConfigError(
                    f"{self.folder} lacks {name}, the tokenizer or vocabulary of its model: restore this file"
                )
        return task

    @property
    def step(self) -> int:
        return self.restored.step

    @functools.cached_property
    def restored(self) -> Restored:
        about = _about(self.folder)
        return Restored(about["step"], formats.load(self.folder)[1], about["seconds"])


def load(folder: str | Path | None) -> Loaded:
    """Loads the run or the model in a folder.

    >>> import cope_jax as cj
    >>> cj.load("counting").title()
    'counting, cope, seed 1, step 1,500'

    Args:
      folder: the path of a run or model, or the name of a model. A run is a folder of
        `Experiment.train`. A model is a folder that cope-jax convert wrote, a GPT-2, Llama or BERT
        in the files of Hugging Face, or the `options.json` and weights of an ELMo. The names are
        "counting" and "shakespeare" for trained models of this package, and "minilm" if MiniLM is
        installed.

    Raises:
      ConfigError: there is no such folder, or no model in it.
    """
    folder = find(folder)
    kept = (folder / "checkpoints").exists() or (folder / "cells").exists()
    if (folder / RUN).exists() or (kept and (folder / "config.json").exists()):
        return load_run(folder)
    kind = formats.kind_of(folder)
    if kind is None:
        raise ConfigError(
            f"{folder} holds no model: give a folder with the checkpoints of a run, with config.json and "
            "model.safetensors (this project's or Hugging Face's "
            f"{', '.join(name for name in formats.FORMATS if name != formats.OWN)}), or with options.json and weights "
            "of an ELMo"
        )
    return Loaded(folder, kind)


def find(folder: str | Path | None) -> Path:
    """Finds the folder of a path, "minilm" or the name of a trained model.

    ConfigError: there is no such folder.
    """
    if folder is None:
        raise ConfigError("no model is given: give the folder of a model")
    checked(folder, str | os.PathLike, "the folder of a model")
    path, name = bert_files.find_minilm() if str(folder) == MINILM else Path(folder), str(folder)
    if os.path.isdir(path):  # Path.is_dir fails for a name that is too long
        return path
    trained = {trained_folder.name: trained_folder for trained_folder in sorted(TRAINED.iterdir())}
    if name in trained:
        return trained[name]
    shown = name if name.isprintable() else repr(name)
    if os.path.exists(path):
        raise ConfigError(f"{shown} is no folder: give the folder of a model")
    near = difflib.get_close_matches(name, trained, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}? Or " if near else ""
    raise ConfigError(
        f"there is no folder {shown}: {hint}train a model there, give another folder, or choose a "
        f"trained model of the package ({', '.join(trained)})"
    )


def _about(folder: Path) -> dict[str, Any]:
    kinds: dict[str, type] = {"config": dict, "seeds": list, "step": int, "seconds": float}
    about = read_object(folder / RUN, "convert the run again", **kinds)
    check_seeds(about["seeds"], folder / RUN)
    for name in ("step", "seconds"):
        if not about[name] >= 0:
            raise ConfigError(
                f"{folder / RUN} is damaged ({name} is {about[name]}): convert the run again"
            )
    return about


def load_run(folder: str | Path) -> LoadedRun:
    """Loads the run in a folder, as `load` does. ConfigError: the folder contains no run."""
    folder = find(folder)
    if cells := sorted(path.parent for path in folder.glob("cells/*/*/checkpoints")):
        raise ConfigError(
            f"{folder} holds no training run, but a comparison: give one of its runs, such as {cells[0]}"
        )
    converted = (folder / RUN).exists()
    trained = (folder / "config.json").exists() and (folder / "checkpoints").exists()
    settings = _about(folder) if converted else Workdir(folder).settings() if trained else {}
    if "seeds" not in settings:
        raise ConfigError(
            f"{folder} holds no training run: give the --workdir of cope-jax train, or a cell of compare"
        )
    config = ExperimentConfig.from_mapping(settings["config"])
    if trained and not converted:
        check_encoding_files(settings, config, folder)
    config = dataclasses.replace(config, job=JobConfig(mesh=MeshConfig(data=1)))
    kind = ConvertedRun if converted else LoadedRun
    return kind(folder, "run", config, tuple(settings["seeds"]))


def _codec_beside(folder: Path, config: Any) -> Codec | None:
    """The codec of the tokenizer in a model's folder."""
    tokenizer, vocab_size = loading.find(folder), config.vocab_size
    if tokenizer is None:
        return None
    # Published tables have rows without a token, which byte-pair encoding never produces. Words
    # need all their rows.
    least = vocab_size if isinstance(tokenizer, WordTokenizer) else 1
    if not least <= len(tokenizer) <= vocab_size:
        raise ConfigError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, but the model has {vocab_size}: "
            "restore the tokenizer that the model was trained with"
        )
    tokens = safetensors_io.read_tokens(folder)
    begin, end = tokens.get("bos_token_id", tokenizer.end), tokens.get("eos_token_id", [])
    ends = end if isinstance(end, list) else [end]
    for name, verb, numbers in (("bos_token_id", "begin", [begin]), ("eos_token_id", "end", ends)):
        for number in numbers:
            if type(number) is not int or not 0 <= number < vocab_size:
                raise ConfigError(
                    f"{name}={number} of {folder} is not one of the model's {vocab_size} tokens: set it to the number "
                    f"of the token that its texts {verb} with, or to null"
                )
    return Codec.of(tokenizer, begin, tuple(ends))
