r"""MARS: variance-reduced optimizers (arXiv 2411.10438), as the official code computes them.

One step of a matrix, with gradient g_t (after any global-norm clip) and κ = γ β₁ / (1 − β₁):

    c_t = g_t + κ (g_t − last_t)         variance-reduced gradient
    c_t = c_t / max(1, ‖c_t‖_F)          clip of each matrix by itself, layer by layer
    m_t = β₁ m_{t−1} + (1 − β₁) c_t

    adamw     v_t = β₂ v_{t−1} + (1 − β₂) c_t²,   u_t = (m_t / (1 − β₁ᵗ)) / (√v_t / √(1 − β₂ᵗ) + ε)
    lion      u_t = sign(m_t)
    shampoo   u_t = NS(m_t / (1 − β₁)) √max(1, out/in)
    m         u_t = NS(m_t) 0.2 √max(in, out)     (MARS-M, arXiv 2510.21800)

    p_t = p_{t−1} − η (u_t + λ p_{t−1})

`last_t` is the gradient of the step before (approximate MARS) or the gradient of this step's batch
at the previous parameters (exact MARS, passed as `prev_grads`). NS is Newton-Schulz. Vectors
(norms, biases), and in shampoo and m the embeddings, take AdamW on g_t with their own betas.

With γ = 1 − β₁ and no clip, m_t is Nesterov momentum: Muon and Moonlight are `m` with other
constants.

Where this follows the official code rather than the papers' text: last_1 is 0 (the paper would give
c_1 = g_1, see `first_step`), v_t averages the square of the clipped c_t, and MARS-M clips too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import optax

from maxmars.optim.newton_schulz import Coefficients
from maxmars.optim.rules import (
    Scalar,
    ScalarOrSchedule,
    by_kind,
    check_choice,
    check_fraction,
    stepped,
    vector_rate,
)
from maxmars.optim.scale_by_mars import scale_by_mars

EMBEDDINGS = ("adamw", "orthogonalize")


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
    clip_threshold: Scalar | None = 1.0,
    amsgrad: bool = False,
    exact: bool = False,
    memory_efficient: bool = False,
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
    ns_steps: int = 5,
    ns_coefficients: Coefficients = "keller",
    ns_eps: Scalar | None = None,
    ns_dtype: Any = "bfloat16",
    ns_scale: str | None = "default",
    orthogonality_every: int | None = None,
    mesh: Any = None,
    ownership_axes: tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MARS on matrices, AdamW on vectors. The defaults are the paper's.

    Args:
      learning_rate: η of the matrices, a float, a traced scalar or a schedule.
      variant: "adamw", "lion", "shampoo" or "m" (MARS-M), see the module's equations.
      b1: decay of the matrices' first moment.
      b2: decay of the matrices' second moment (adamw).
      eps: added to the root of the second moment; in shampoo to the norm before Newton-Schulz.
      gamma: strength of the variance reduction, a float or a schedule; 0 turns it off.
      weight_decay: decoupled decay λ of the matrices, multiplied by η; a float or a schedule.
      mask: which parameters decay, a tree of bools or a function from parameters to one; it applies
        to matrices and embeddings, and with `optimize_vectors` to vectors.
      clip_threshold: bound on the norm of each corrected gradient; None does not clip.
      amsgrad: divide by the running maximum of the second moment, in matrices and vectors (adamw).
      exact: exact MARS: call `update(grads, state, params, prev_grads=...)` with the gradient of
        the same batch at the previous parameters, clipped by its own global norm.
      memory_efficient: one buffer in place of momentum and last gradient, 4 bytes a parameter less.
        Needs clip_threshold=None, a constant gamma and a variant other than adamw.
      first_step: "zero_last" (official: c_1 = (1 + κ) g_1) or "plain_gradient" (paper: c_1 = g_1).
      mu_dtype: dtype of the matrices' first moment; None keeps the parameter's.
      last_grad_dtype: dtype of the stored gradient; bfloat16 saves 2 bytes a parameter.
      optimize_vectors: give vectors the MARS rule (in shampoo and m its adamw form) with the
        matrices' rate, betas, eps and decay; the `vector_*` arguments are then ignored (the
        official `optimize_1d`).
      vector_learning_rate: learning rate of vectors; None takes the matrices'.
      vector_learning_rate_scale: instead, their learning rate as a multiple of `learning_rate`.
      vector_b1: decay of the vectors' first moment.
      vector_b2: decay of the vectors' second moment.
      vector_weight_decay: decay of all vectors. None is the official value: 0.1, LayerNorm gains
        included, and in m `weight_decay`.
      embeddings: in shampoo and m, the rule of the matrices that their `MatrixSpec` calls an
        embedding: "adamw" gives them the vectors' rule with the matrices' decay and mask.
      matrix_specs: `MatrixSpec`s as a pytree prefix. Default: each 2-D leaf is a matrix [in, out].
      ns_steps: Newton-Schulz iterations.
      ns_coefficients: "keller" (official), "polar_express", "cans" or numbers, see `newton_schulz`.
      ns_eps: added to the norm before Newton-Schulz; None is `eps` in shampoo and 1e-7 in m.
      ns_dtype: dtype of the operands of Newton-Schulz and of its traffic.
      ns_scale: "spectral", "rms" or None after Newton-Schulz; "default" is that of the variant.
      orthogonality_every: in shampoo and m, measure how orthogonal the result is in the first of so
        many updates, into the state's `orthogonality_error`; None never does.
      mesh: device mesh of the parameters; `MatrixSpec.partition` then says how each is split.
      ownership_axes: mesh axes over which whole matrices are dealt out, see
        `plan_orthogonalization`.

    Raises:
      ValueError: an argument is out of range or does not go with another.
    """
    check_choice("embeddings", embeddings, EMBEDDINGS)
    rate_of_vectors = vector_rate(learning_rate, vector_learning_rate, vector_learning_rate_scale)
    check_fraction("vector_b1", vector_b1)
    check_fraction("vector_b2", vector_b2)
    shared = {
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "gamma": gamma,
        "clip_threshold": clip_threshold,
        "exact": exact,
        "first_step": first_step,
        "mu_dtype": mu_dtype,
        "last_grad_dtype": last_grad_dtype,
        "matrix_specs": matrix_specs,
    }
    matrix_direction = scale_by_mars(
        variant=variant,
        amsgrad=amsgrad,
        memory_efficient=memory_efficient,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        ns_eps=ns_eps,
        ns_dtype=ns_dtype,
        ns_scale=ns_scale,
        orthogonality_every=orthogonality_every,
        mesh=mesh,
        ownership_axes=ownership_axes,
        **shared,
    )
    adam = _adam(
        b1=vector_b1,
        b2=vector_b2,
        eps=eps,
        amsgrad=amsgrad,
        correct_eps=variant != "m",
        matrix_specs=matrix_specs,
    )
    if vector_weight_decay is None:
        vector_weight_decay = weight_decay if variant == "m" else 0.1
    rules = {
        "matrix": stepped(matrix_direction, weight_decay, mask, learning_rate),
        "embedding": stepped(adam, weight_decay, mask, rate_of_vectors),
        "vector": stepped(adam, vector_weight_decay, None, rate_of_vectors),
    }
    orthogonalizes = variant in ("shampoo", "m")
    if optimize_vectors:
        direction = scale_by_mars(**shared) if orthogonalizes else matrix_direction
        rules["vector"] = stepped(direction, weight_decay, mask, learning_rate)
    if not orthogonalizes or embeddings == "orthogonalize":
        rules["embedding"] = rules["matrix"]
    return by_kind(rules, matrix_specs)


def _with_options_of(source: Callable, *fixed: str) -> Callable[[Callable], Callable]:
    """Name the options in the signature, where `optax.inject_hyperparams` looks for them."""

    def decorate(function: Any) -> Any:
        named = dict(inspect.signature(function).parameters)
        del named["options"]
        more = inspect.signature(source).parameters
        named |= {name: more[name] for name in more if name not in {*named, *fixed, "options"}}
        function.__signature__ = inspect.Signature(list(named.values()))
        return function

    return decorate


@_with_options_of(mars, "variant", "b1", "gamma", "clip_threshold", "memory_efficient")
def muon(
    learning_rate: ScalarOrSchedule,
    *,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    ns_scale: str | None = "spectral",
    vector_weight_decay: ScalarOrSchedule | None = 0.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Muon (Keller Jordan, 2024): orthogonalised momentum for matrices, AdamW for the rest.

    It is `mars` of variant "m" without a clip, with γ = 1 − momentum (Nesterov) or 0 (heavy ball),
    in the one-buffer form: 4 bytes of state a parameter.

    Args:
      learning_rate: of the matrices.
      momentum: decay of the momentum.
      nesterov: look one step ahead.
      ns_scale: factor after Newton-Schulz.
      vector_weight_decay: decay of vectors; None is `weight_decay`.
      **options: any other of `mars`, such as `vector_learning_rate` and `matrix_specs`.
    """
    return mars(
        learning_rate,
        variant="m",
        b1=momentum,
        gamma=1 - momentum if nesterov else 0.0,
        clip_threshold=None,
        memory_efficient=True,
        ns_scale=ns_scale,
        vector_weight_decay=vector_weight_decay,
        **options,
    )


@_with_options_of(muon)
def moonlight(
    learning_rate: ScalarOrSchedule,
    *,
    weight_decay: ScalarOrSchedule = 0.1,
    ns_scale: str | None = "rms",
    vector_weight_decay: ScalarOrSchedule | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Moonlight's Muon (arXiv 2502.16982): every update has AdamW's RMS, so one rate serves all.

    Args:
      learning_rate: of all parameters.
      weight_decay: decay of all parameters (see `mask`).
      ns_scale: factor after Newton-Schulz.
      vector_weight_decay: decay of vectors; None is `weight_decay`.
      **options: any other of `muon`.
    """
    return muon(
        learning_rate,
        weight_decay=weight_decay,
        ns_scale=ns_scale,
        vector_weight_decay=vector_weight_decay,
        **options,
    )


def _adam(**options: Any) -> optax.GradientTransformationExtraArgs:
    """Adam, with the official code's amsgrad: the maximum is taken before the bias correction."""
    return scale_by_mars(gamma=0.0, clip_threshold=None, **options)
