r"""MARS: variance-reduced optimizers (arXiv 2411.10438), as the official code computes them.

MARS is a correction of the gradient, a clip of each matrix, and any preconditioned update:

    c_t = g_t + κ (g_t − last_t),   κ = γ β₁ / (1 − β₁)     `correct_gradient`
    c_t = c_t / max(1, ‖c_t‖_F)                             `clip_by_matrix_norm`
    u_t = update of c_t                                     any optax transformation

`mars_over` is the three in a chain, and `scale_by_mars` those of the variant adamw. `mars` has the
paper's updates of c_t:

    m_t = β₁ m_{t−1} + (1 − β₁) c_t
    adamw     v_t = β₂ v_{t−1} + (1 − β₂) c_t²,   u_t = (m_t / (1 − β₁ᵗ)) / (√v_t / √(1 − β₂ᵗ) + ε)
    lion      u_t = sign(m_t)
    shampoo   u_t = NS(m_t / (1 − β₁)) √max(1, out/in)
    m         u_t = NS(m_t) 0.2 √max(in, out)     (MARS-M, arXiv 2510.21800)

    p_t = p_{t−1} − η (u_t + λ p_{t−1})

`last_t` is the gradient of the step before (approximate MARS) or the gradient of this step's batch
at the previous parameters (exact MARS, passed as `prev_grads`). NS is Newton-Schulz. Vectors
(norms, biases), and in shampoo and m the embeddings, take AdamW on g_t with their own betas.

    mars(...)      makes the parts, and from them the `Rule` of each kind of parameter
      |
    by_kind        gives each parameter a spec and a kind, and each rule a chain:
      |
      +-- matrix      correct_gradient -> clip_by_matrix_norm -> m_t -> u_t -> + λ p -> × −η
      +-- embedding   like matrices; in shampoo and m, like vectors
      +-- vector      g_t -> AdamW's u_t -> + λ p -> × −η
      |
    per_matrix     resolves specs and mask from the parameters, in init and again in update

Without a clip, m_t is a momentum kernel of g_t with one EMA (`_momentum.py`), and with γ = 1 − β₁
Nesterov momentum: Muon and Moonlight are `m` with other constants.

Where this follows the official code rather than the papers' text: last_1 is 0 (the paper would give
c_1 = g_1, see `first_step`), v_t averages the square of the clipped c_t, and MARS-M clips too.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxmars.optim import _momentum
from maxmars.optim._newton_schulz import Coefficients
from maxmars.optim._orthogonalize import scale_by_orthogonalization
from maxmars.optim._requests import GradientRequest, with_requests
from maxmars.optim._rules import (
    Rule,
    Scalar,
    ScalarOrSchedule,
    Tree,
    WeightUpdate,
    by_kind,
    cast_like,
    check_choice,
    check_like_gradients,
    check_numbers,
    in_float32,
    norms,
    per_matrix,
    vector_rate,
    widened,
)

VARIANTS = ("adamw", "lion", "shampoo", "m")
EMBEDDINGS = ("adamw", "orthogonalize")
FIRST_STEPS = ("zero_last", "plain_gradient")
PREV_GRADS = GradientRequest(name="prev_grads", at="prev_params")
"""The further gradient of exact MARS."""

# --- the parts -----------------------------------------------------------------------------------


class CorrectGradientState(NamedTuple):
    """State of `correct_gradient`."""

    count: jax.Array
    """Number of updates, int32."""
    last_grad: Tree
    """Gradient of the step before, like the parameters; None in exact MARS."""


def correct_gradient(
    b1: Scalar = 0.95,
    gamma: ScalarOrSchedule = 0.025,
    *,
    exact: bool = False,
    first_step: str = "zero_last",
    last_grad_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The variance-reduced gradient c = g + κ (g − last) with κ = γ β₁ / (1 − β₁).

    Args:
      b1: β₁, the decay of the first moment that c will enter, in [0, 1).
      gamma: γ, a float or a schedule of the update count. The number 0 keeps no state.
      exact: take `last` from each call, `update(grads, state, params, prev_grads=...)`: the
        gradient of this step's batch at the previous parameters.
      first_step: what the first gradient is compared with: "zero_last", zero (the official code:
        c = (1 + κ) g), or "plain_gradient", itself (the paper: c = g).
      last_grad_dtype: dtype of the stored gradient; None keeps the parameter's.

    Raises:
      ValueError: an argument is out of range; in `update`, `prev_grads` is missing, is not a tree
        like the gradients, or is given although `exact` is not.
    """
    check_numbers("lie in [0, 1)", b1=b1)
    check_choice("first_step", first_step, FIRST_STEPS)
    if isinstance(gamma, int | float) and gamma == 0:
        # κ = 0 leaves gradients as they are, and saves a state of the parameters' size.
        identity = optax.with_extra_args_support(optax.identity())
        return identity if exact else _without_prev_grads(identity)

    def init_fn(params: Tree) -> CorrectGradientState:
        last = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=last_grad_dtype), params)
        return CorrectGradientState(jnp.zeros([], jnp.int32), None if exact else last)

    def update_fn(
        updates: Tree, state: Any, params: Tree = None, *, prev_grads: Tree = None, **extra: Any
    ) -> tuple[Tree, CorrectGradientState]:
        del params, extra
        last = prev_grads if exact else state.last_grad
        if exact and prev_grads is None:
            raise ValueError(
                "exact MARS needs the gradient of this batch at the previous parameters: call "
                "update(grads, state, params, prev_grads=...)."
            )
        if exact:
            check_like_gradients("prev_grads", prev_grads, updates)
        wide = widened(updates)  # g − last cancels most digits of a narrower dtype
        if exact or first_step == "plain_gradient":  # else the state starts at zero
            first = state.count == 0  # a caller has no previous parameters yet
            last = jax.tree.map(
                lambda g, old: jnp.where(
                    first, g if first_step == "plain_gradient" else 0, old.astype(g.dtype)
                ),
                wide,
                last,
            )
        kappa = (gamma(state.count) if callable(gamma) else gamma) * b1 / (1 - b1)
        corrected = jax.tree.map(
            lambda g, old: g + jnp.asarray(kappa, g.dtype) * (g - old.astype(g.dtype)), wide, last
        )
        new_last_grad = None if exact else cast_like(updates, state.last_grad)
        count = jnp.asarray(optax.safe_increment(state.count))
        return cast_like(corrected, updates), CorrectGradientState(count, new_last_grad)

    correction = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return correction if exact else _without_prev_grads(correction)


def _without_prev_grads(
    inner: optax.GradientTransformation, *, refuse: bool = True
) -> optax.GradientTransformationExtraArgs:
    """`inner` without the argument `prev_grads`, which is refused or else withheld from it."""
    inner = optax.with_extra_args_support(inner)

    def update_fn(
        updates: Tree, state: Any, params: Tree = None, *, prev_grads: Tree = None, **extra: Any
    ) -> tuple[Tree, Any]:
        if prev_grads is not None and refuse:
            raise ValueError(
                "prev_grads is given, but only exact MARS uses it: say exact=True, or leave it out."
            )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


class ClipByMatrixNormState(NamedTuple):
    """State of `clip_by_matrix_norm`."""

    clip_fraction: jax.Array
    """Share of the matrices (and vectors) that the last update clipped, float32."""


def clip_by_matrix_norm(
    threshold: Scalar = 1.0, matrix_specs: Any = None
) -> optax.GradientTransformationExtraArgs:
    """c / max(1, ‖c‖_F / threshold), for each matrix or vector of each stack by itself.

    Args:
      threshold: the bound on the norm, positive.
      matrix_specs: `MatrixSpec`s, see `resolve_specs`.

    Raises:
      ValueError: the threshold is not positive.
    """
    check_numbers("be positive", clip_threshold=threshold)

    def clip(c: jax.Array, n: jax.Array) -> jax.Array:
        # The divisor is the larger of the two, since the norm may be zero.
        return c * (threshold / jnp.maximum(n, threshold))

    def init_fn(params: Tree) -> ClipByMatrixNormState:
        del params
        return ClipByMatrixNormState(jnp.zeros([], jnp.float32))

    def make(specs: Tree) -> optax.GradientTransformation:
        def update_fn(
            updates: Tree, state: Any, params: Tree = None
        ) -> tuple[Tree, ClipByMatrixNormState]:
            del state, params
            wide = widened(updates)  # the square of 300 is infinite in float16
            norms_of = jax.tree.map(norms, wide, specs)
            clipped = jax.tree.map(clip, wide, norms_of)
            leaves = jax.tree.leaves(norms_of)
            num_clipped = sum(
                (jnp.sum(n > threshold, dtype=jnp.float32) for n in leaves), jnp.float32(0)
            )
            fraction = num_clipped / max(1, sum(n.size for n in leaves))  # a tree may have none
            return cast_like(clipped, updates), ClipByMatrixNormState(fraction)

        return optax.GradientTransformation(init_fn, update_fn)

    return per_matrix(make, matrix_specs)


class ScaleByAmsgradState(NamedTuple):
    """State of Adam where it is not optax's; trees like the parameters."""

    count: jax.Array
    """Number of updates, int32."""
    mu: Tree
    """First moment, or the state of the momentum that is in its place."""
    nu: Tree
    """Second moment."""
    nu_max: Tree
    """Running maximum of the second moment, before its bias correction; None without amsgrad."""


@functools.partial(jax.jit, inline=True)  # outside of jit, a power compiles anew for each count
def _root_of_correction(b2: Scalar, count: jax.Array) -> jax.Array:
    return jnp.sqrt(1 - b2**count)


def _scale_by_adam(
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    *,
    amsgrad: bool = False,
    correct_eps: bool = True,
    mu_dtype: Any = None,
    momentum: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """optax's Adam, with what optax lacks: two forms of PyTorch code, and other numerators.

    With `amsgrad` the maximum is taken before the bias correction. Without `correct_eps`, ε is
    added before it, as in the AdamW inside MARS-M and Muon. `momentum` makes the numerator.
    """
    if not amsgrad and correct_eps and momentum is None:  # with optax's state, as others expect
        return optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype)

    def init_fn(params: Tree) -> ScaleByAmsgradState:
        zeros = optax.tree.zeros_like(params, dtype=mu_dtype)
        return ScaleByAmsgradState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros if momentum is None else momentum.init(params),
            nu=optax.tree.zeros_like(params),
            nu_max=optax.tree.zeros_like(params) if amsgrad else None,
        )

    def update_fn(
        updates: Tree, state: Any, params: Tree = None
    ) -> tuple[Tree, ScaleByAmsgradState]:
        count = jnp.asarray(optax.safe_increment(state.count))
        if momentum is None:
            m_hat, mu = None, optax.tree.update_moment(updates, state.mu, b1, 1)
        else:  # a kernel corrects its own bias
            m_hat, mu = momentum.update(updates, state.mu, params)
        nu = optax.tree.update_moment(updates, state.nu, b2, 2)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else None
        correction = _root_of_correction(b2, count)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            root, factor = jnp.sqrt(v), correction.astype(v.dtype)
            return m / (root / factor + eps) if correct_eps else m * factor / (root + eps)

        if momentum is None:
            m_hat = optax.tree.bias_correction(mu, b1, count)
        directions = jax.tree.map(direction, m_hat, nu_max if amsgrad else nu)
        return directions, ScaleByAmsgradState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init_fn, update_fn)


def scale_by_adam_of(
    momentum: optax.GradientTransformation, *, b2: Scalar = 0.999, eps: Scalar = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The direction of Adam with another numerator: u / (√v̂ + ε), where `momentum` makes u from the
    gradient c, and v is the EMA of c².

    ```python
    optax.chain(
        scale_by_adam_of(momentum_kernel(**kernel_preset("ademamix", end_step=100_000))),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-3),
    )
    ```

    Args:
      momentum: any transformation, such as `momentum_kernel(decays, weights, debias=True)`.
      b2: decay of v, in [0, 1).
      eps: added to the root of v.

    Raises:
      ValueError: b2 is out of range.
    """
    check_numbers("lie in [0, 1)", b2=b2)
    return in_float32(_scale_by_adam(0.0, b2, eps, momentum=momentum))


# --- optimizers ----------------------------------------------------------------------------------


def mars_over(
    inner: optax.GradientTransformation,
    *,
    b1: Scalar = 0.95,
    gamma: ScalarOrSchedule = 0.025,
    clip_threshold: Scalar | None = 1.0,
    exact: bool = False,
    first_step: str = "zero_last",
    last_grad_dtype: Any = None,
    matrix_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """MARS over any optax transformation: correction, clip, then `inner` on the result.

    ```python
    mars_nadam = mars_over(optax.nadam(3e-3, b1=0.95), b1=0.95)
    mars_soap = mars_over(soap(3e-3), b1=0.95)
    ```

    Every parameter is corrected, vectors too. All is computed in float32 at least, whatever the
    dtypes of parameters, gradients and state.

    Args:
      inner: an optimizer, or a direction such as `optax.scale_by_adam()`.
      b1: β₁ of κ = γ β₁ / (1 − β₁); give the decay of the first moment inside `inner`.
      gamma: see `correct_gradient`.
      clip_threshold: see `clip_by_matrix_norm`; None does not clip.
      exact: see `correct_gradient`.
      first_step: see `correct_gradient`.
      last_grad_dtype: see `correct_gradient`.
      matrix_specs: `MatrixSpec`s of the clip, see `resolve_specs`.

    Raises:
      ValueError: an argument is out of range.
    """
    chain: list[optax.GradientTransformation] = [
        correct_gradient(
            b1, gamma, exact=exact, first_step=first_step, last_grad_dtype=last_grad_dtype
        )
    ]
    if clip_threshold is not None:
        chain.append(clip_by_matrix_norm(clip_threshold, matrix_specs))
    # A chain hands its arguments to all parts, and `inner` may not know `prev_grads`.
    whole = in_float32(optax.chain(*chain, _without_prev_grads(inner, refuse=False)))
    return with_requests(whole, [PREV_GRADS] if exact else [])


def scale_by_mars(
    b1: Scalar = 0.95,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-8,
    gamma: ScalarOrSchedule = 0.025,
    clip_threshold: Scalar | None = 1.0,
    mu_dtype: Any = None,
    *,
    amsgrad: bool = False,
    exact: bool = False,
    first_step: str = "zero_last",
    last_grad_dtype: Any = None,
    matrix_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The direction u of MARS-AdamW for every parameter, vectors too: Adam of the corrected and
    clipped gradient.

    Followed by the decay and the rate it is `mars(..., optimize_vectors=True)`:

    ```python
    optax.chain(
        scale_by_mars(), optax.add_decayed_weights(0.01), optax.scale_by_learning_rate(3e-3)
    )
    ```

    Its state is that of the chain, a tuple of `CorrectGradientState` (without it where gamma is the
    number 0: `optax.EmptyState`), `ClipByMatrixNormState` (absent without a clip) and
    `optax.ScaleByAdamState` (`ScaleByAmsgradState` with amsgrad).

    The arguments, and the errors, are those of `mars`.
    """
    check_numbers("lie in [0, 1)", b2=b2)
    adam = _scale_by_adam(b1, b2, eps, amsgrad=amsgrad, mu_dtype=mu_dtype)
    return mars_over(
        adam,
        b1=b1,
        gamma=gamma,
        clip_threshold=clip_threshold,
        exact=exact,
        first_step=first_step,
        last_grad_dtype=last_grad_dtype,
        matrix_specs=matrix_specs,
    )


def mars(
    learning_rate: ScalarOrSchedule,
    *,
    variant: str = "adamw",
    b1: Scalar = 0.95,
    b2: Scalar = 0.99,
    eps: Scalar = 1e-8,
    gamma: ScalarOrSchedule = 0.025,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    weight_update: WeightUpdate | None = None,
    clip_threshold: Scalar | None = 1.0,
    amsgrad: bool = False,
    exact: bool = False,
    memory_efficient: bool = False,
    momentum_kernel: optax.GradientTransformation | None = None,
    first_step: str = "zero_last",
    mu_dtype: Any = None,
    last_grad_dtype: Any = None,
    optimize_vectors: bool = False,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule | None = None,
    embeddings: str = "adamw",
    matrix_specs: Any = None,
    ns_steps: int | jax.Array = 5,
    ns_coefficients: Coefficients = "keller",
    ns_eps: Scalar | None = None,
    ns_dtype: Any = "bfloat16",
    ns_scale: str | None = "default",
    row_normalization: Scalar | None = None,
    mesh: Any = None,
    ownership_axes: tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MARS on matrices, AdamW on vectors. The defaults are the paper's, but nothing decays unasked.

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      variant: "adamw", "lion", "shampoo" or "m" (MARS-M), see the module's equations.
      b1: decay of the matrices' first moment, in [0, 1).
      b2: decay of the matrices' second moment (adamw), in [0, 1).
      eps: added to the root of the second moment; in shampoo to the norm before Newton-Schulz.
      gamma: strength of the variance reduction, a float or a schedule; 0 turns it off.
      weight_decay: decoupled decay λ, multiplied by η; a float or a schedule. The papers' runs and
        maxmars's trainer have 0.01.
      mask: which parameters decay, a tree of bools or a function from parameters to one.
      weight_update: changes of −η (u + λ p): hyperball, floor, cautious or coupled decay.
      clip_threshold: bound on the norm of each corrected gradient; None does not clip.
      amsgrad: divide by the running maximum of the second moment, in matrices and vectors (adamw).
      exact: exact MARS: call `update(grads, state, params, prev_grads=...)` with the gradient of
        the same batch at the previous parameters, clipped by its own global norm.
      memory_efficient: one buffer in place of momentum and last gradient, 4 bytes a parameter less:
        `momentum_kernel((b1,), (1 - gamma,), gamma)`. Needs clip_threshold=None, a constant gamma
        and a variant other than adamw.
      momentum_kernel: what makes the matrices' first moment m_t (in adamw, its bias corrected) of
        c_t, in place of the EMA: `maxmars.optim.momentum_kernel(...)`, in adamw with debias=True.
        b1 is then that of κ alone.
      first_step: "zero_last" (official: c_1 = (1 + κ) g_1) or "plain_gradient" (paper: c_1 = g_1).
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      last_grad_dtype: dtype of the stored gradient; bfloat16 saves 2 bytes a parameter.
      optimize_vectors: give vectors the MARS rule (in shampoo and m its adamw form) with the
        matrices' rate, betas, eps and decay (the official `optimize_1d`). Of the `vector_*`
        arguments only what AdamW's embeddings in shampoo and m use then counts.
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`; the
        papers' runs and maxmars's trainer have 0.5.
      vector_b1: decay of the vectors' first moment.
      vector_b2: decay of the vectors' second moment.
      vector_weight_decay: decay of vectors; None takes `weight_decay`. The official recipes of
        adamw, lion and shampoo, and maxmars's trainer, have 0.1, LayerNorm gains included.
      embeddings: in shampoo and m, the rule of the matrices that their `MatrixSpec` calls an
        embedding: "adamw" gives them the vectors' rule with the matrices' decay, "orthogonalize"
        the matrices' rule.
      matrix_specs: `MatrixSpec`s as a pytree prefix, or a function from parameters to one. Default:
        each 2-D leaf is a matrix [in, out].
      ns_steps: Newton-Schulz iterations.
      ns_coefficients: "keller" (official), "polar_express", "cans" or numbers, see `newton_schulz`.
      ns_eps: added to the norm before Newton-Schulz; None is `eps` in shampoo and 1e-7 in m.
      ns_dtype: dtype of the operands of Newton-Schulz and of its traffic.
      ns_scale: "spectral", "rms" or None after Newton-Schulz; "default" is that of the variant.
      row_normalization: β₂ of NorMuon after Newton-Schulz, 0.95 in its paper; None leaves it out.
        See `scale_by_orthogonalization`.
      mesh: device mesh of the parameters; `MatrixSpec.partition` then says how each is split.
      ownership_axes: mesh axes over which whole matrices are dealt out, see
        `scale_by_orthogonalization`.

    Raises:
      ValueError: an argument is out of range or does not go with another.
    """
    check_choice("variant", variant, VARIANTS)
    check_choice("embeddings", embeddings, EMBEDDINGS)
    check_numbers("lie in [0, 1)", b2=b2, vector_b1=vector_b1, vector_b2=vector_b2)
    orthogonalizes = variant in ("shampoo", "m")
    if amsgrad and variant != "adamw":
        raise ValueError(f"amsgrad=True needs variant='adamw', but it is {variant!r}.")
    if row_normalization is not None and not orthogonalizes:
        raise ValueError(
            f"row_normalization={row_normalization} needs variant='shampoo' or 'm', but it is "
            f"{variant!r}."
        )
    corrected: list[optax.GradientTransformation] = [
        correct_gradient(
            b1, gamma, exact=exact, first_step=first_step, last_grad_dtype=last_grad_dtype
        )
    ]
    if clip_threshold is not None:  # `by_kind` gives it the specs of each kind's parameters
        corrected.append(clip_by_matrix_norm(clip_threshold))
    # In Adam the kernel makes the numerator alone: v averages the square of c_t itself.
    numerator = momentum_kernel if variant == "adamw" else None
    adam = _scale_by_adam(b1, b2, eps, amsgrad=amsgrad, mu_dtype=mu_dtype, momentum=numerator)
    if memory_efficient:
        _check_memory_efficient(
            variant, b1, gamma, clip_threshold, exact, first_step, momentum_kernel
        )
        assert not callable(gamma)
        # Without a clip m_t is linear in the gradients: γ g + (1 − γ) EMA of g, see `_momentum`.
        ema = _momentum.momentum_kernel((b1,), (1 - gamma,), gamma, accumulator_dtype=mu_dtype)
        momentum = [_without_prev_grads(ema)]
    elif momentum_kernel is not None:
        momentum = [*corrected, momentum_kernel]
    else:
        ema = optax.ema(b1, debias=False, accumulator_dtype=mu_dtype)
        momentum = [*corrected, ema]
    match variant:
        case "adamw":
            matrix = [*corrected, adam]
        case "lion":
            matrix = [*momentum, optax.scale_by_sign()]
        case _:
            if ns_eps is None:
                ns_eps = eps if variant == "shampoo" else 1e-7
            if ns_scale == "default":
                ns_scale = "spectral" if variant == "shampoo" else "rms"
            orthogonalization = scale_by_orthogonalization(
                steps=ns_steps,
                coefficients=ns_coefficients,
                # NS(m / (1 - b1)) with eps beside the norm is NS(m) with eps * (1 - b1).
                eps=ns_eps * (1 - b1) if variant == "shampoo" else ns_eps,
                dtype=ns_dtype,
                scale=ns_scale,
                row_normalization=row_normalization,
                mesh=mesh,
                ownership_axes=ownership_axes,
            )
            matrix = [*momentum, orthogonalization]
    rule = Rule(matrix, weight_decay, learning_rate)
    rate = vector_rate(learning_rate, vector_learning_rate, vector_learning_rate_scale)
    # The AdamW of MARS-M's code adds ε before the bias correction.
    vector = _scale_by_adam(vector_b1, vector_b2, eps, amsgrad=amsgrad, correct_eps=variant != "m")
    if vector_weight_decay is None:
        vector_weight_decay = weight_decay
    rules = {
        "matrix": rule,
        "embedding": Rule([vector], weight_decay, rate),
        "vector": Rule([vector], vector_weight_decay, rate),
    }
    if optimize_vectors:
        rules["vector"] = rule
        if orthogonalizes:  # which a vector cannot be
            rules["vector"] = Rule([*corrected, adam], weight_decay, learning_rate)
    if not orthogonalizes or embeddings == "orthogonalize":
        rules["embedding"] = rule
    return with_requests(
        by_kind(rules, matrix_specs, mask, weight_update), [PREV_GRADS] if exact else []
    )


def _check_memory_efficient(
    variant: str,
    b1: Scalar,
    gamma: ScalarOrSchedule,
    clip_threshold: Scalar | None,
    exact: bool,
    first_step: str,
    momentum_kernel: Any,
) -> None:
    reasons = {
        "the second moment of variant='adamw' needs the corrected gradient itself": (
            variant == "adamw"
        ),
        f"clip_threshold={clip_threshold} needs the corrected gradient; set it to None": (
            clip_threshold is not None
        ),
        "exact=True stores no gradient to begin with": exact,
        "gamma must be a constant": callable(gamma),
        "it implies first_step='zero_last'": first_step != "zero_last",
        "b1 must not be zero": isinstance(b1, int | float) and b1 == 0,
        "momentum_kernel has EMAs of its own": momentum_kernel is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"memory_efficient=True is not possible here: {reason}.")


def muon(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    momentum_kernel: optax.GradientTransformation | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    weight_update: WeightUpdate | None = None,
    eps: Scalar = 1e-8,
    mu_dtype: Any = None,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule | None = 0.0,
    embeddings: str = "adamw",
    matrix_specs: Any = None,
    ns_steps: int | jax.Array = 5,
    ns_coefficients: Coefficients = "keller",
    ns_eps: Scalar | None = None,
    ns_dtype: Any = "bfloat16",
    ns_scale: str | None = "spectral",
    row_normalization: Scalar | None = None,
    mesh: Any = None,
    ownership_axes: tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon (Keller Jordan, 2024): orthogonalised momentum for matrices, AdamW for the rest.

    It is `mars` of variant "m" without a clip, with γ = 1 − momentum (Nesterov) or 0 (heavy ball),
    in the one-buffer form: 4 bytes of state a parameter. With `row_normalization=0.95` it is
    NorMuon (arXiv 2510.05491), whose code adds the eps to the norm of the average: there ns_eps is
    1e-7 / (1 − momentum). Arguments that are not listed are those of `mars`.

    Args:
      learning_rate: of the matrices.
      momentum: decay of the momentum, in (0, 1).
      nesterov: look one step ahead.
      momentum_kernel: what makes the momentum of the gradient, in place of those two:
        `maxmars.optim.momentum_kernel(...)`.
      eps: added to the root of AdamW's second moment.
      ns_eps: added to the norm of the momentum as the official code has it, a sum; None is 1e-7.
      vector_learning_rate: learning rate of vectors and embeddings; None takes the matrices', which
        is mostly too high for AdamW: orthogonalised updates take rates near 0.02.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`;
        maxmars's trainer has 0.15 by default.
      vector_weight_decay: decay of vectors; None takes `weight_decay`.

    Raises:
      ValueError: an argument is out of range or does not go with another.
    """
    check_numbers("lie in (0, 1)", momentum=momentum)
    return mars(
        learning_rate,
        variant="m",
        b1=momentum,
        # γ g + (1 − γ) EMA of g is Nesterov's momentum if γ = 1 − β, and with γ = 0 heavy ball.
        gamma=1 - momentum if nesterov and momentum_kernel is None else 0.0,
        clip_threshold=None,
        memory_efficient=momentum_kernel is None,
        momentum_kernel=momentum_kernel,
        weight_decay=weight_decay,
        mask=mask,
        weight_update=weight_update,
        eps=eps,
        mu_dtype=mu_dtype,
        vector_learning_rate=vector_learning_rate,
        vector_learning_rate_scale=vector_learning_rate_scale,
        vector_b1=vector_b1,
        vector_b2=vector_b2,
        vector_weight_decay=vector_weight_decay,
        embeddings=embeddings,
        matrix_specs=matrix_specs,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        # The official momentum is a sum, and its eps stands beside that.
        ns_eps=(1e-7 if ns_eps is None else ns_eps) * (1 - momentum),
        ns_dtype=ns_dtype,
        ns_scale=ns_scale,
        row_normalization=row_normalization,
        mesh=mesh,
        ownership_axes=ownership_axes,
    )


def moonlight(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    momentum_kernel: optax.GradientTransformation | None = None,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
    weight_update: WeightUpdate | None = None,
    eps: Scalar = 1e-8,
    mu_dtype: Any = None,
    vector_learning_rate: ScalarOrSchedule | None = None,
    vector_learning_rate_scale: Scalar | None = None,
    vector_b1: Scalar = 0.9,
    vector_b2: Scalar = 0.95,
    vector_weight_decay: ScalarOrSchedule | None = None,
    embeddings: str = "adamw",
    matrix_specs: Any = None,
    ns_steps: int | jax.Array = 5,
    ns_coefficients: Coefficients = "keller",
    ns_eps: Scalar | None = None,
    ns_dtype: Any = "bfloat16",
    ns_scale: str | None = "rms",
    row_normalization: Scalar | None = None,
    mesh: Any = None,
    ownership_axes: tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Moonlight's Muon (arXiv 2502.16982): every update has AdamW's root mean square.

    So one learning rate serves matrices and vectors, and all parameters decay alike; its authors
    give weight_decay=0.1. The arguments, and the errors, are those of `muon`.
    """
    return muon(
        learning_rate,
        momentum=momentum,
        nesterov=nesterov,
        momentum_kernel=momentum_kernel,
        weight_decay=weight_decay,
        mask=mask,
        weight_update=weight_update,
        eps=eps,
        mu_dtype=mu_dtype,
        vector_learning_rate=vector_learning_rate,
        vector_learning_rate_scale=vector_learning_rate_scale,
        vector_b1=vector_b1,
        vector_b2=vector_b2,
        vector_weight_decay=vector_weight_decay,
        embeddings=embeddings,
        matrix_specs=matrix_specs,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        ns_eps=ns_eps,
        ns_dtype=ns_dtype,
        ns_scale=ns_scale,
        row_normalization=row_normalization,
        mesh=mesh,
        ownership_axes=ownership_axes,
    )
