"""Configuration: frozen dataclasses and their validation, nothing else.

A config file (see `configs/`) builds a `TrainConfig`; the command line changes its leaves.
Everything derived is a property. `None` disables an option, `Literal` enumerates one. No JAX is
imported here, so `maxmars train CONFIG --help` needs no accelerator.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from maxmars.config_checks import require, require_not_negative, require_positive
from maxmars.data_config import DataConfig
from maxmars.optimizer_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The model. Presets `small`, `medium`, `large`, `xl` are the four published GPT-2 sizes."""

    num_layers: int = 12
    """Number of transformer blocks."""
    num_heads: int = 12
    """Attention heads; must divide embed_dim."""
    embed_dim: int = 768
    """Width of the residual stream."""
    max_seq_len: int = 1024
    """Context length in tokens; also the length of a training sequence."""
    vocab_size: int = 50257
    """Number of token ids that the softmax covers."""
    vocab_pad_multiple: int = 1
    """Store the embedding with its rows rounded up to a multiple of this. Padding rows are masked
    out of the softmax, so the loss does not depend on it; use it to make `tensor` divide the
    vocabulary."""
    use_bias: bool = True
    """Biases in linear layers and LayerNorms (GPT-2 has them; the MARS paper's models do not)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Also divide the attention logits of layer i by i + 1 (the MARS paper's models do)."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in every LayerNorm."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters. float64 (for reference runs) needs JAX_ENABLE_X64=1."""
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = "bfloat16"
    """Type of matrix products; norms, logits, softmax and loss use float32 at least. auto takes
    bfloat16 on accelerators and on CPUs that are faster in it, else float32; a run that continues
    keeps its type."""
    document_end_id: int | None = None
    """Id of the token that ends a document (gpt2: 50256, byte: 256), to keep attention within
    documents: no token then sees anything before the last such token at or before it, which so
    begins the next document. Positions are counted from the window's start all the same, and every
    token is predicted. None attends over the whole window, as GPT-2 does."""
    attention: Literal["auto", "plain", "blocked", "splash", "cudnn"] = "auto"
    """What computes attention: `splash` is a kernel for TPUs, `cudnn` one for NVIDIA GPUs, neither
    of which keeps length x length numbers a head; `plain` and `blocked`, which is faster on CPUs,
    run anywhere. auto takes what suits the devices, and says why where it cannot."""
    remat: Literal["auto", "full", "attention", "dots"] | None = None
    """Rematerialisation: what is kept of a block for the backward pass, which computes the rest
    again. `full` keeps its input; `attention` also queries, keys, values and what attention made of
    them; `dots` these and the results of all products with weights; None keeps everything. `auto`
    takes the last of these that fits the device's memory, and None on a CPU."""
    scan_unroll: int = 1
    """Blocks per iteration of the scan over layers; more compiles longer and can run faster."""

    def __post_init__(self) -> None:
        """Reject sizes that do not fit together."""
        require_positive(
            self,
            "num_layers",
            "num_heads",
            "embed_dim",
            "max_seq_len",
            "vocab_size",
            "vocab_pad_multiple",
            "layer_norm_epsilon",
            "scan_unroll",
        )
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
        """Width of one attention head."""
        return self.embed_dim // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token embedding: `vocab_size` rounded up to `vocab_pad_multiple`."""
        return -(-self.vocab_size // self.vocab_pad_multiple) * self.vocab_pad_multiple

    @classmethod
    def small(cls) -> GPT2Config:
        """GPT-2 small, 124M parameters."""
        return cls()

    @classmethod
    def medium(cls) -> GPT2Config:
        """GPT-2 medium, 355M parameters."""
        return cls(num_layers=24, num_heads=16, embed_dim=1024)

    @classmethod
    def large(cls) -> GPT2Config:
        """GPT-2 large, 774M parameters."""
        return cls(num_layers=36, num_heads=20, embed_dim=1280)

    @classmethod
    def xl(cls) -> GPT2Config:
        """GPT-2 XL, 1558M parameters."""
        return cls(num_layers=48, num_heads=25, embed_dim=1600)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate schedule: linear warmup from zero to the peak, then a decay."""

    decay: Literal["cosine", "linear", "exponential", "wsd"] = "cosine"
    """Shape of the decay; `exponential` is the official MARS code's, `wsd` stays at the peak until
    the last `wsd_decay_fraction` of the steps, then falls linearly."""
    wsd_decay_fraction: float = 0.2
    """Share of the steps in which `wsd` decays."""
    warmup_steps: int = 2000
    """Steps from learning rate zero to the peak."""
    decay_steps: int | None = None
    """Step at which the decay ends; None means at num_steps."""
    final_fraction: float = 0.1
    """Learning rate at the end and after it, as a fraction of the peak."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_not_negative(self, "warmup_steps")
        require_positive(self, "decay_steps")
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
class MeshConfig:
    """The device mesh `data` x `fsdp` x `tensor`. Its product must be the number of devices."""

    data: int | None = None
    """Replicas of the parameters, between which the batch is split; None: the devices left over."""
    fsdp: int = 1
    """Parts into which parameters, optimizer state and batch are split."""
    tensor: int = 1
    """Parts into which each layer's heads and MLP are split; must divide the heads."""

    def __post_init__(self) -> None:
        """Reject empty axes."""
        require_positive(self, "data", "fsdp", "tensor")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation in the loop: the first windows of the validation split, always the same."""

    every: int | None = 1000
    """Steps between evaluations (also at step 0 and at the end); None never evaluates."""
    num_windows: int = 512
    """Number of sequences of max_seq_len tokens to score."""
    batch_size: int | None = None
    """Sequences scored at once; None takes one microbatch. The loss does not depend on it."""
    hellaswag_every: int | None = None
    """Steps between scorings of HellaSwag (also at step 0 and at the end); None never does."""
    hellaswag_path: str | None = None
    """File of HellaSwag's questions, hellaswag_val.jsonl; None downloads it once into the cache
    directory (MAXMARS_CACHE, default ~/.cache/maxmars)."""
    hellaswag_questions: int | None = None
    """Score this number of questions only, the first ones; None scores all (10,042)."""

    def __post_init__(self) -> None:
        """Reject empty evaluations."""
        require_positive(self, "every", "num_windows", "batch_size")
        require_positive(self, "hellaswag_every", "hellaswag_questions")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints in `<workdir>/checkpoints`: when one is written, and which are kept."""

    every: int | None = 1000
    """Steps between checkpoints; there is always one at the end. None writes none by steps."""
    every_minutes: float | None = None
    """Also write one when this time has passed since the last; None does not look at the clock."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int | None = None
    """Also keep this number of those with the lowest best_metric. Only those written at the step of
    an evaluation have it: let eval.every be a divisor of every. None keeps none for that."""
    best_metric: str = "eval/loss"
    """What keep_best goes by; lower is better."""
    keep_every: int | None = None
    """Also keep for good the first checkpoint at or after each multiple of this number of steps;
    None keeps none for good."""

    def __post_init__(self) -> None:
        """Reject intervals and counts below one."""
        require_positive(self, "every", "every_minutes", "keep_last", "keep_best", "keep_every")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is printed and written to `<workdir>/metrics.jsonl`."""

    every: int = 10
    """Steps between metrics lines."""
    norms: bool = True
    """Also write norms of gradients, parameters and updates: of embeddings, attention, MLP, and of
    norms and biases. They are taken in the compiled step."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, to `<workdir>/tensorboard` (extra `tensorboard`)."""
    wandb: Literal["online", "offline"] | None = None
    """Also send the metrics to Weights & Biases, or keep them in `<workdir>/wandb` for `wandb sync`
    (extra `wandb`). WANDB_MODE in the environment overrides which of the two; None does neither."""
    wandb_project: str = "maxmars"
    """Project of Weights & Biases; see also WANDB_ENTITY."""

    def __post_init__(self) -> None:
        """Reject intervals below one, and projects without a name."""
        require_positive(self, "every")
        require(bool(self.wandb_project), "log.wandb_project must not be empty.")


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Steps to skip: their update is not applied, and the run goes on with the next batch. Losses
    and gradients that are not finite always are. `<workdir>/skipped_steps/STEP.json` tells their
    examples."""

    loss_spike_threshold: float | None = None
    """Also skip a step whose loss exceeds the running mean by this many running standard
    deviations; None does not."""
    history: int = 100
    """Steps that the running mean and deviation reach back; there are no spikes before."""
    max_skipped_in_a_row: int = 0
    """The run stops with an error when it has skipped more steps than this one after the other; 0
    stops it at the first."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(self, "loss_spike_threshold", "history")
        require_not_negative(self, "max_skipped_in_a_row")
        require(
            self.loss_spike_threshold is None or self.max_skipped_in_a_row > 0,
            f"guard.loss_spike_threshold={self.loss_spike_threshold} skips steps, but "
            "guard.max_skipped_in_a_row=0 stops the run at the first; allow 10, for example.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    name: str
    """Name of the run; its default working directory is runs/NAME."""
    seed: int = 0
    """Seed of the initial weights and of the token order."""
    num_steps: int
    """Number of optimizer steps."""
    global_batch_size: int
    """Sequences a step, over all devices and microbatches."""
    num_microbatches: int = 1
    """Parts of the batch that go through the model one after the other; saves memory, and changes
    neither the tokens of a step nor, rounding aside, its gradient."""
    gradient_clip_norm: float | None = 1.0
    """Scale the gradient down to this global norm; None does not clip."""
    gradient_multiplier: float = 1.0
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
    hang_timeout_s: float | None = 600.0
    """End the run, with exit code 75, when a step or a batch of an evaluation takes longer than
    this and than ten times the one before it. The first of each, which compiles, and checkpoints
    may take ten times this. None waits for ever."""

    def __post_init__(self) -> None:
        """Reject fields that do not fit together."""
        require(bool(self.name), "name must not be empty: it names the working directory.")
        require(0 <= self.seed < 2**32, f"seed={self.seed} must lie in [0, 2**32).")
        require_positive(
            self,
            "num_steps",
            "global_batch_size",
            "num_microbatches",
            "gradient_clip_norm",
            "gradient_multiplier",
            "hang_timeout_s",
        )
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


def to_dict(config: Any) -> dict[str, Any]:
    """A JSON-ready dict of a config; a nested dataclass says its class under `type`."""
    fields: dict[str, Any] = {"type": type(config).__name__}
    for f in dataclasses.fields(config):
        fields[f.name] = _to_json(getattr(config, f.name))
    return fields


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def from_dict(fields: dict[str, Any]) -> Any:
    """The inverse of `to_dict`.

    Raises:
      ValueError: the dict names an unknown class or field, for example one of another version.
    """
    fields = dict(fields)
    name = fields.pop("type", None)
    cls = _CONFIG_CLASSES.get(name)
    if cls is None:
        raise ValueError(f"unknown config type {name!r}; known: {', '.join(_CONFIG_CLASSES)}.")
    unknown = fields.keys() - {f.name for f in dataclasses.fields(cls)}
    if unknown:
        raise ValueError(
            f"{name} has no field {', '.join(sorted(unknown))}; the config was written by "
            "another version of maxmars."
        )
    return cls(**{k: _from_json(v) for k, v in fields.items()})


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    return from_dict(value) if isinstance(value, dict) else value


def differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted names of the leaves in which two configs differ, with both values."""
    if old == new:
        return []
    ours, theirs = _children(old), _children(new)
    if type(old) is not type(new) or not ours or len(ours) != len(theirs):
        return [(prefix, old, new)]
    rows = []
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        rows += differences(a, b, f"{prefix}.{name}" if prefix else name)
    return rows


def _children(value: Any) -> list[tuple[str, Any]]:
    """Names and values of what a config or a tuple consists of; nothing of a leaf."""
    if isinstance(value, tuple):
        return [(str(i), item) for i, item in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return []
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]


def _classes_of(annotation: Any) -> list[type]:
    if not dataclasses.is_dataclass(annotation):
        return [c for part in typing.get_args(annotation) for c in _classes_of(part)]
    inside = typing.get_type_hints(annotation).values()
    return [annotation, *(c for part in inside for c in _classes_of(part))]


_CONFIG_CLASSES: dict[str, type] = {cls.__name__: cls for cls in _classes_of(TrainConfig)}
