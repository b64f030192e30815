"""Configs of models: GPT-2, or a Flax NNX module of the user's own.

Of the fields of `GPT2Config`, `attention`, `remat` and `scan_unroll` concern speed and memory, and
change results by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maxmars.config.checks import CheckedConfig, Count, Fraction, Positive, require
from maxmars.config.user_code import Source, parse_function


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
    """Store the embedding with its number of rows rounded up to a multiple of this. Padding rows
    are masked out of the softmax, so the loss does not depend on them; use this to make `tensor`
    divide the vocabulary."""
    use_bias: bool = True
    """Use biases in linear layers and LayerNorms (GPT-2 does; the MARS paper's models do not)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Also divide the attention logits of layer i by i + 1 (the MARS paper's models do)."""
    layer_norm_epsilon: Positive[float] = 1e-5
    """Epsilon of every LayerNorm, added to the variance."""
    dropout: Fraction = 0.0
    """Dropout rate in training, for small texts, which overfit: on the sum of the embeddings, on
    the outputs of attention and MLP, and with attention=plain also on the attention weights, which
    the other kernels do not store."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of the parameters. float64 (for reference runs) needs JAX_ENABLE_X64=1."""
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = "bfloat16"
    """Type of matrix products; norms, logits, softmax and loss use float32 at least. `auto` takes
    bfloat16 on accelerators and float32 on CPUs; a run that continues keeps its type. On
    accelerators, float32 products round their operands to bfloat16 or TF32 unless the environment
    variable JAX_DEFAULT_MATMUL_PRECISION is highest."""
    residual_dtype: Literal["float32"] | None = None
    """Type of the residual stream. None is `compute_dtype`; float32 is what PyTorch's autocast
    uses. With float32 the arrays that `remat` saves are larger, with remat=full twice as large; in
    measurements it made bfloat16 gradients no more exact."""
    attention: Literal["auto", "plain", "blocked", "flat", "splash", "cudnn"] = "auto"
    """Implementation of attention. `flat` and `splash` are kernels for TPUs and `cudnn` is one for
    NVIDIA GPUs; none of the three stores length x length numbers for a head. `flat` takes heads of
    64 or 128 without a transposition; `splash` takes any. `plain` and `blocked` run anywhere, and
    `blocked` is faster on CPUs. `auto` chooses by the devices, and logs the reason where their
    fastest kernel cannot be used."""
    remat: Literal["auto", "full", "attention", "dots"] | None = None
    """Rematerialisation: the arrays of a block that are saved for the backward pass, which computes
    the others again. `full` saves the block's input; `attention` also queries, keys, values and the
    output of attention; `dots` also the results of all products with weights; None saves all.
    `auto` takes on GPUs the policy that saves most and fits by an estimate of the memory; on TPUs
    `full`, or from embed_dim 1280 on `attention` where it fits; on CPUs None. A run that continues
    keeps the policy. `maxmars plan --remat all` shows memory and time of each."""
    scan_unroll: Count[int] | None = None
    """Blocks per iteration of the scan over layers: more of them compile longer and may run faster.
    None takes all on GPUs, and one elsewhere."""

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

    # The four published sizes have heads of 64.
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
    """Function `FILE.py:NAME`; the path is relative to the config file, or on the command line to
    the working directory. The run calls `NAME(rngs=..., vocab_size=..., max_seq_len=...,
    **options)`, which returns a Flax NNX module. `train/README.md` says what the trainer needs of
    the module."""
    # Not hashed, as a dict cannot be; `==` still compares it.
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of the function, JSON values."""
    vocab_size: Count[int]
    """Number of token ids that the softmax covers."""
    max_seq_len: Count[int]
    """Context length in tokens; also the length of a training sequence."""
    remat: str | None = None
    """Rematerialisation: one of the `remat_policies` of the module, which the trainer sets as its
    attribute `remat`. None saves all arrays. `auto` takes None on CPUs and GPUs, and on TPUs the
    last policy, the one with the least memory."""

    def __post_init__(self) -> None:
        parse_function(self, "make", field="model.make", example="my_model.py:make")
        super().__post_init__()
        taken = {"rngs", "vocab_size", "max_seq_len"} & self.options.keys()
        require(
            not taken,
            f"model.options has {', '.join(sorted(taken))}, but no option of a model may be called "
            "rngs, vocab_size or max_seq_len.",
        )


ModelConfig = GPT2Config | ModuleConfig
