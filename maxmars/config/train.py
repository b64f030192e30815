"""`TrainConfig` and its groups except model, data and optimizer, and configs as JSON for records.

A config file (see `configs/`) builds a `TrainConfig`; the command line changes its leaves. The
docstring of a field is its help text. Derived values are properties, `None` switches an option off,
and `Literal` lists the values of an option. `from_dict` reads what `to_dict` wrote, also where a
field has gone since, as long as the run did not use it (`_REMOVED`).
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from maxmars.config.checks import (
    AtMostOne,
    CheckedConfig,
    Count,
    CountOrZero,
    NotEmpty,
    NotNegative,
    Positive,
    Rule,
    require,
)
from maxmars.config.credentials import refuse_credentials
from maxmars.config.data import DataConfig, ValidationSet, require_distinct
from maxmars.config.model import ModelConfig
from maxmars.config.optimizer import OptaxConfig, OptimizerConfig
from maxmars.config.user_code import Source, relative_to, sources_in


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedConfig):
    """Learning-rate schedule: linear warmup from zero to the peak, then a decay."""

    decay: Literal["cosine", "linear", "exponential", "wsd"] = "cosine"
    """Shape of the decay; `exponential` is that of the official MARS code; `wsd` stays at the peak
    until the last `wsd_decay_fraction` of the steps, then falls linearly."""
    wsd_decay_fraction: AtMostOne[Positive[float]] = 0.2
    """Share of the steps in which `wsd` decays."""
    warmup_steps: CountOrZero[int] = 2000
    """Number of steps from learning rate zero to the peak."""
    decay_steps: Count[int] | None = None
    """Step at which the decay ends; None is num_steps."""
    final_fraction: AtMostOne[NotNegative[float]] = 0.1
    """Learning rate at the end and after it, as a fraction of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # A run shorter than its warmup is allowed: it is the beginning of a longer one.
        require(
            self.decay_steps is None or self.warmup_steps <= self.decay_steps,
            f"schedule.warmup_steps={self.warmup_steps} must not exceed "
            f"schedule.decay_steps={self.decay_steps}.",
        )


@dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedConfig):
    """The device mesh `data` x `fsdp` x `tensor`; the product is the number of devices."""

    data: Count[int] | None = None
    """Number of replicas of the parameters, which share the batch; None takes all devices that fsdp
    and tensor leave."""
    fsdp: Count[int] | None = None
    """Number of parts into which parameters, optimizer state and batch are split. None is 1 where
    data is set; else it is the number of devices on one fast network (a host of GPUs, a TPU slice),
    so that only data crosses the slower network between hosts or slices."""
    tensor: Count[int] = 1
    """Number of parts into which heads and MLP of each layer are split; must divide the heads."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckedConfig):
    """Evaluations during training. Every evaluation scores the same sequences: the first of the
    validation split, and of each set of `data`."""

    every: Positive[int] | None = 1000
    """Number of steps between evaluations (also at step 0 and at the end); None never evaluates."""
    num_windows: Positive[int] = 512
    """Number of sequences of max_seq_len tokens to score."""
    batch_size: Count[int] | None = None
    """Number of sequences scored at once; None is one microbatch. It does not change the loss."""
    data: tuple[ValidationSet, ...] = ()
    """More data to score, each as `NAME=PLACE`. PLACE is a directory of tokens, of which the
    validation split is scored, a file of text, or `FILE.py:NAME`, a function like data.source. The
    metrics are eval/NAME/loss and eval/NAME/bits_per_byte."""
    hellaswag_every: Positive[int] | None = None
    """Number of steps between HellaSwag scores (also at step 0 and at the end); None is never."""
    hellaswag_path: str | None = None
    """File of HellaSwag's questions: hellaswag_val.jsonl, also with .gz or .zst, or the .parquet of
    the hub; None downloads it once into the cache directory (MAXMARS_CACHE, default
    ~/.cache/maxmars)."""
    hellaswag_questions: Positive[int] | None = None
    """Number of questions to score, the first ones; None scores all (10,042)."""
    own: tuple[Source | str, ...] | None = None
    """Functions of the user's own, `FILE.py:NAME`, whose paths are relative to the config file, or
    on the command line to the working directory. At each evaluation the run calls `NAME(trained)`
    with the result of `maxmars.eval.load`; the function returns numbers by name, which become the
    metrics eval/NAME/..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "my_eval.py:rhyme"
        own = tuple(Source.parse(s, field="eval.own", example=example) for s in self.own or ())
        object.__setattr__(self, "own", own if self.own is not None else None)
        names = [(one.name, f"eval.data={one.spec}") for one in self.data]
        require_distinct(names + [(s.function, f"eval.own={s.spec}") for s in own])


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedConfig):
    """Checkpoints in `<workdir>/checkpoints`: when one is written, and which ones are kept."""

    every: Positive[int] | None = 1000
    """Number of steps between checkpoints; None for none. The last step always gets one."""
    every_minutes: Positive[float] | None = None
    """Also write a checkpoint this many minutes after the last one; None ignores the time."""
    keep_last: Positive[int] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Positive[int] | None = None
    """Number of checkpoints with the lowest validation loss to keep besides. Only checkpoints at
    the step of an evaluation have a loss, so eval.every should divide checkpoint.every. None keeps
    none for their loss."""
    keep_best_of: str | None = None
    """Set of eval.data whose loss `keep_best` compares; None: the training data's val split."""
    keep_every: Positive[int] | None = None
    """Never delete the first checkpoint at or after each multiple of this number of steps; None
    deletes by the other rules alone."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(CheckedConfig):
    """Metrics that are printed and written to `<workdir>/metrics.jsonl`."""

    every: Positive[int] = 10
    """Number of steps between lines of metrics. The terminal keeps the lines of steps 1, 10, 20,
    50, 100, 200, 500, ... and about a hundred others."""
    norms: bool | Literal["layers"] = True
    """Also write the norms of gradients, parameters and updates, separately for embeddings,
    attention, MLP, and norms and biases. `layers` adds, for each layer's matrices, the gradient's
    norm, and the update's root mean square and spectral norm. The compiled step has them all."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to `<workdir>/tensorboard` (extra `tensorboard`)."""
    wandb: Literal["online", "offline"] | None = None
    """Also send the metrics to Weights & Biases (extra `wandb`); `offline` stores them in
    `<workdir>/wandb` for `wandb sync`. WANDB_MODE in the environment overrides the two."""
    wandb_project: NotEmpty = "maxmars"
    """Project in Weights & Biases; WANDB_ENTITY in the environment names the entity."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig(CheckedConfig):
    """Steps to skip. The update of a skipped step is not applied, and the run goes on with the next
    batch. A step whose loss or gradient is not finite is always skipped. A line of metrics says
    which examples its step read: `train/num_examples` from number `train/first_example` of
    `maxmars.data.examples(WORKDIR)` on."""

    loss_spike_threshold: Positive[float] | None = None
    """Also skip a step whose loss exceeds its running mean by more than this number of running
    standard deviations; None skips no spike."""
    grad_norm_spike_threshold: Positive[float] | None = None
    """Also skip a step whose gradient norm, before the clip, exceeds its running mean by more than
    this number of running standard deviations; None skips no spike."""
    history: Annotated[Count[int], Rule(lambda n: n > 1, "must be at least 2")] = 100
    """Number of steps in the running mean and deviation; no step before that many is a spike."""
    max_consecutive_skips: CountOrZero[int] = 0
    """Largest number of consecutive skipped steps; one more ends the run with an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("loss_spike_threshold", "grad_norm_spike_threshold"):
            value = getattr(self, name)
            require(
                value is None or self.max_consecutive_skips > 0,
                f"guard.{name}={value} skips steps, but guard.max_consecutive_skips=0 stops the "
                "run at the first; allow 10, for example.",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckedConfig):
    """One training run."""

    name: NotEmpty
    """Name of the run; its default working directory is runs/NAME."""
    # `train/step.py` makes JAX's key of a uint32.
    seed: Annotated[NotNegative[int], Rule(lambda s: s < 2**32, "must be less than 2**32")] = 0
    """Seed of the initial weights and of the order of the data."""
    num_steps: Count[int]
    """Number of optimizer steps."""
    global_batch_size: Count[int]
    """Number of sequences in a step, over all devices and microbatches."""
    num_microbatches: Count[int] | None = None
    """Number of parts of the batch that go through the model one after the other, which saves
    memory. The gradient of a step is the same apart from rounding. None takes the fewest parts that
    divide over the mesh and fit in memory by an estimate."""
    gradient_clip_norm: Positive[float] | None = 1.0
    """Largest global norm of the gradient, which is scaled down to it; None does not clip."""
    ema_decay: Annotated[float, Rule(lambda d: 0 < d < 1, "must lie in (0, 1)")] | None = None
    """Decay of an exponential moving average (EMA) of the parameters over the updates, such as
    0.999, with Adam's bias correction, so that the initial weights have no part in it. With an EMA,
    evaluation, keep_best, export and --init-from take the EMA. None computes no EMA."""
    gradient_multiplier: Positive[float] = 1.0
    """Factor on the mean gradient before the clip. The official MARS code sums the gradients of
    microbatches where others average; its number of microbatches as the factor reproduces that."""
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hang_timeout_s: Positive[float] | None = 600.0
    """Seconds after which a hanging run ends with exit code 75: when a step or a batch of an
    evaluation takes longer than this and longer than ten times the one before it. The first of
    each, which compiles, a checkpoint and a function of eval.own may take ten times this. None
    waits for ever."""
    # Not compared: of the same resolved values, it makes no difference who chose them.
    asked: Annotated[dict[str, Any], tyro.conf.Suppress] = field(
        default_factory=dict, compare=False
    )
    """Requested values, `auto` or None, of the fields whose values the run chose by itself, by
    dotted name. Only a run sets this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_credentials(self, "")
        for part in ("data", "model", "optimizer", "eval"):
            for source, other in itertools.combinations(sources_in(getattr(self, part)), 2):
                # Copies go to sources/PART under the name of the file alone.
                require(
                    source.file == other.file or Path(source.file).name != Path(other.file).name,
                    f"{part} names {source!r} and {other!r}, of which a run could keep only one, "
                    "as their files have the same name; rename one.",
                )
        require(
            self.num_microbatches is None or self.global_batch_size % self.num_microbatches == 0,
            f"global_batch_size={self.global_batch_size} must be a multiple of "
            f"num_microbatches={self.num_microbatches}.",
        )
        require(
            self.checkpoint.keep_best is None or self.eval.every is not None,
            f"checkpoint.keep_best={self.checkpoint.keep_best} needs evaluations to choose by, but "
            "eval.every=None; set eval.every, or keep_best to None.",
        )
        best_of, names = self.checkpoint.keep_best_of, [v.name for v in self.eval.data]
        require(
            best_of is None or (best_of in names and self.checkpoint.keep_best is not None),
            f"checkpoint.keep_best_of={best_of} needs checkpoint.keep_best, and must name a set of "
            f"eval.data, which has {', '.join(names) or 'none'}.",
        )

    @property
    def decay_steps(self) -> int:
        """Step at which the learning-rate schedule ends."""
        return self.num_steps if self.schedule.decay_steps is None else self.schedule.decay_steps

    @property
    def microbatches(self) -> int:
        """Number of microbatches; 1 until it is chosen."""
        return self.num_microbatches or 1

    @property
    def microbatch_size(self) -> int:
        """Sequences in one microbatch, over all devices."""
        return self.global_batch_size // self.microbatches

    @property
    def eval_batch_size(self) -> int:
        """Sequences scored at once in an evaluation, over all devices."""
        return self.microbatch_size if self.eval.batch_size is None else self.eval.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens a step, over all devices and microbatches."""
        return self.global_batch_size * self.model.max_seq_len


def with_own_defaults(config: TrainConfig) -> TrainConfig:
    """The config with the defaults of a user's own optimizer function among its options."""
    if not isinstance(config.optimizer, OptaxConfig):
        return config
    return dataclasses.replace(config, optimizer=config.optimizer.with_defaults())


def to_dict(config: Any) -> Any:
    """Convert a config to JSON values for records; each dataclass has its class under `type`."""
    if isinstance(config, tuple):
        return [to_dict(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    fields.pop("is_recorded", None)  # says where a `Source` comes from; `from_dict` sets it
    return {"type": type(config).__name__} | fields


_REMOVED: dict[str, tuple[Any, str]] = {
    "hellaswag_too_long": ("cut", "contexts are always cut"),
    "orthogonality_every": (None, "nothing measures it now"),
    "tpu_compiler_options": ("auto", "set LIBTPU_INIT_ARGS='--NAME=VALUE ...' in the environment"),
    "document_end_id": (None, "data.packing=split hides other documents"),
    "map": (None, "GrainConfig(source=...) may map maxmars.data.dataset(...)"),
}
"""Removed fields of older records: the value that means "not in use", and the replacement."""
_REMOVED_OPTIMIZERS = {
    "AdoptConfig": "--optimizer.make optax.contrib:adopt",
    "SophiaConfig": "--optimizer.make tools/examples/sophia.py:sophia",
    "AdEMAMixConfig": "optimizer=adamw, --optimizer.momentum-kernel.preset ademamix and end-step",
}
"""Removed classes of older records, and the replacement of each."""


def _removed(what: str, instead: str) -> ValueError:
    return ValueError(
        f"{what}, which this maxmars does not have: {instead}. Train a new run; it may start from "
        "these weights: `maxmars export` by the code that wrote them, and --init-from the export."
    )


def from_dict(value: Any) -> Any:
    """The inverse of `to_dict`.

    Raises:
      ValueError: the dict names an unknown class or field, for example one of another version. A
        removed field is ignored if the run did not use it: None, False, or as `_REMOVED` says.
    """
    if isinstance(value, list):
        return tuple(from_dict(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: from_dict(field) for name, field in value.items() if name != "type"}
    if "type" not in value:  # options of the user's own
        return fields
    name = value["type"]
    if name in _REMOVED_OPTIMIZERS:
        raise _removed(f"the optimizer is {name}", _REMOVED_OPTIMIZERS[name])
    if name not in _CONFIG_CLASSES:
        raise ValueError(f"unknown config type {name!r}; known: {', '.join(_CONFIG_CLASSES)}.")
    config_class = _CONFIG_CLASSES[name]
    for field_name in sorted(fields.keys() - {f.name for f in dataclasses.fields(config_class)}):
        field = fields.pop(field_name)
        unused, instead = _REMOVED.get(field_name, (None, ""))
        if field is None or field is False or field == unused:  # as if the field never was
            continue
        if instead:
            raise _removed(f"{name} sets {field_name}", instead)
        raise ValueError(
            f"{name} has no field {field_name}; the config was written by another version of "
            "maxmars."
        )
    if fields.get("packing") == "best_fit":
        example = "GrainConfig(source='tools/examples/best_fit.py:windows')"
        raise _removed(f"{name} sets packing=best_fit", f"data.packing=split, or {example}")
    if config_class is Source:
        fields["is_recorded"] = True
    with relative_to(None):  # the path of a function stands beside its digest, not alone
        return config_class(**fields)


def differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted name, old value and new value of each leaf in which two configs differ. `prefix` goes
    before the names."""

    def children(value: Any) -> dict[str, Any]:
        if isinstance(value, tuple):
            return {str(i): item for i, item in enumerate(value)}
        if not dataclasses.is_dataclass(value) or isinstance(value, Source):  # a leaf
            return {}
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.compare}

    if old == new:
        return []
    old_children, new_children = children(old), children(new)
    # Of two optimizers, or of tuples of different length, the whole values are the difference.
    if type(old) is not type(new) or not old_children or old_children.keys() != new_children.keys():
        return [(prefix, old, new)]
    rows = []
    for name, value in old_children.items():
        rows += differences(value, new_children[name], f"{prefix}.{name}" if prefix else name)
    return rows


def _classes_of(annotation: Any) -> list[type]:
    if not dataclasses.is_dataclass(annotation):
        return [c for kind in typing.get_args(annotation) for c in _classes_of(kind)]
    field_types = typing.get_type_hints(annotation).values()
    return [annotation, *(c for kind in field_types for c in _classes_of(kind))]


_CONFIG_CLASSES: dict[str, type] = {cls.__name__: cls for cls in _classes_of(TrainConfig)}
