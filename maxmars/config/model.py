"""The model of a run: GPT-2, or a module of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maxmars.config.checks import CheckedConfig, Count, Fraction, Positive, require
from maxmars.config.user_code import Source, with_tuples


@dataclass(frozen=True, kw_only=True)
class GPT2Config(CheckedConfig):
    """GPT-2. Presets `small`, `medium`, `large`, `xl` are the four published GPT-2 sizes."""

    num_layers: Count[int] = 12
    """Number of transformer blocks."""
    num_heads: Count[int] = 12
    """Attention heads; must divide embed_dim."""
    embed_dim: Count[int] = 768
    """Width of the residual stream."""
    max_seq_len: Count[int] = 1024
    """Context length in tokens; also the length of a training sequence."""
    vocab_size: Count[int] = 50257
    """Number of token ids that the softmax covers."""
    vocab_pad_multiple: Count[int] = 1
    """Store the embedding with its rows rounded up to a multiple of this. Padding rows are masked
    out of the softmax, so the loss does not depend on it; use it to make `tensor` divide the
    vocabulary."""
    use_bias: bool = True
    """Biases in linear layers and LayerNorms (GPT-2 has them; the MARS paper's models do not)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Also divide the attention logits of layer i by i + 1 (the MARS paper's models do)."""
    layer_norm_epsilon: Positive[float] = 1e-5
    """Added to the variance in every LayerNorm."""
    dropout: Fraction = 0.0
    """Share of the numbers that training sets to zero, for small texts, which overfit: of the sum
    of the embeddings, of what attention and MLP add to the residual stream, and with
    attention=plain also of the attention's weights, which the other kernels do not hold."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters. float64 (for reference runs) needs JAX_ENABLE_X64=1."""
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = "bfloat16"
    """Type of matrix products; norms, logits, softmax and loss use float32 at least. auto takes
    bfloat16 on accelerators and float32 on CPUs; a run that continues keeps its type. On
    accelerators, products of float32 round their operands to bfloat16 or TF32 unless the
    environment variable JAX_DEFAULT_MATMUL_PRECISION is highest."""
    residual_dtype: Literal["float32"] | None = None
    """Type of the residual stream, which each branch adds to. None is `compute_dtype`; float32 (at
    least) is what PyTorch's autocast leaves it in. It makes what `remat` keeps of each layer
    larger, `full` twice as large; gradients in bfloat16 were measured to be no more exact."""
    attention: Literal["auto", "plain", "blocked", "flat", "splash", "cudnn"] = "auto"
    """Implementation of attention. `flat` and `splash` are kernels for TPUs and `cudnn` one for
    NVIDIA GPUs; none stores length x length numbers a head. `flat` takes heads of 64 or 128 as the
    products write them; `splash` takes any. `plain` and `blocked` run anywhere, and `blocked` is
    faster on CPUs. `auto` chooses by the devices, and the run logs why where the first kernel for
    them cannot be used."""
    remat: Literal["auto", "full", "attention", "dots"] | None = None
    """Rematerialisation: which arrays of a block are kept for the backward pass, which computes the
    others again. `full` keeps the block's input; `attention` also queries, keys, values and the
    output of attention; `dots` also the results of all products with weights; None keeps
    everything. `auto` is a rule: on GPUs the first from None on that fits by an estimate of the
    memory; on TPUs `full`, from embed_dim 1280 on `attention` where it fits; None on CPUs. A run
    that continues there keeps what was chosen. `maxmars plan --remat all` says what each takes."""
    scan_unroll: Count[int] | None = None
    """Blocks per iteration of the scan over layers; more compiles longer and can run faster. None
    takes all on GPUs, and one elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.embed_dim % self.num_heads == 0,
            f"model.embed_dim={self.embed_dim} must be a multiple of "
            f"model.num_heads={self.num_heads}.",
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
class ModuleConfig(CheckedConfig):
    """Any language model, made by a function of the user's own."""

    make: Source | str
    """`FILE.py:NAME`, relative to the config file, or to where it is typed. It is called as
    `make(rngs=..., vocab_size=..., max_seq_len=..., **options)` and returns a Flax NNX module. See
    `train/README.md` for what the trainer asks of the module."""
    # Not hashed, as a dict cannot be; configs are still compared by it.
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of the function, JSON values."""
    vocab_size: Count[int]
    """Number of token ids that the softmax covers."""
    max_seq_len: Count[int]
    """Context length in tokens; also the length of a training sequence."""
    remat: str | None = None
    """Rematerialisation: one of the module's own `remat_policies`, which the trainer puts into its
    attribute `remat`. None keeps everything. `auto` takes None on CPUs and GPUs and the last of the
    policies, that of the least memory, on TPUs."""

    def __post_init__(self) -> None:
        make = Source.parse(self.make, field="model.make", example="my_model.py:make")
        object.__setattr__(self, "make", make)
        super().__post_init__()
        taken = {"rngs", "vocab_size", "max_seq_len"} & self.options.keys()
        require(
            not taken,
            f"model.options has {', '.join(sorted(taken))}, but no option of a model may be called "
            "rngs, vocab_size or max_seq_len.",
        )
        # So that a run that continues finds them unchanged.
        options = with_tuples(self.options, "ModuleConfig.options")
        object.__setattr__(self, "options", options)


ModelConfig = GPT2Config | ModuleConfig
