"""One config class for each optimizer; `train/optimizer.py` makes optax optimizers of them.

Parameters are of three kinds (`Kind`), and `rule_of(kind)` is the one place that says which update,
learning rate and decay a kind gets: the optimizer, tables and plans all ask it. Fields named
`vector_*` concern norms and biases; the docstring of a class says what embeddings get.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from maxmars.config.checks import (
    CheckedConfig,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Positive,
    Rule,
    require,
)
from maxmars.config.user_code import Source, keyword_defaults, parse_function

Kind = Literal["matrix", "embedding", "vector"]
"""Kind of a parameter: the kernel of a linear layer, an embedding, or a norm's scale or a bias."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """Update rule of an optimizer for a kind of parameter."""

    name: str
    learning_rate_scale: float | None = 1.0
    """Factor on the peak rate times the schedule. None: only the user's own function knows it."""
    weight_decay: float | None = 0.0
    """Decoupled weight decay. None: only the user's own function knows it."""
    orthogonalizes: bool = False
    """Whether the rule needs whole matrices, which a sharded parameter must be gathered for."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig(CheckedConfig):
    """How an update is applied to the parameters: constraints on norms, and weight decay. A norm is
    that of one layer's matrix."""

    hyperball: bool = False
    """Keep the norm of every matrix constant, and take steps of the learning rate times this norm
    (arXiv 2606.16899): MuonH, AdamH, SOAP-H, MARS-H. These matrices then do not decay."""
    floor: Positive[float] | None = None
    """Lengthen an update whose norm is below this times the norm of its matrix: 0.35 in
    modded-nanogpt, without decay."""
    cautious_decay: bool = False
    """Decay only the entries that the update also brings toward zero (arXiv 2510.12402)."""
    coupled_decay: bool = False
    """Multiply the decay by the schedule once more, as AdamC does (arXiv 2506.02285)."""
    kinds: tuple[Kind, ...] = ("matrix",)
    """Kinds of parameters that these options concern: matrix, embedding, vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.hyperball or self.enabled == ("hyperball",),
            "optimizer.weight_update.hyperball=True sets every norm and decays nothing; leave out "
            f"{', '.join(self.enabled[1:])}.",
        )

    @property
    def enabled(self) -> tuple[str, ...]:
        """Names of the options that are on."""
        switches = ("hyperball", "floor", "cautious_decay", "coupled_decay")
        return tuple(name for name in switches if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class DecayedConfig(CheckedConfig):
    """Base of an optimizer with one rule, which decays only the matrices of linear layers. One with
    several rules overrides `base_rule`."""

    learning_rate: Positive[float]
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay of the linear layers' matrices."""
    weight_update: WeightUpdateConfig = WeightUpdateConfig()

    def rule_of(self, kind: Kind) -> UpdateRule:
        """Update rule of a kind of parameter, with `weight_update`."""
        rule = self.base_rule(kind)
        if kind not in self.weight_update.kinds:
            return rule
        return dataclasses.replace(
            rule,
            name=" ".join([rule.name, *self.weight_update.enabled]),
            # A norm that is kept constant cannot decay.
            weight_decay=0.0 if self.weight_update.hyperball else rule.weight_decay,
        )

    def base_rule(self, kind: Kind) -> UpdateRule:
        """Update rule of a kind of parameter, without `weight_update`."""
        name = type(self).__name__.removesuffix("Config").lower()  # adamw, nadamw, lion
        return UpdateRule(name=name, weight_decay=self.weight_decay if kind == "matrix" else 0.0)


@dataclass(frozen=True, kw_only=True)
class AdamLikeConfig(DecayedConfig):
    """An optimizer with Adam's two moments."""

    b1: Fraction = 0.9
    """Decay of the first moment."""
    b2: Fraction
    """Decay of the second moment."""
    eps: Positive[float] = 1e-8
    """Epsilon, added to the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzConfig(DecayedConfig):
    """An optimizer that orthogonalises matrices."""

    learning_rate: Positive[float]
    """Peak learning rate of matrices; the schedule multiplies it."""
    decay_embeddings: bool = False
    """Decay embeddings too, by `weight_decay`."""
    embeddings: Literal["adamw", "orthogonalize"] = "adamw"
    """Rule of embeddings where matrices are orthogonalised; the official MARS-Shampoo
    orthogonalises embeddings too."""
    qkv: Literal["fused", "qkv", "heads"] = "fused"
    """Parts of the attention's input projection to orthogonalise separately: `fused` is the whole
    matrix, as in the official MARS; `qkv` queries, keys and values; `heads` every head."""
    ns_steps: Positive[int] = 5
    """Number of Newton-Schulz iterations."""
    ns_coefficients: Literal["keller", "polar_express", "cans"] = "keller"
    """Newton-Schulz coefficients; `keller` are those of the official Muon and MARS."""
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the matrices in Newton-Schulz, and on the network before and after it."""
    row_normalization: Fraction | None = None
    """Decay of an EMA of each output row's mean square; the result of Newton-Schulz is divided by
    its root, as in NorMuon (arXiv 2510.05491), whose decay is 0.95. None does not normalise."""
    own_over_data: bool = False
    """Distribute the matrices over the mesh's data axis too, not only over fsdp and tensor.
    Newton-Schulz then runs once for each matrix instead of once for each replica, and the results
    are gathered over `data`: faster where `data` is a fast network, slower between slices or
    nodes."""


Decays = Annotated[
    tuple[float, ...], Rule(lambda decays: all(0 < d < 1 for d in decays), "must lie in (0, 1)")
]


@dataclass(frozen=True, kw_only=True)
class MomentumKernelConfig(CheckedConfig):
    """A momentum of several EMAs of the gradient: gradient_weight * gradient + the sum of weights *
    EMAs, in place of the optimizer's own momentum; off without decays and preset. This momentum
    goes to Newton-Schulz, or Adam divides it by the root of the second moment. The buffer of each
    EMA takes 4 bytes a parameter."""

    preset: Literal["two_ema", "six_ema", "eight_ema", "ademamix"] | None = None
    """Kernel by name: two_ema, six_ema and eight_ema of the records of modded-nanogpt's Track 3 in
    the summer of 2026; or ademamix (arXiv 2409.03137) for AdamW, with decays 0.9 and 0.9999 and
    weights 1 and 8 unless decays and weights are given."""
    decays: Decays = ()
    """Decay of each EMA."""
    weights: tuple[float, ...] = ()
    """Weight of each EMA. The sum with gradient_weight need not be 1; it scales Adam's step."""
    gradient_weight: float = 0.0
    """Weight of the gradient itself."""
    switch_step: CountOrZero[int] | None = None
    """Last update, from 0 on, in which all EMAs of a record's kernel have the decay 0.95; None is
    the record's own: 1,000, or 750 for six_ema. The count is in the optimizer's state: it begins
    anew with a new state (`maxmars rewind --new-optimizer-state`), and neither skipped steps nor
    SOAP's first step count."""
    end_step: Count[int] | None = None
    """For six_ema and eight_ema the update, counted as for switch_step, after which the weights are
    constant; None is the record's own: 3,125 or 3,250. For ademamix, which needs it, the number of
    updates over which weight and decay of the slow EMA grow; the paper takes all of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix, preset = "optimizer.momentum_kernel", self.preset
        require(
            len(self.decays) == len(self.weights),
            f"{prefix}.weights={self.weights} must be as many as decays={self.decays}.",
        )
        steps = ("switch_step", "end_step")
        numbers = ("decays", "weights", "gradient_weight")
        # Fields that go with a preset, or with none; six_ema and eight_ema have the two steps.
        allowed = {
            None: numbers,
            "ademamix": ("decays", "weights", "end_step"),
            "two_ema": steps[:1],
        }
        for name in numbers + steps:
            value = getattr(self, name)
            require(
                not value or name in allowed.get(preset, steps),  # None, 0.0 and () are not set
                f"{prefix}.{name}={value} does not go with preset={preset}; leave one out.",
            )
        require(
            preset != "ademamix" or self.end_step is not None,
            f"{prefix}.preset=ademamix needs end_step; the paper takes the steps of the run.",
        )
        require(
            self.is_on or not self.gradient_weight,
            f"{prefix}.gradient_weight={self.gradient_weight} needs decays and weights.",
        )

    @property
    def is_on(self) -> bool:
        """Whether the kernel replaces the optimizer's own momentum."""
        return bool(self.preset or self.decays)

    def rule_name(self, rule: str) -> str:
        """Name of a rule with this momentum: "muon two_ema", "adamw 3 EMAs"."""
        if not self.is_on:
            return rule
        emas = "1 EMA" if len(self.decays) == 1 else f"{len(self.decays)} EMAs"
        return f"{rule} {self.preset or emas}"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamLikeConfig):
    """AdamW: decay on the matrices of linear layers, none on embeddings, norms and biases."""

    # As the MARS paper trains GPT-2 small.
    learning_rate: Positive[float] = 6e-4
    b2: Fraction = 0.95
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)

    def base_rule(self, kind: Kind) -> UpdateRule:
        rule = super().base_rule(kind)
        return dataclasses.replace(rule, name=self.momentum_kernel.rule_name(rule.name))


@dataclass(frozen=True, kw_only=True)
class NAdamWConfig(AdamLikeConfig):
    """NAdamW: AdamW with Nesterov momentum, by optax. A control for MARS, whose correction is
    Nesterov momentum where gamma = 1 - b1."""

    # The best of Marin's sweeps (arXiv 2509.02046) at the size nearest to GPT-2 small.
    learning_rate: Positive[float] = 8e-3
    b1: Fraction = 0.95
    b2: Fraction = 0.98
    eps: Positive[float] = 1e-10


@dataclass(frozen=True, kw_only=True)
class MarsConfig(NewtonSchulzConfig):
    """MARS (arXiv 2411.10438): variance reduction on every matrix. Embeddings count as matrices in
    the variants adamw and lion; in shampoo and m they get AdamW with vector_b1 and vector_b2."""

    # The official recipe for GPT-2 small; its rate of norms and biases is 3e-3.
    learning_rate: Positive[float] = 6e-3
    weight_decay: NotNegative[float] = 1e-2
    variant: Literal["adamw", "lion", "shampoo", "m"] = "adamw"
    """MARS-AdamW, MARS-Lion, MARS-Shampoo or MARS-M (arXiv 2510.21800)."""
    b1: Fraction = 0.95
    """Decay of the first moment."""
    b2: Fraction = 0.99
    """Decay of the second moment (variant adamw)."""
    eps: Positive[float] = 1e-8
    """Epsilon, added to the root of the second moment."""
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)
    gamma: NotNegative[float] = 0.025
    """Strength of the variance-reduction correction; 0 turns the correction off."""
    clip_threshold: Positive[float] | None = 1.0
    """Bound on the norm of each matrix's corrected gradient; None does not clip."""
    exact: bool = False
    """Correct each gradient by the gradient of the same batch at the previous parameters, not by
    the last batch's gradient. Each step then computes two gradients."""
    memory_efficient: bool = False
    """Store one buffer in place of momentum and last gradient. Needs clip_threshold=None and a
    variant other than adamw."""
    amsgrad: bool = False
    """Divide by the running maximum of the second moment (variant adamw)."""
    last_grad_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the stored last gradient; bfloat16 saves 2 bytes a parameter. None: as parameters."""
    optimize_vectors: bool = False
    """Apply MARS to norms and biases too, with the hyperparameters of the matrices and no decay."""
    vector_learning_rate_scale: Positive[float] = 0.5
    """Learning rate of norms and biases as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """Decay of the first moment of norms and biases."""
    vector_b2: Fraction = 0.95
    """Decay of the second moment of norms and biases."""
    vector_weight_decay: NotNegative[float] = 0.1
    """Weight decay of norms and biases; the official code decays LayerNorm scales by 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_efficient = self.memory_efficient
        require(
            not is_efficient or (self.variant != "adamw" and self.clip_threshold is None),
            "optimizer.memory_efficient=True needs optimizer.clip_threshold=None and a variant "
            f"other than adamw, but they are {self.clip_threshold} and {self.variant}.",
        )
        require(
            not (is_efficient and self.exact),
            "optimizer.memory_efficient=True and optimizer.exact=True exclude each other; exact "
            "MARS stores no gradient to begin with.",
        )
        require(
            not (is_efficient and self.momentum_kernel.is_on),
            "optimizer.memory_efficient=True and optimizer.momentum_kernel exclude each other.",
        )
        require(
            self.variant == "adamw" or not self.amsgrad,
            f"optimizer.amsgrad=True needs optimizer.variant=adamw, but it is {self.variant}.",
        )
        require(
            self.variant in ("shampoo", "m") or self.row_normalization is None,
            f"optimizer.row_normalization={self.row_normalization} needs optimizer.variant=shampoo "
            f"or m, but it is {self.variant}.",
        )

    def base_rule(self, kind: Kind) -> UpdateRule:
        orthogonalizes = self.variant in ("shampoo", "m")
        name = f"mars-{self.variant}" + (" rows" if self.row_normalization is not None else "")
        name = self.momentum_kernel.rule_name(name)
        if kind == "vector" and self.optimize_vectors:
            return UpdateRule(name="mars-adamw" if orthogonalizes else name)
        return _rule_beside_adamw(self, kind, name, orthogonalizes)


@dataclass(frozen=True, kw_only=True)
class MuonConfig(NewtonSchulzConfig):
    """Muon (Keller Jordan, 2024): orthogonalised Nesterov momentum on the linear layers' matrices,
    AdamW on norms, biases and, unless `embeddings` says otherwise, embeddings. `ns_scale=rms` and
    `vector_learning_rate_scale=1` make it Moonlight (arXiv 2502.16982)."""

    learning_rate: Positive[float] = 2e-2
    weight_decay: NotNegative[float] = 0.0
    momentum: Annotated[Fraction, Rule(lambda m: m > 0, "must be greater than zero")] = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)
    eps: Positive[float] = 1e-8
    """Epsilon, added to the root of AdamW's second moment."""
    vector_learning_rate_scale: Positive[float] = 0.15  # 3e-3, as for MARS
    """AdamW's learning rate as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: Fraction = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: NotNegative[float] = 0.0
    """Weight decay of norms and biases."""
    ns_scale: Literal["spectral", "rms"] = "spectral"
    """Factor after Newton-Schulz: spectral is sqrt(max(1, out/in)), rms 0.2 sqrt(max(in, out))."""

    def base_rule(self, kind: Kind) -> UpdateRule:
        name = "muon" if self.row_normalization is None else "normuon"
        name = self.momentum_kernel.rule_name(name)
        return _rule_beside_adamw(self, kind, name, orthogonalizes=True)


def _rule_beside_adamw(
    config: MarsConfig | MuonConfig, kind: Kind, name: str, orthogonalizes: bool
) -> UpdateRule:
    """The rule `name` for matrices and embeddings, and AdamW for vectors, as well as for embeddings
    where only matrices are orthogonalised."""
    decays = kind == "matrix" or config.decay_embeddings
    decay = config.weight_decay if decays else 0.0
    by_adamw = orthogonalizes and kind == "embedding" and config.embeddings == "adamw"
    if kind == "vector" or by_adamw:
        return UpdateRule(
            name="adamw",
            learning_rate_scale=config.vector_learning_rate_scale,
            weight_decay=config.vector_weight_decay if kind == "vector" else decay,
        )
    return UpdateRule(name=name, weight_decay=decay, orthogonalizes=orthogonalizes)


@dataclass(frozen=True, kw_only=True)
class LionConfig(DecayedConfig):
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum, for every parameter."""

    learning_rate: Positive[float] = 1e-4  # for GPT-2 small in the table of Sophia's repository
    weight_decay: NotNegative[float] = 1.0  # ten times AdamW's, as Lion's authors advise
    b1: Fraction = 0.95
    """Weight of the momentum in the update; the gradient has the rest."""
    b2: Fraction = 0.98
    """Decay of the momentum."""


@dataclass(frozen=True, kw_only=True)
class SoapConfig(AdamLikeConfig):
    """SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner on the linear
    layers' matrices, AdamW on embeddings, norms and biases."""

    learning_rate: Positive[float] = 3e-3
    weight_decay: NotNegative[float] = 0.01
    b1: Fraction = 0.95
    b2: Fraction = 0.95
    """Decay of the second moment and of the preconditioner."""
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)
    precondition_frequency: Count[int] = 10
    """Number of updates between new eigenbases."""
    max_precondition_dim: Positive[int] = 2048
    """Longest side of a matrix that is rotated: a longer one keeps the identity for its basis."""
    vector_learning_rate_scale: Positive[float] = 1.0
    """Learning rate of embeddings, norms and biases as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: Fraction = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: NotNegative[float] = 0.0
    """Weight decay of embeddings, norms and biases."""

    def base_rule(self, kind: Kind) -> UpdateRule:
        if kind == "matrix":
            name = self.momentum_kernel.rule_name("soap")
            return UpdateRule(name=name, weight_decay=self.weight_decay)
        return UpdateRule(
            name="adamw",
            learning_rate_scale=self.vector_learning_rate_scale,
            weight_decay=self.vector_weight_decay,
        )


@dataclass(frozen=True, kw_only=True)
class OptaxConfig(CheckedConfig):
    """Any optax optimizer, made by a function of the user's own."""

    make: Source | str
    """Function `FILE.py:NAME`, whose path is relative to the config file, or on the command line to
    the working directory; or `module:NAME` of an installed package, such as `optax.contrib:adopt`.
    The run calls `NAME(learning_rate, **options)`, which returns an optax transformation.
    `learning_rate` is that of the current step, a traced number. Parameters with one of these names
    get: `matrix_specs`, the axes of each parameter that form a matrix; `mesh`, the devices; `mask`
    or `weight_decay_mask`, True for the linear layers' matrices; `batch_tokens`, the tokens of a
    step. The function may also return a pair: the transformation, and `evaluation_params(opt_state,
    params)`, which returns the parameters to evaluate, to keep as the best and to export.
    `maxmars.optim.with_requests` gives `update` further gradients."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, JSON values. A run adds the defaults of the function's
    keyword arguments that are numbers, text, True or False; from a package also None."""
    learning_rate: Positive[float]
    """Peak learning rate; the schedule multiplies it."""

    def __post_init__(self) -> None:
        parse_function(self, "make")
        super().__post_init__()

    def with_defaults(self) -> OptaxConfig:
        """The config with the defaults of the function's keyword arguments among its options, so
        that records have them, and the command line and a search can change them."""
        # The trainer passes these; `type` is the class in config.json.
        passed = ("matrix_specs", "mesh", "mask", "weight_decay_mask", "batch_tokens", "type")
        defaults = keyword_defaults(self.source, passed)
        return dataclasses.replace(self, options=defaults | self.options)

    def rule_of(self, kind: Kind) -> UpdateRule:
        """The function's own rule: only the function knows learning rates and decay."""
        name = self.source.spec
        return UpdateRule(name=name, learning_rate_scale=None, weight_decay=None)

    @property
    def source(self) -> Source:
        """The function that `make` names."""
        assert isinstance(self.make, Source)
        return self.make


OptimizerConfig = (
    AdamWConfig | NAdamWConfig | MarsConfig | MuonConfig | LionConfig | SoapConfig | OptaxConfig
)
