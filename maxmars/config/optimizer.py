"""One config class for each optimizer; `train/optimizer.py` makes optax optimizers of them.

What each does with a kind of parameter its `rule_of` says: the update, tables and plans follow it.
Fields named `vector_*` concern norms and biases; embeddings follow the class's docstring.
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
from maxmars.config.user_code import Source, keyword_defaults, with_tuples

Kind = Literal["matrix", "embedding", "vector"]
"""What a parameter is: the kernel of a linear layer, an embedding, or a norm's scale or a bias."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What an optimizer does with a kind of parameter."""

    name: str
    learning_rate_scale: float | None = 1.0
    """The learning rate, as a multiple of the peak rate times the schedule. None: only the user's
    own function knows."""
    weight_decay: float | None = 0.0
    """Decoupled weight decay. None: only the user's own function knows."""
    orthogonalizes: bool = False
    """Whether it needs whole matrices."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdateConfig(CheckedConfig):
    """How a direction becomes new parameters: which norms it keeps, what decays. Norms are those of
    each layer's matrix by itself."""

    hyperball: bool = False
    """Keep the norm of every matrix, and take steps of the learning rate times it (arXiv
    2606.16899): MuonH, AdamH, SOAP-H, MARS-H. These matrices then do not decay."""
    floor: Positive[float] | None = None
    """Lengthen a direction that is shorter than this times its matrix: 0.35 in modded-nanogpt,
    without decay."""
    cautious_decay: bool = False
    """Decay only what the direction shortens too (arXiv 2510.12402)."""
    coupled_decay: bool = False
    """Multiply the decay by the schedule once more, as AdamC does (arXiv 2506.02285)."""
    kinds: tuple[Kind, ...] = ("matrix",)
    """Which parameters this concerns: matrix, embedding, vector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.hyperball or self.names == ("hyperball",),
            "optimizer.weight_update.hyperball=True sets every norm and decays nothing; leave out "
            f"{', '.join(self.names[1:])}.",
        )

    @property
    def names(self) -> tuple[str, ...]:
        """What is on."""
        switches = ("hyperball", "floor", "cautious_decay", "coupled_decay")
        return tuple(name for name in switches if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class DecayedConfig(CheckedConfig):
    """An optimizer with one rule, which decays the matrices of linear layers alone; those that have
    several rules override `own_rule_of`."""

    learning_rate: Positive[float]
    """Peak learning rate; the schedule multiplies it."""
    weight_decay: NotNegative[float] = 0.1
    """Decoupled weight decay of the linear layers' matrices."""
    weight_update: WeightUpdateConfig = WeightUpdateConfig()

    def rule_of(self, kind: Kind) -> UpdateRule:
        """What it does with a kind of parameter."""
        rule = self.own_rule_of(kind)
        if kind not in self.weight_update.kinds:
            return rule
        return dataclasses.replace(
            rule,
            name=" ".join([rule.name, *self.weight_update.names]),
            weight_decay=0.0 if self.weight_update.hyperball else rule.weight_decay,
        )

    def own_rule_of(self, kind: Kind) -> UpdateRule:
        """The rule, `weight_update` aside."""
        name = type(self).__name__.removesuffix("Config").lower()
        return UpdateRule(name=name, weight_decay=self.weight_decay if kind == "matrix" else 0.0)


@dataclass(frozen=True, kw_only=True)
class AdamLikeConfig(DecayedConfig):
    """An optimizer with Adam's two moments."""

    b1: Fraction = 0.9
    """Decay of the first moment."""
    b2: Fraction
    """Decay of the second moment."""
    eps: Positive[float] = 1e-8
    """Added to the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class NewtonSchulzConfig(DecayedConfig):
    """An optimizer that orthogonalises matrices."""

    learning_rate: Positive[float]
    """Peak learning rate of matrices; the schedule multiplies it."""
    decay_embeddings: bool = False
    """Decay embeddings too, by `weight_decay`."""
    embeddings: Literal["adamw", "orthogonalize"] = "adamw"
    """Rule of the embeddings, where matrices are orthogonalised; the official MARS-Shampoo
    orthogonalises them."""
    qkv: Literal["fused", "qkv", "heads"] = "fused"
    """Which parts of the attention's input projection are orthogonalised separately: none, so the
    whole matrix at once (as the official MARS does), queries, keys and values, or every head."""
    ns_steps: Positive[int] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Literal["keller", "polar_express", "cans"] = "keller"
    """Newton-Schulz coefficients; keller's are those of the official Muon and MARS."""
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the operands of Newton-Schulz and of its traffic."""
    row_normalization: Fraction | None = None
    """Divide each output row of what Newton-Schulz returns by the root of its moving mean square:
    NorMuon (arXiv 2510.05491), whose decay of that average is 0.95. None does not."""
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
    EMAs, in place of the optimizer's own momentum; off without decays and preset. Newton-Schulz
    gets it, or Adam divides it by the root of its second moment. The buffer of each EMA takes 4
    bytes a parameter."""

    preset: Literal["two_ema", "six_ema", "eight_ema", "ademamix"] | None = None
    """Kernels of the records of modded-nanogpt's Track 3 in the summer of 2026, or that of AdEMAMix
    (arXiv 2409.03137) for AdamW, whose decays are 0.9 and 0.9999 and whose weights 1 and 8 if none
    are given."""
    decays: Decays = ()
    """Decay of each EMA."""
    weights: tuple[float, ...] = ()
    """Weight of each EMA. The sum with gradient_weight need not be 1; where Adam divides, it scales
    the step."""
    gradient_weight: float = 0.0
    """Weight of the gradient itself."""
    switch_step: CountOrZero[int] | None = None
    """Last update, counted from 0, in which the EMAs of a record all have the decay 0.95; None is
    the record's: 1,000, or 750 for six_ema. Updates are those of the optimizer's state: they begin
    anew with a new state (`maxmars rewind --new-optimizer-state`), a skipped step is none, nor is
    the first of SOAP."""
    end_step: Count[int] | None = None
    """Update, counted as for switch_step, at which the weights of six_ema and eight_ema stop
    moving; None is the record's: 3,125 or 3,250. Of ademamix the number of updates over which
    weight and decay of the slow EMA grow, which it needs; the paper takes the steps of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        here, preset = "optimizer.momentum_kernel", self.preset
        require(
            len(self.decays) == len(self.weights),
            f"{here}.weights={self.weights} must be as many as decays={self.decays}.",
        )
        steps = ("switch_step", "end_step")
        numbers = ("decays", "weights", "gradient_weight")
        taken = {None: numbers, "ademamix": ("decays", "weights", "end_step"), "two_ema": steps[:1]}
        for name in numbers + steps:
            value = getattr(self, name)
            require(
                not value or name in taken.get(preset, steps),
                f"{here}.{name}={value} does not go with preset={preset}; leave one out.",
            )
        require(
            preset != "ademamix" or self.end_step is not None,
            f"{here}.preset=ademamix needs end_step; the paper takes the steps of the run.",
        )
        require(
            self.is_on or not self.gradient_weight,
            f"{here}.gradient_weight={self.gradient_weight} needs decays and weights.",
        )

    @property
    def is_on(self) -> bool:
        """Whether it takes the place of the optimizer's own momentum."""
        return bool(self.preset or self.decays)

    def added_to(self, rule: str) -> str:
        """The name of a rule that has it for its momentum: "muon two_ema", "adamw 3 EMAs"."""
        if not self.is_on:
            return rule
        emas = "1 EMA" if len(self.decays) == 1 else f"{len(self.decays)} EMAs"
        return f"{rule} {self.preset or emas}"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamLikeConfig):
    """AdamW: decay on the matrices of linear layers, none on embeddings, norms and biases."""

    learning_rate: Positive[float] = 6e-4
    b2: Fraction = 0.95
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)

    def own_rule_of(self, kind: Kind) -> UpdateRule:
        """The rule, `weight_update` aside."""
        rule = super().own_rule_of(kind)
        return dataclasses.replace(rule, name=self.momentum_kernel.added_to(rule.name))


@dataclass(frozen=True, kw_only=True)
class NAdamWConfig(AdamLikeConfig):
    """NAdamW: AdamW with Nesterov momentum (optax's). It is a control for MARS, whose correction is
    Nesterov momentum where gamma = 1 - b1."""

    learning_rate: Positive[float] = 8e-3
    b1: Fraction = 0.95
    b2: Fraction = 0.98
    eps: Positive[float] = 1e-10


@dataclass(frozen=True, kw_only=True)
class MarsConfig(NewtonSchulzConfig):
    """MARS (arXiv 2411.10438): variance reduction on every matrix. Embeddings are matrices in the
    variants adamw and lion, and AdamW's (with the vectors' betas) in shampoo and m."""

    learning_rate: Positive[float] = 6e-3
    weight_decay: NotNegative[float] = 1e-2
    variant: Literal["adamw", "lion", "shampoo", "m"] = "adamw"
    """MARS-AdamW, MARS-Lion, MARS-Shampoo or MARS-M (arXiv 2510.21800)."""
    b1: Fraction = 0.95
    """Decay of the first moment."""
    b2: Fraction = 0.99
    """Decay of the second moment (variant adamw)."""
    eps: Positive[float] = 1e-8
    """Added to the root of the second moment."""
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)
    gamma: NotNegative[float] = 0.025
    """Strength of the variance-reduction correction; 0 turns it off."""
    clip_threshold: Positive[float] | None = 1.0
    """Bound on the norm of each matrix's corrected gradient; None does not clip."""
    exact: bool = False
    """Compare each gradient with the gradient of the same batch at the previous parameters. Each
    step then computes two gradients."""
    memory_efficient: bool = False
    """Keep one buffer in place of momentum and last gradient. Needs clip_threshold None and a
    variant other than adamw."""
    amsgrad: bool = False
    """Divide by the running maximum of the second moment (variant adamw)."""
    last_grad_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the stored gradient; bfloat16 saves 2 bytes a parameter. None stores it in the type
    of the parameters."""
    optimize_vectors: bool = False
    """Give norms and biases the MARS rule too, with the matrices' hyperparameters and no decay."""
    vector_learning_rate_scale: Positive[float] = 0.5
    """Learning rate of norms and biases as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """Decay of the first moment of norms and biases."""
    vector_b2: Fraction = 0.95
    """Decay of the second moment of norms and biases."""
    vector_weight_decay: NotNegative[float] = 0.1
    """Weight decay of norms and biases. The official code decays LayerNorm gains by 0.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
            not (efficient and self.momentum_kernel.is_on),
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

    def own_rule_of(self, kind: Kind) -> UpdateRule:
        """The rule, `weight_update` aside."""
        orthogonalizes = self.variant in ("shampoo", "m")
        name = f"mars-{self.variant}" + (" rows" if self.row_normalization is not None else "")
        name = self.momentum_kernel.added_to(name)
        if kind == "vector" and self.optimize_vectors:
            return UpdateRule(name="mars-adamw" if orthogonalizes else name)
        return _rule_beside_adamw(self, kind, name, orthogonalizes)


@dataclass(frozen=True, kw_only=True)
class MuonConfig(NewtonSchulzConfig):
    """Muon (Keller Jordan, 2024): orthogonalised Nesterov momentum on the linear layers' matrices,
    AdamW on norms, biases and, unless `embeddings` says otherwise, embeddings. With `ns_scale=rms`
    and one rate for all it is Moonlight (arXiv 2502.16982); with `row_normalization=0.95`,
    NorMuon."""

    learning_rate: Positive[float] = 2e-2
    weight_decay: NotNegative[float] = 0.0
    momentum: Annotated[Fraction, Rule(lambda m: m > 0, "must be greater than zero")] = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Look one step ahead."""
    momentum_kernel: MomentumKernelConfig = field(default_factory=MomentumKernelConfig)
    eps: Positive[float] = 1e-8
    """Added to the root of AdamW's second moment."""
    vector_learning_rate_scale: Positive[float] = 0.15
    """AdamW's learning rate as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: Fraction = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: NotNegative[float] = 0.0
    """Weight decay of norms and biases."""
    ns_scale: Literal["spectral", "rms"] = "spectral"
    """Factor after Newton-Schulz: sqrt(max(1, out/in)) or 0.2 sqrt(max(in, out))."""

    def own_rule_of(self, kind: Kind) -> UpdateRule:
        """The rule, `weight_update` aside."""
        name = "muon" if self.row_normalization is None else "normuon"
        name = self.momentum_kernel.added_to(name)
        return _rule_beside_adamw(self, kind, name, orthogonalizes=True)


def _rule_beside_adamw(
    config: MarsConfig | MuonConfig, kind: Kind, name: str, orthogonalizes: bool
) -> UpdateRule:
    """The rule `name` of matrices and embeddings, but AdamW's of vectors, and of embeddings where
    only the matrices are orthogonalised."""
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

    learning_rate: Positive[float] = 1e-4
    weight_decay: NotNegative[float] = 1.0
    b1: Fraction = 0.95
    """Share of the momentum in the update."""
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
    """Updates between new eigenbases."""
    max_precondition_dim: Positive[int] = 2048
    """A side of a matrix longer than this is not rotated: its basis stays the identity."""
    vector_learning_rate_scale: Positive[float] = 1.0
    """Learning rate of embeddings, norms and biases as a fraction of `learning_rate`."""
    vector_b1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    vector_b2: Fraction = 0.95
    """AdamW's decay of the second moment."""
    vector_weight_decay: NotNegative[float] = 0.0
    """Weight decay of embeddings, norms and biases."""

    def own_rule_of(self, kind: Kind) -> UpdateRule:
        """The rule, `weight_update` aside."""
        if kind == "matrix":
            name = self.momentum_kernel.added_to("soap")
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
    """`FILE.py:NAME`, relative to the config file, or to where it is typed; or `module:NAME` of an
    installed package, as `optax.contrib:adopt`. It is called as `make(learning_rate, **options)`
    and returns an optax transformation. `learning_rate` is the rate of the present step, a traced
    number. A function with such parameters also gets `matrix_specs`, which say what axes of a
    parameter form a matrix, `mesh`, the devices, `mask` or `weight_decay_mask`, which say that the
    linear layers' matrices decay, and `batch_tokens`, the tokens of a step. It may also return a
    pair: the transformation, and `evaluation_params(opt_state, params)`, which names the parameters
    that are evaluated, kept as the best and exported. Further gradients its `update` gets by
    `maxmars.optim.with_requests`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, JSON values. A run adds the function's own defaults, as
    far as its file writes them as numbers, text, True or False; those of a package may be None."""
    learning_rate: Positive[float]
    """Peak learning rate; the schedule multiplies it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", Source.parse(self.make))
        super().__post_init__()
        options = with_tuples(self.options, "OptaxConfig.options")
        object.__setattr__(self, "options", options)

    def with_defaults(self) -> OptaxConfig:
        """The config whose options have the defaults of the function's keyword arguments too, so
        that they are recorded, changed by the command line and tuned."""
        given = ("matrix_specs", "mesh", "mask", "weight_decay_mask", "batch_tokens", "type")
        defaults = keyword_defaults(self.source, given)
        return dataclasses.replace(self, options=defaults | self.options)

    def rule_of(self, kind: Kind) -> UpdateRule:
        """Its own one; what decays how, only the function knows."""
        name = self.source.written
        return UpdateRule(name=name, learning_rate_scale=None, weight_decay=None)

    @property
    def source(self) -> Source:
        """The function that `make` names."""
        assert isinstance(self.make, Source)
        return self.make


OptimizerConfig = (
    AdamWConfig | NAdamWConfig | MarsConfig | MuonConfig | LionConfig | SoapConfig | OptaxConfig
)
