"""The typed config of an experiment."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from cope_jax import tasks
from cope_jax.encodings import ENCODINGS, EncodingConfig
from cope_jax.errors import ConfigError
from cope_jax.layout import WHOLE, Layout
from cope_jax.models import MODELS
from cope_jax.models.decoder import DecoderOptions
from cope_jax.models.model import attends
from cope_jax.positions import SAMPLERS
from cope_jax.registry import abridged, check_at_least, check_fields, configure
from cope_jax.tasks import TASKS, Task


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The task and its options.

    Attributes:
      name: a registered task.
      options: the task's options that differ from its defaults.
    """

    name: str = "selective_copy"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_fields(self, "task")

    def create(self) -> Task:
        """The task with these options."""
        return tasks.create(self.name, **self.options)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule.

    Attributes:
      name: "adamw" or "adam".
      learning_rate: the highest rate, reached after warm-up.
      schedule: the rate after warm-up: "constant", or with "linear" or "cosine" decay until the
        last step.
      warmup_steps: number of steps in which the rate rises linearly from 0.
      final_fraction: the decay ends at this share of `learning_rate`.
      weight_decay: weight decay of "adamw"; "adam" ignores this field.
      decayed: which parameters have weight decay. "all" is optax's default. "weights" means all
        parameters except biases, norm scales and the parameters of `ScalarMix`.
      beta1, beta2, epsilon: parameters of Adam.
      clip_norm: upper bound of the global norm of the gradient; None means no clipping.
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
        check_fields(self, "optimizer")
        values = dataclasses.asdict(self).items()
        numbers = {name: value for name, value in values if not isinstance(value, str)}
        check_at_least(0, "optimizer", **numbers)
        if max(self.beta1, self.beta2) >= 1:
            raise ConfigError(
                f"optimizer.beta1={self.beta1} and beta2={self.beta2} must be less than 1"
            )
        if self.final_fraction > 1:
            raise ConfigError(
                f"optimizer.final_fraction must be at most 1, got {self.final_fraction}"
            )
        if self.learning_rate == 0 or self.clip_norm == 0:
            name = "clip_norm" if self.clip_norm == 0 else "learning_rate"
            raise ConfigError(f"optimizer.{name}=0 trains nothing: give a number above 0")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The settings of training.

    Attributes:
      steps: number of optimizer steps.
      batch_size: B, the number of sequences of one step, over all devices.
      accumulate: number of microbatches per step. Microbatches run one after another and their
        gradients are added, which needs less memory. Microbatch m has the rows m, m + accumulate, …
        The number of microbatches changes the masks of dropout.
      examples: number of examples of the fixed training split. If None, a task that samples its
        examples gives new examples without end, and any other task gives all its training examples.
      data_dir: a directory with examples that `cope-jax export` wrote. If None, the task makes the
        examples.
      start: a trained model to start from: the workdir of a run, or a folder in a format of
        `cope_jax.exchange.formats`. Parameters that both models have are copied. If None, all
        parameters are initialised.
      readers: number of threads that read batches ahead. More than one thread helps if reading
        waits for a disk or a network. The number of threads does not change results, so a run can
        resume with another number.
      data_seed: seed of all data. The run's own seed decides initial parameters, order of data and
        dropout. If examples are sampled without end, they depend on both seeds.
      positions: name of the position sampler: see `cope_jax.positions`.
      max_position: the exclusive upper bound of positions. If None, it is the length of the task's
        longest sequence.
      steps_per_dispatch: number of steps in one call of the compiled program; `steps`,
        `evaluate_every` and `checkpoint_every` must be multiples of this number.
      evaluate_every: number of steps between two points of the learning curves; 0 evaluates only at
        the end.
      checkpoint_every: number of steps between two checkpoints.
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
        check_fields(self, "training")
        counts = ["steps", "batch_size", "examples", "steps_per_dispatch", "max_position"]
        counts += ["checkpoint_every", "accumulate"]
        check_at_least(1, "training", **{name: getattr(self, name) for name in counts})
        check_at_least(1, "training", 1024, readers=self.readers)
        check_at_least(0, "training", evaluate_every=self.evaluate_every)
        check_at_least(0, "training", 2**63 - 1, data_seed=self.data_seed)
        SAMPLERS.get(self.positions)  # checks the name
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulate={self.accumulate}"
            )
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) % self.steps_per_dispatch:
                raise ConfigError(
                    f"training.{name}={getattr(self, name)} must be a multiple of "
                    f"training.steps_per_dispatch={self.steps_per_dispatch}: choose one, or set "
                    "--config.training.steps_per_dispatch=1"
                )

    def check_bound(self) -> None:
        """Raises ConfigError if positions are sampled and no bound of them is given."""
        if self.positions != "consecutive" and self.max_position is None:
            raise ConfigError(
                f"training.positions={self.positions} samples positions: set training.max_position"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The settings of evaluation.

    Attributes:
      examples: number of examples of each split at the end.
      curve_examples: number of examples of each split at the points of the learning curves.
      sweep_examples: number of examples of each length in the error-by-length plot; 0 means no
        plot. For text, this is the number of windows of the longest length, and the other lengths
        measure the same text; with the packing "documents" only if all of it is measured.
      batch_size: number of sequences measured at a time.
    """

    examples: int = 1000
    curve_examples: int = 256
    sweep_examples: int = 256
    batch_size: int = 64

    def __post_init__(self):
        check_fields(self, "evaluation")
        check_at_least(1, "evaluation", examples=self.examples, curve_examples=self.curve_examples)
        check_at_least(1, "evaluation", batch_size=self.batch_size)
        check_at_least(0, "evaluation", sweep_examples=self.sweep_examples)
        # A batch has rows of padding up to its size.
        most = max(self.examples, self.sweep_examples, 2**16)
        if self.batch_size > most:
            raise ConfigError(
                f"evaluation.batch_size must be at most {most:,} with so few examples, got {self.batch_size:,}"
            )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The number of devices along each axis of the mesh; −1, for one axis, means all others.

    Attributes:
      data: number of devices that split the batch; this axis does not split the parameters.
      fsdp: number of devices that split the batch and the parameters; the parameters are gathered
        layer by layer.
      tensor: number of devices that split heads and hidden units.
      sequence: number of devices that split every sequence; attention uses a ring.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        check_fields(self, "job.mesh")
        sizes = dataclasses.asdict(self)
        if list(sizes.values()).count(-1) > 1:
            raise ConfigError(
                f"job.mesh may set only one axis to -1, for all remaining devices, got {sizes}"
            )
        check_at_least(1, "job.mesh", **{name: size for name, size in sizes.items() if size != -1})


@dataclasses.dataclass(frozen=True)
class JobConfig:
    """Settings that may change when a run resumes.

    If all losses are finite, these settings change results only by rounding.

    Attributes:
      mesh: the number of devices along each axis.
      keep: how many of the newest checkpoints to keep.
      keep_best: how many of the checkpoints with the lowest loss on the first evaluation split to
        keep, even if they are not among the newest.
      on_non_finite: what to do if the loss or gradient of a step is not finite: "stop" the run with
        an error, or "skip" the update and continue.
      peak_flops: peak FLOP/s of one device, for the model FLOPs utilisation. If None, it comes from
        a table of devices.
      tracker: what gets the metrics in addition to `metrics.jsonl`.
      blocks: whether the records of losses also have `blocks`: the mean and the weight of each
        batch of the evaluation, for tests of paired differences.
    """

    mesh: MeshConfig = MeshConfig()
    keep: int = 2
    keep_best: int = 0
    on_non_finite: Literal["stop", "skip"] = "stop"
    peak_flops: float | None = None
    tracker: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    blocks: bool = False

    def __post_init__(self):
        check_fields(self, "job")
        check_at_least(1, "job", keep=self.keep, peak_flops=self.peak_flops)
        check_at_least(0, "job", keep_best=self.keep_best)


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment: a task, a model, and how the model is trained and measured.

    >>> import cope_jax as cj
    >>> cj.ExperimentConfig.from_mapping({"encoding": "rope", "training": {"steps": 200}}).training.steps
    200

    Attributes:
      task: what is learned.
      model: the options of a registered model; `name` selects the model.
      encoding: the position encoding of a single run, as text that `EncodingConfig.parse` reads.
      encodings: options of each encoding, by the name of the encoding; they apply wherever this
        encoding is used.
      seeds_side_by_side: number of seeds that one program trains together, by vmap; 0 means one
        seed on a CPU, and all seeds on an accelerator.
      paper: published figures of the same recipe, as text, by encoding and split; shown next to the
        measured figures.
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
        check_fields(self, "config")
        check_at_least(0, "config", seeds_side_by_side=self.seeds_side_by_side)
        if not dataclasses.is_dataclass(self.model) or isinstance(self.model, type):
            raise ConfigError(f"config.model must be options by name, got {abridged(self.model)}")
        for name, options in self.encodings.items():
            if not isinstance(options, Mapping):
                raise ConfigError(
                    f"config.encodings.{name} must be options by name, got {abridged(options)}"
                )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ExperimentConfig":
        """Creates the config from nested dicts. ConfigError: an unknown field or a wrong type."""
        model = mapping.get("model", {})
        if isinstance(model, Mapping):
            options = MODELS.get(model.get("name", DecoderOptions.name)).Options
            mapping = {**mapping, "model": configure(options, model, "config.model")}
        return configure(cls, mapping, "config")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def variant(self) -> str:
        """Further options of the model, besides sizes and encoding, as text; usually empty.

        >>> ExperimentConfig.from_mapping({"model": {"tape": 48, "block": {"qk_norm": True}}}).variant
        'tape=48, qk_norm'
        """
        options = self.model.variant().items()
        return ", ".join(name if value is True else f"{name}={value}" for name, value in options)

    def recipe(self, with_encoding: bool = True) -> dict[str, Any]:
        """The settings that decide a run's results, as nested dicts.

        `job`, `training.readers`, `paper` and the options of unused encodings are left out. Options
        of the task and of encodings that are not set have their defaults, so an option that is new
        in the package changes no old run.

        Args:
          with_encoding: if False, the encoding is left out too. The runs of one comparison share
            all other settings.
        """
        recipe = self.to_dict()
        del recipe["job"], recipe["paper"], recipe["training"]["readers"]
        if self.task.name in TASKS:
            kind = TASKS.get(self.task.name).Config
            task_config: Any = configure(kind, self.task.options, self.task.name)
            recipe["task"]["options"] = dataclasses.asdict(task_config)
        parts = EncodingConfig.parse(self.encoding).parts if with_encoding else ()
        recipe["encodings"] = {
            name: dataclasses.asdict(
                configure(ENCODINGS.get(name).Config, self.encodings.get(name, {}), name)
            )
            for name, _ in parts
        }
        if not with_encoding:
            del recipe["encoding"]
        return recipe

    def model_config(self, task: Task, layout: Layout = WHOLE) -> Any:
        """The config of the model for `task`."""
        encoding = EncodingConfig.parse(self.encoding, self.encodings)
        if not attends(self.model) and self.encoding != "none":
            raise ConfigError(
                f"{self.model.name} has no attention, and so no position encoding: set encoding=none"
            )
        try:
            return self.model.complete(task, encoding, self.max_position(task), layout)
        except AttributeError as error:
            if error.obj is not task:
                raise
            raise ConfigError(
                f"the model {self.model.name} does not fit the task {task.name} ({error}): choose another task or model"
            ) from error

    def max_position(self, task: Task) -> int:
        """The exclusive upper bound of positions."""
        return self.training.max_position or task.max_length
