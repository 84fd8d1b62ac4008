"""The typed config of an experiment."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from cope_jax.encodings import ENCODINGS, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from cope_jax.models import MODELS
from cope_jax.models.decoder import DecoderOptions
from cope_jax.models.model import attends
from cope_jax.registry import check_at_least, check_choices, configure
from cope_jax.tasks import Task


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The task and its options.

    Attributes:
      name: a registered task.
      options: the task's options that differ from its defaults.
    """

    name: str = "selective_copy"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    Attributes:
      name: "adamw" or "adam".
      learning_rate: the highest rate, reached after warm-up.
      schedule: "constant", "linear" or "cosine" decay over all steps.
      warmup_steps: linear rise from 0.
      final_fraction: the decay ends at this share of `learning_rate`.
      weight_decay: of adamw.
      decayed: the parameters that it applies to: "all", optax's default, or "weights": all except biases, norm scales
        and layer mixes.
      beta1, beta2, epsilon: Adam's.
      clip_norm: bound on the global norm of the gradient; None does not clip.
    """

    name: Literal["adamw", "adam"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = 100
    final_fraction: float = 0.0
    weight_decay: float = 0.01
    decayed: Literal["all", "weights"] = "all"
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self):
        numbers = {name: value for name, value in dataclasses.asdict(self).items() if not isinstance(value, str)}
        check_choices(self, "optimizer")
        check_at_least(0, "optimizer", **numbers)
        if max(self.beta1, self.beta2) >= 1:
            raise ConfigError(f"optimizer.beta1={self.beta1} and beta2={self.beta2} must be less than 1")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The training run.

    Attributes:
      steps: optimizer steps.
      batch_size: B, over all devices.
      accumulate: microbatches per step. They run one after another and their gradients are added, which needs less
        memory. Microbatch m has the rows m, m + accumulate, …; with dropout, their number changes the masks.
      examples: size of the fixed training split; None means endless fresh examples.
      data_dir: a directory that `experiments.export` wrote, to read examples from; None samples them.
      start: a trained model to start from: the workdir of a run, or a folder in a format of
        `cope_jax.exchange.formats`. What both models have is copied; None initialises all parameters.
      readers: threads that read batches ahead. More than one helps if reading waits for a disk or a network. They
        change no result, so a run can resume with another number.
      data_seed: seed of all data. The run's own seed decides initial parameters, order of data and dropout.
      positions: the position sampler, see `cope_jax.positions`.
      max_position: positions are below this; None means the length of the task's longest sequence.
      steps_per_dispatch: steps in one call of the compiled program; the intervals below and `steps` are multiples of
        it.
      evaluate_every: steps between points of the learning curves; 0 means only at the end.
      checkpoint_every: steps between checkpoints.
    """

    steps: int = 1000
    batch_size: int = 64
    accumulate: int = 1
    examples: int | None = None
    data_dir: str | None = None
    start: str | None = None
    readers: int = 1
    data_seed: int = 0
    positions: str = "consecutive"
    max_position: int | None = None
    steps_per_dispatch: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100

    def __post_init__(self):
        check_at_least(1, "training", steps=self.steps, batch_size=self.batch_size, examples=self.examples)
        check_at_least(1, "training", steps_per_dispatch=self.steps_per_dispatch, max_position=self.max_position)
        check_at_least(1, "training", checkpoint_every=self.checkpoint_every, accumulate=self.accumulate)
        check_at_least(1, "training", readers=self.readers)
        check_at_least(0, "training", data_seed=self.data_seed, evaluate_every=self.evaluate_every)
        if self.positions != "consecutive" and self.max_position is None:
            raise ConfigError(f"training.positions={self.positions} samples positions: set training.max_position")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulate={self.accumulate}"
            )
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.steps_per_dispatch:
                raise ConfigError(
                    f"training.{name}={getattr(self, name)} must be a multiple of "
                    f"training.steps_per_dispatch={self.steps_per_dispatch}"
                )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """How errors are measured.

    Attributes:
      examples: number of examples of each split at the end.
      curve_examples: number of examples of each split at the points of the learning curves.
      sweep_examples: number of examples of each length of the error-by-length plot; 0 means no plot. For text, number
        of windows of the longest length; the other lengths measure the same text.
      batch_size: sequences at a time.
    """

    examples: int = 1000
    curve_examples: int = 256
    sweep_examples: int = 256
    batch_size: int = 64

    def __post_init__(self):
        check_at_least(1, "evaluation", examples=self.examples, curve_examples=self.curve_examples)
        check_at_least(1, "evaluation", batch_size=self.batch_size)
        check_at_least(0, "evaluation", sweep_examples=self.sweep_examples)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices are along each axis of the mesh; −1, for one axis, means all that remain.

    Attributes:
      data: each has all parameters, and its share of the batch.
      fsdp: each has its share of the batch and of the parameters, which are gathered layer by layer.
      tensor: each has its share of heads and hidden units.
      sequence: each has its share of every sequence; attention is a ring.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        if list(sizes.values()).count(-1) > 1:
            raise ConfigError(f"job.mesh may set only one axis to -1, for all remaining devices, got {sizes}")
        check_at_least(1, "job.mesh", **{name: size for name, size in sizes.items() if size != -1})


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """Settings that may change when a run resumes. They change the numbers of a finite run by rounding at most.

    Attributes:
      mesh: the devices.
      keep: how many of the newest checkpoints to keep.
      keep_best: how many of the best to keep in addition, by the loss of the first evaluation split.
      on_non_finite: what to do if the loss or gradient of a step is not finite: "stop" the run with an error, or "skip"
        the update and continue.
      peak_flops: FLOP/s of one device, for the utilisation; None looks the device up in a table.
    """

    mesh: MeshConfig = MeshConfig()
    keep: int = 2
    keep_best: int = 0
    on_non_finite: Literal["stop", "skip"] = "stop"
    peak_flops: float | None = None

    def __post_init__(self):
        check_choices(self, "job")
        check_at_least(1, "job", keep=self.keep, peak_flops=self.peak_flops)
        check_at_least(0, "job", keep_best=self.keep_best)


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: a task, a model, how it is trained and measured.

    >>> import cope_jax as cj
    >>> cj.ExperimentConfig.from_mapping({"encoding": "rope", "training": {"steps": 200}}).training.steps
    200

    Attributes:
      task: what is learned.
      model: the options of a registered model; their `name` selects it.
      encoding: the position encoding of a single run, as `EncodingConfig.parse` reads it.
      encodings: options by the name of the encoding, which apply whenever that encoding is used.
      seeds_side_by_side: seeds trained in one program by vmap; 0 means 1 on a CPU, all on an accelerator.
      paper: published figures of the same recipe, as text by encoding and split, shown next to the measured ones.
    """

    task: TaskConfig = TaskConfig()
    model: Any = DecoderOptions()
    encoding: str = "cope"
    encodings: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    job: JobConfig = JobConfig()
    seeds_side_by_side: int = 0
    paper: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_at_least(0, "config", seeds_side_by_side=self.seeds_side_by_side)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ExperimentConfig":
        """The config that nested dicts describe; ConfigError for an unknown field or a wrong type."""
        model = mapping.get("model", {})
        if isinstance(model, Mapping):
            options = MODELS.get(model.get("name", DecoderOptions.name)).Options
            mapping = {**mapping, "model": configure(options, model, "config.model")}
        return configure(cls, mapping, "config")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def recipe(self, with_encoding: bool = True) -> dict[str, Any]:
        """The settings that decide a run's numbers: no job, readers, paper's figures or options of unused encodings.

        Args:
          with_encoding: False omits the encoding too; the rest is what the runs of one comparison share.
        """
        recipe = self.to_dict()
        del recipe["job"], recipe["paper"], recipe["training"]["readers"]
        used = [name for name, _ in EncodingConfig.parse(self.encoding).parts] if with_encoding else []
        recipe["encodings"] = {
            name: dataclasses.asdict(configure(ENCODINGS.get(name).Config, options, name))
            for name, options in self.encodings.items()
            if name in used
        }
        if not with_encoding:
            del recipe["encoding"]
        return recipe

    def model_config(self, task: Task, layout: Layout = WHOLE) -> Any:
        """The config of the model for `task`."""
        encoding = EncodingConfig.parse(self.encoding, self.encodings)
        if not attends(self.model) and self.encoding != "none":
            raise ConfigError(f"{self.model.name} has no attention, and so no position encoding: set encoding=none")
        try:
            return self.model.complete(task, encoding, self.max_position(task), layout)
        except AttributeError as error:
            if error.obj is not task:
                raise
            raise ConfigError(f"the model {self.model.name} does not fit the task {task.name} ({error})") from error

    def max_position(self, task: Task) -> int:
        """The bound that positions are below."""
        return self.training.max_position or task.max_length
