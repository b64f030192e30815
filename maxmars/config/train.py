"""`TrainConfig` and its parts, except data and optimizers: frozen dataclasses and their checks.

A config file (see `configs/`) builds a `TrainConfig`; the command line changes its leaves. Derived
values are properties, `None` switches an option off, `Literal` lists the values of an option.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from maxmars.config.checks import CheckedConfig, NotNegative, Positive, require
from maxmars.config.data import DataConfig
from maxmars.config.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class GPT2Config(CheckedConfig):
    """The model. Presets `small`, `medium`, `large`, `xl` are the four published GPT-2 sizes."""

    num_layers: Positive[int] = 12
    """Number of transformer blocks."""
    num_heads: Positive[int] = 12
    """Attention heads; must divide embed_dim."""
    embed_dim: Positive[int] = 768
    """Width of the residual stream."""
    max_seq_len: Positive[int] = 1024
    """Context length in tokens; also the length of a training sequence."""
    vocab_size: Positive[int] = 50257
    """Number of token ids that the softmax covers."""
    vocab_pad_multiple: Positive[int] = 1
    """Store the embedding with its rows rounded up to a multiple of this. Padding rows are masked
    out of the softmax, so the loss does not depend on it; use it to make `tensor` divide the
    vocabulary."""
    use_bias: bool = True
    """Biases in linear layers and LayerNorms (GPT-2 has them; the MARS paper's models do not)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Also divide the attention logits of layer i by i + 1 (the MARS paper's models do)."""
    layer_norm_epsilon: Positive[float] = 1e-5
    """Added to the variance in every LayerNorm."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters. float64 (for reference runs) needs JAX_ENABLE_X64=1."""
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = "bfloat16"
    """Type of matrix products; norms, logits, softmax and loss use float32 at least. auto takes
    bfloat16 on accelerators and on CPUs that are faster in it, else float32; a run that continues
    keeps its type."""
    document_end_id: int | None = None
    """Id of the token that ends a document (gpt2: 50256, byte: 256), to keep attention within
    documents. A document then reaches from one such token up to the next, and its tokens attend to
    no token before it. Positions still count from the start of the window, and every token is
    predicted. None attends over the whole window, as GPT-2 does. See also `data.packing`, which
    counts positions in each document."""
    attention: Literal["auto", "plain", "blocked", "splash", "cudnn"] = "auto"
    """Implementation of attention. `splash` is a kernel for TPUs and `cudnn` a kernel for NVIDIA
    GPUs; neither stores length x length numbers a head. `plain` and `blocked` run anywhere, and
    `blocked` is faster on CPUs. `auto` chooses by the devices, and the run logs why where a kernel
    cannot be used."""
    remat: Literal["auto", "full", "attention", "dots"] | None = None
    """Rematerialisation: which arrays of a block are kept for the backward pass, which computes the
    others again. `full` keeps the block's input; `attention` also queries, keys, values and the
    output of attention; `dots` also the results of all products with weights; None keeps
    everything. `auto` keeps as much as fits the device's memory, and everything on a CPU."""
    scan_unroll: Positive[int] = 1
    """Blocks per iteration of the scan over layers; more compiles longer and can run faster."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.embed_dim % self.num_heads == 0,
            f"model.embed_dim={self.embed_dim} must be a multiple of "
            f"model.num_heads={self.num_heads}.",
        )
        require(
            self.document_end_id is None or 0 <= self.document_end_id < self.vocab_size,
            f"model.document_end_id={self.document_end_id} must lie in [0, model.vocab_size="
            f"{self.vocab_size}).",
        )

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to `vocab_pad_multiple`."""
        return -(-self.vocab_size // self.vocab_pad_multiple) * self.vocab_pad_multiple

    @classmethod
    def small(cls) -> GPT2Config:
        """124m parameters."""
        return cls()

    @classmethod
    def medium(cls) -> GPT2Config:
        """355m parameters."""
        return cls(num_layers=24, num_heads=16, embed_dim=1024)

    @classmethod
    def large(cls) -> GPT2Config:
        """774m parameters."""
        return cls(num_layers=36, num_heads=20, embed_dim=1280)

    @classmethod
    def xl(cls) -> GPT2Config:
        """1558m parameters."""
        return cls(num_layers=48, num_heads=25, embed_dim=1600)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedConfig):
    """Learning-rate schedule: linear warmup from zero to the peak, then a decay."""

    decay: Literal["cosine", "linear", "exponential", "wsd"] = "cosine"
    """Shape of the decay; `exponential` is the official MARS code's, `wsd` stays at the peak until
    the last `wsd_decay_fraction` of the steps, then falls linearly."""
    wsd_decay_fraction: float = 0.2
    """Share of the steps in which `wsd` decays."""
    warmup_steps: NotNegative[int] = 2000
    """Steps from learning rate zero to the peak."""
    decay_steps: Positive[int] | None = None
    """Step at which the decay ends; None means at num_steps."""
    final_fraction: float = 0.1
    """Learning rate at the end and after it, as a fraction of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.final_fraction <= 1,
            f"schedule.final_fraction={self.final_fraction} must lie in [0, 1].",
        )
        require(
            0 < self.wsd_decay_fraction <= 1,
            f"schedule.wsd_decay_fraction={self.wsd_decay_fraction} must lie in (0, 1].",
        )
        # A run shorter than its warmup is fine: it is the beginning of a longer one.
        require(
            self.decay_steps is None or self.warmup_steps <= self.decay_steps,
            f"schedule.warmup_steps={self.warmup_steps} must not exceed "
            f"schedule.decay_steps={self.decay_steps}.",
        )


@dataclass(frozen=True, kw_only=True)
class MeshConfig(CheckedConfig):
    """The device mesh `data` x `fsdp` x `tensor`. Its product must be the number of devices."""

    data: Positive[int] | None = None
    """Replicas of the parameters, which share the batch; None takes all devices that fsdp and
    tensor leave."""
    fsdp: Positive[int] = 1
    """Parts into which parameters, optimizer state and batch are split."""
    tensor: Positive[int] = 1
    """Parts into which each layer's heads and MLP are split; must divide the heads."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(CheckedConfig):
    """Validation in the loop: the first windows of the validation split, always the same."""

    every: Positive[int] | None = 1000
    """Steps between evaluations (also at step 0 and at the end); None never evaluates."""
    num_windows: Positive[int] = 512
    """Number of sequences of max_seq_len tokens to score."""
    batch_size: Positive[int] | None = None
    """Sequences scored at once; None takes one microbatch. The loss does not depend on it."""
    hellaswag_every: Positive[int] | None = None
    """Steps between scorings of HellaSwag (also at step 0 and at the end); None never does."""
    hellaswag_path: str | None = None
    """File of HellaSwag's questions, hellaswag_val.jsonl; None downloads it once into the cache
    directory (MAXMARS_CACHE, default ~/.cache/maxmars)."""
    hellaswag_questions: Positive[int] | None = None
    """Score this number of questions only, the first ones; None scores all (10,042)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(CheckedConfig):
    """Checkpoints in `<workdir>/checkpoints`: when one is written, and which are kept."""

    every: Positive[int] | None = 1000
    """Steps between checkpoints; the last step always gets one. None writes none in between."""
    every_minutes: Positive[float] | None = None
    """Also write a checkpoint when this time has passed since the last one; None ignores the
    time."""
    keep_last: Positive[int] = 2
    """Number of newest checkpoints to keep."""
    keep_best: Positive[int] | None = None
    """Also keep this number of checkpoints with the lowest best_metric. Only a checkpoint that is
    written at the step of an evaluation has this metric, so eval.every should divide
    checkpoint.every. None keeps none for that reason."""
    best_metric: str = "eval/loss"
    """The metric by which keep_best chooses; lower is better."""
    keep_every: Positive[int] | None = None
    """Never delete the first checkpoint at or after each multiple of this number of steps; None
    makes no such exception."""


@dataclass(frozen=True, kw_only=True)
class LogConfig(CheckedConfig):
    """Which metrics are printed and written to `<workdir>/metrics.jsonl`."""

    every: Positive[int] = 10
    """Steps between metrics lines."""
    norms: bool = True
    """Also write the norms of gradients, parameters and updates, separately for embeddings,
    attention, MLP, and norms and biases. The compiled step computes them."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to `<workdir>/tensorboard` (extra `tensorboard`)."""
    wandb: Literal["online", "offline"] | None = None
    """Also send the metrics to Weights & Biases, or keep them in `<workdir>/wandb` for `wandb sync`
    (extra `wandb`). WANDB_MODE in the environment overrides which of the two; None does neither."""
    wandb_project: str = "maxmars"
    """Project of Weights & Biases; see also WANDB_ENTITY."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.wandb_project), "log.wandb_project must not be empty.")


@dataclass(frozen=True, kw_only=True)
class GuardConfig(CheckedConfig):
    """Which steps are skipped. The update of a skipped step is not applied, and the run goes on
    with the next batch. A step whose loss or gradient is not finite is always skipped.
    `<workdir>/skipped_steps/STEP.json` names the examples of a skipped step."""

    loss_spike_threshold: Positive[float] | None = None
    """Also skip a step whose loss exceeds the running mean by this many running standard
    deviations; None never does."""
    history: Positive[int] = 100
    """Number of steps in the running mean and deviation; before that many, no loss is a spike."""
    max_consecutive_skips: NotNegative[int] = 0
    """The run stops with an error when it has skipped more consecutive steps than this; 0 stops it
    at the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.loss_spike_threshold is None or self.max_consecutive_skips > 0,
            f"guard.loss_spike_threshold={self.loss_spike_threshold} skips steps, but "
            "guard.max_consecutive_skips=0 stops the run at the first; allow 10, for example.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckedConfig):
    """One training run."""

    name: str
    """Name of the run; its default working directory is runs/NAME."""
    seed: int = 0
    """Seed of the initial weights and of the token order."""
    num_steps: Positive[int]
    """Number of optimizer steps."""
    global_batch_size: Positive[int]
    """Sequences a step, over all devices and microbatches."""
    num_microbatches: Positive[int] = 1
    """Parts of the batch that go through the model one after the other; saves memory, and changes
    neither the tokens of a step nor, rounding aside, its gradient."""
    gradient_clip_norm: Positive[float] | None = 1.0
    """Scale the gradient down to this global norm; None does not clip."""
    gradient_multiplier: Positive[float] = 1.0
    """Multiply the mean gradient before the clip. The official MARS code sums microbatch gradients
    where others average; a multiplier equal to its number of microbatches reproduces that."""
    model: GPT2Config
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hang_timeout_s: Positive[float] | None = 600.0
    """End the run, with exit code 75, when a step or a batch of an evaluation takes longer than
    this and than ten times the one before it. The first of each, which compiles, and checkpoints
    may take ten times this. None waits for ever."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.name), "name must not be empty: it names the working directory.")
        require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32).")
        require(
            self.global_batch_size % self.num_microbatches == 0,
            f"global_batch_size={self.global_batch_size} must be a multiple of "
            f"num_microbatches={self.num_microbatches}.",
        )
        require(
            self.checkpoint.keep_best is None or self.eval.every is not None,
            f"checkpoint.keep_best={self.checkpoint.keep_best} needs evaluations to choose by, but "
            "eval.every=None; set eval.every, or keep_best to None.",
        )

    @property
    def decay_steps(self) -> int:
        """Step at which the learning-rate schedule ends."""
        return self.num_steps if self.schedule.decay_steps is None else self.schedule.decay_steps

    @property
    def microbatch_size(self) -> int:
        """Sequences in one microbatch, over all devices."""
        return self.global_batch_size // self.num_microbatches

    @property
    def eval_batch_size(self) -> int:
        """Sequences scored at once in an evaluation, over all devices."""
        return self.microbatch_size if self.eval.batch_size is None else self.eval.batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens a step, over all devices and microbatches."""
        return self.global_batch_size * self.model.max_seq_len


def to_dict(config: Any) -> Any:
    """A JSON-ready dict of a config; every dataclass says its class under `type`."""
    if isinstance(config, tuple):
        return [to_dict(item) for item in config]
    if not dataclasses.is_dataclass(config):
        return config
    fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return {"type": type(config).__name__} | fields


def from_dict(value: Any) -> Any:
    """The inverse of `to_dict`.

    Raises:
      ValueError: the dict names an unknown class or field, for example one of another version.
    """
    if isinstance(value, list):
        return tuple(from_dict(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {name: from_dict(field) for name, field in value.items() if name != "type"}
    if "type" not in value:  # options of the user's own
        return fields
    name = value["type"]
    if name not in _CONFIG_CLASSES:
        raise ValueError(f"unknown config type {name!r}; known: {', '.join(_CONFIG_CLASSES)}.")
    config_class = _CONFIG_CLASSES[name]
    fields.pop("cache_dir", None)  # of data, before tokens were read from buckets
    unknown = fields.keys() - {f.name for f in dataclasses.fields(config_class)}
    if unknown:
        raise ValueError(
            f"{name} has no field {', '.join(sorted(unknown))}; the config was written by "
            "another version of maxmars."
        )
    return config_class(**fields)


def differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted names of the leaves in which two configs differ, with both values."""

    def children(value: Any) -> dict[str, Any]:
        if isinstance(value, tuple):
            return {str(i): item for i, item in enumerate(value)}
        return dict(vars(value)) if dataclasses.is_dataclass(value) else {}

    if old == new:
        return []
    ours, theirs = children(old), children(new)
    if type(old) is not type(new) or not ours or ours.keys() != theirs.keys():
        return [(prefix, old, new)]
    rows = []
    for name, value in ours.items():
        rows += differences(value, theirs[name], f"{prefix}.{name}" if prefix else name)
    return rows


def _classes_of(annotation: Any) -> list[type]:
    if not dataclasses.is_dataclass(annotation):
        return [c for part in typing.get_args(annotation) for c in _classes_of(part)]
    inside = typing.get_type_hints(annotation).values()
    return [annotation, *(c for part in inside for c in _classes_of(part))]


_CONFIG_CLASSES: dict[str, type] = {cls.__name__: cls for cls in _classes_of(TrainConfig)}
