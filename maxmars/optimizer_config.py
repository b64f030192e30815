"""Configuration of the optimizers: one class each, which `optimizer_factory` turns into optax ones.

Fields named `vector_*` concern norms and biases; embeddings follow the class's docstring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maxmars.config_checks import (
    require,
    require_fraction,
    require_not_negative,
    require_positive,
)


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW: decay on the matrices of linear layers, none on embeddings, norms and biases."""

    learning_rate: float = 6e-4
    """Peak learning rate; the schedule multiplies it."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the linear layers' matrices."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(self, "learning_rate", "eps")
        require_fraction(self, "b1", "b2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True, kw_only=True)
class MarsConfig:
    """MARS (arXiv 2411.10438): variance reduction on every matrix. Embeddings are matrices in the
    variants adamw and lion, and AdamW's (with the vectors' betas) in shampoo and m."""

    variant: Literal["adamw", "lion", "shampoo", "m"] = "adamw"
    """MARS-AdamW, MARS-Lion, MARS-Shampoo or MARS-M (arXiv 2510.21800)."""
    learning_rate: float = 6e-3
    """Peak learning rate of matrices; the schedule multiplies it."""
    b1: float = 0.95
    """Decay of the first moment."""
    b2: float = 0.99
    """Decay of the second moment (variant adamw)."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    gamma: float = 0.025
    """Strength of the variance-reduction correction; 0 turns it off."""
    clip_threshold: float | None = 1.0
    """Bound on the norm of each matrix's corrected gradient; None does not clip."""
    exact: bool = False
    """Compare each gradient with that of the same batch at the previous parameters: two passes."""
    memory_efficient: bool = False
    """Keep one buffer in place of momentum and last gradient. Needs clip_threshold None and a
    variant other than adamw."""
    weight_decay: float = 1e-2
    """Decoupled weight decay of the linear layers' matrices."""
    decay_embeddings: bool = False
    """Decay embeddings too, as the official MARS-M does."""
    amsgrad: bool = False
    """Divide by the running maximum of the second moment (variant adamw)."""
    last_grad_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the stored gradient; bfloat16 saves 2 bytes a parameter. None is the parameters'."""
    optimize_vectors: bool = False
    """Give norms and biases the MARS rule too, with the matrices' hyperparameters and no decay."""
    vector_learning_rate_scale: float = 0.5
    """Learning rate of norms and biases as a fraction of `learning_rate`."""
    vector_b1: float = 0.9
    """Decay of the first moment of norms and biases."""
    vector_b2: float = 0.95
    """Decay of the second moment of norms and biases."""
    vector_weight_decay: float = 0.1
    """Weight decay of norms and biases. The official code decays LayerNorm gains by 0.1."""
    embeddings: Literal["adamw", "orthogonalize"] = "adamw"
    """Rule of the embeddings in the variants shampoo and m; the official MARS-Shampoo
    orthogonalises them."""
    qkv: Literal["fused", "qkv", "heads"] = "fused"
    """What is orthogonalised of the attention's input projection: the whole (official), queries,
    keys and values apart, or each head apart."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Literal["keller", "polar_express", "cans"] = "keller"
    """Newton-Schulz coefficients; keller's are the official ones."""
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the operands of Newton-Schulz and of its traffic."""
    own_over_data: bool = False
    """Share the matrices out over the mesh's data axis too, not only over fsdp and tensor. Each is
    then iterated on once instead of once a replica, and the results are gathered over `data`: right
    where `data` is a fast network, wrong between slices or nodes."""
    orthogonality_every: int | None = None
    """Steps between measurements of train/orthogonality_error, how far the iterated matrices are
    from orthogonal ones; each moves them in float32 once more. None never measures."""

    def __post_init__(self) -> None:
        """Reject values outside their range and options that do not go together."""
        require_positive(
            self,
            "learning_rate",
            "eps",
            "clip_threshold",
            "vector_learning_rate_scale",
            "ns_steps",
            "orthogonality_every",
        )
        require_fraction(self, "b1", "b2", "vector_b1", "vector_b2")
        require_not_negative(self, "gamma", "weight_decay", "vector_weight_decay")
        efficient = self.memory_efficient
        require(
            not efficient or (self.variant != "adamw" and self.clip_threshold is None),
            "optimizer.memory_efficient=True needs optimizer.clip_threshold=None and a variant "
            f"other than adamw, but they are {self.clip_threshold} and {self.variant}.",
        )
        require(
            not (efficient and self.exact),
            "optimizer.memory_efficient=True and optimizer.exact=True exclude each other; exact "
            "MARS stores no gradient to begin with.",
        )
        require(
            self.variant == "adamw" or not self.amsgrad,
            f"optimizer.amsgrad=True needs optimizer.variant=adamw, but it is {self.variant}.",
        )
        require(
            self.variant in ("shampoo", "m") or self.orthogonality_every is None,
            f"optimizer.orthogonality_every={self.orthogonality_every} needs optimizer.variant "
            f"shampoo or m, which orthogonalise, but it is {self.variant}.",
        )


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon (Keller Jordan, 2024): orthogonalised Nesterov momentum on the linear layers' matrices,
    AdamW on embeddings, norms and biases. With `ns_scale=rms` and one rate for all it is Moonlight
    (arXiv 2502.16982)."""

    learning_rate: float = 2e-2
    """Peak learning rate of matrices; the schedule multiplies it."""
    momentum: float = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Look one step ahead."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the linear layers' matrices."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    vector_learning_rate_scale: float = 0.15
    """Learning rate of embeddings, norms and biases as a fraction of `learning_rate`."""
    vector_b1: float = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: float = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: float = 0.0
    """Weight decay of norms and biases."""
    qkv: Literal["fused", "qkv", "heads"] = "fused"
    """What is orthogonalised of the attention's input projection."""
    ns_scale: Literal["spectral", "rms"] = "spectral"
    """Factor after Newton-Schulz: sqrt(max(1, out/in)) or 0.2 sqrt(max(in, out))."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Literal["keller", "polar_express", "cans"] = "keller"
    """Newton-Schulz coefficients."""
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the operands of Newton-Schulz and of its traffic."""
    own_over_data: bool = False
    """Share the matrices out over the mesh's data axis too, not only over fsdp and tensor. Each is
    then iterated on once instead of once a replica, and the results are gathered over `data`: right
    where `data` is a fast network, wrong between slices or nodes."""
    orthogonality_every: int | None = None
    """Steps between measurements of train/orthogonality_error, how far the iterated matrices are
    from orthogonal ones; each moves them in float32 once more. None never measures."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(
            self,
            "learning_rate",
            "eps",
            "vector_learning_rate_scale",
            "ns_steps",
            "orthogonality_every",
        )
        require_fraction(self, "vector_b1", "vector_b2")
        require_not_negative(self, "weight_decay", "vector_weight_decay")
        require(
            0 < self.momentum < 1,
            f"MuonConfig.momentum={self.momentum} must lie between 0 and 1.",
        )


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum, for every parameter."""

    learning_rate: float = 1e-4
    """Peak learning rate; the schedule multiplies it."""
    b1: float = 0.95
    """Share of the momentum in the update."""
    b2: float = 0.98
    """Decay of the momentum."""
    weight_decay: float = 1.0
    """Decoupled weight decay of the linear layers' matrices."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(self, "learning_rate")
        require_fraction(self, "b1", "b2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True, kw_only=True)
class AdoptConfig:
    """ADOPT (arXiv 2411.02853): Adam that normalises by the second moment of the step before."""

    learning_rate: float = 6e-4
    """Peak learning rate; the schedule multiplies it."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.9999
    """Decay of the second moment."""
    eps: float = 1e-6
    """Lower bound of the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the linear layers' matrices."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(self, "learning_rate", "eps")
        require_fraction(self, "b1", "b2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True, kw_only=True)
class SophiaConfig:
    """Sophia-G (arXiv 2305.14342): momentum over a diagonal Gauss-Newton estimate, clipped. Each
    estimate costs one more gradient, on labels sampled from the model."""

    learning_rate: float = 6e-4
    """Peak learning rate; the schedule multiplies it."""
    b1: float = 0.965
    """Decay of the momentum."""
    b2: float = 0.99
    """Decay of the Gauss-Newton estimate."""
    rho: float = 0.05
    """Scale of the estimate: smaller clips more of the update."""
    weight_decay: float = 0.2
    """Decoupled weight decay of the linear layers' matrices."""
    update_hessian_every: int = 10
    """Updates between estimates."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(self, "learning_rate", "rho", "update_hessian_every")
        require_fraction(self, "b1", "b2")
        require_not_negative(self, "weight_decay")


@dataclass(frozen=True, kw_only=True)
class SoapConfig:
    """SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner on the linear
    layers' matrices, AdamW on embeddings, norms and biases."""

    learning_rate: float = 3e-3
    """Peak learning rate; the schedule multiplies it."""
    b1: float = 0.95
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment and of the preconditioner."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of the linear layers' matrices."""
    precondition_frequency: int = 10
    """Updates between new eigenbases."""
    max_precondition_dim: int = 2048
    """Sides of a matrix longer than this keep the identity as their basis."""
    vector_learning_rate_scale: float = 1.0
    """Learning rate of embeddings, norms and biases as a fraction of `learning_rate`."""
    vector_b1: float = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: float = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: float = 0.0
    """Weight decay of embeddings, norms and biases."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        require_positive(
            self,
            "learning_rate",
            "eps",
            "precondition_frequency",
            "max_precondition_dim",
            "vector_learning_rate_scale",
        )
        require_fraction(self, "b1", "b2", "vector_b1", "vector_b2")
        require_not_negative(self, "weight_decay", "vector_weight_decay")


OptimizerConfig = (
    AdamWConfig | MarsConfig | MuonConfig | LionConfig | AdoptConfig | SophiaConfig | SoapConfig
)
