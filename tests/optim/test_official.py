"""The trajectories of the official PyTorch code, on the numbers of `tools/make_reference.py`."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import SOPHIA_FILE

from maxmars.optim import MatrixSpec, mars, moonlight, muon, soap

sophia = runpy.run_path(str(SOPHIA_FILE))["sophia"]
TESTS = Path(__file__).resolve().parents[1]
CASES = json.loads((TESTS / "reference" / "optimizer_reference.json").read_text())["cases"]


# Ours for the names of arguments of the official constructors.
NAMES = {
    "wd": "weight_decay",
    "adamw_eps": "eps",
    "optimize_1d": "optimize_vectors",
    "weight_decay_1d": "vector_weight_decay",
    "max_precond_dim": "max_precondition_dim",
}
PAIRS = {
    "betas": ("b1", "b2"),
    "betas_1d": ("vector_b1", "vector_b2"),
    "adamw_betas": ("vector_b1", "vector_b2"),
}


def official_optimizer(details, rate, specs, ns_dtype):
    """Our optimizer for the official one of a case."""
    kind, options = details["kind"], {}
    for name, value in details["kw"].items():
        if name in PAIRS:
            options.update(zip(PAIRS[name], value, strict=True))
        else:
            options[NAMES.get(name, name)] = value
    if kind == "sophia":
        further = {name: details[name] for name in ("batch_tokens", "update_hessian_every")}
        return sophia(rate, **options, **further)
    if kind == "soap":
        return soap(rate, matrix_specs=specs, **options)
    options |= {"matrix_specs": specs, "ns_dtype": ns_dtype}
    if kind in ("muon", "moonlight"):
        return {"muon": muon, "moonlight": moonlight}[kind](rate, **options)
    options["exact"] = not options.pop("is_approx", True)
    if kind == "mars":
        variant = options.pop("mars_type").removeprefix("mars-")
        options["vector_learning_rate_scale"] = options.pop("lr_1d") / details["lr0"]
        return mars(rate, variant=variant, embeddings="orthogonalize", **options)
    if kind == "mars_m_efficient":
        options |= {"memory_efficient": True, "clip_threshold": None}
    return mars(rate, variant="m", b1=options.pop("momentum"), **options)


def largest_difference(folder, name, dtype):
    """The largest difference between a case's parameters and ours after any of its steps."""
    with np.load(folder / "reference" / "optimizer_reference.npz") as numbers:
        arrays = dict(numbers)
    info = json.loads((folder / "reference" / "optimizer_reference.json").read_text())
    details = info["cases"][name]
    names = details.get("names", info["shapes"])

    def tree(prefix):
        """In our layout; the arrays of all steps have a leading axis."""
        given = {n: (arrays[f"{prefix}/{n}"], len(info["shapes"][n])) for n in names}
        return {
            n: jnp.asarray(x.swapaxes(-1, -2) if ndim == 2 else x, dtype)
            for n, (x, ndim) in given.items()
        }

    specs = {
        n: MatrixSpec(rows=(0,), cols=(1,), embedding=n == "embedding")
        if len(info["shapes"][n]) == 2
        else None
        for n in names
    }
    rates = jnp.asarray(arrays["lr"])
    tx = official_optimizer(details, lambda count: rates[count], specs, details.get("ns", dtype))
    further = {}
    if details["kw"].get("is_approx") is False:
        further["prev_grads"] = tree("prev_grads")
    if details["kind"] == "sophia":
        further["sampled_grads"] = tree("prev_grads")

    def step(carry, inputs):
        params, state = carry
        grads, extra = inputs
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    @jax.jit
    def trajectory(params, inputs):
        return jax.lax.scan(step, (params, tx.init(params)), inputs)[1]

    ours = trajectory(tree("params0"), (tree("grads"), further))
    kept = np.array(info.get("kept_steps", range(1, info["steps"] + 1))) - 1
    return max(float(np.abs(ours[n][kept] - theirs).max()) for n, theirs in tree(name).items())


# The eigenvectors that stand in for LAPACK's in SOAP stop at 1e-7, and bfloat16 has 8 bits of
# mantissa in each of the 15 products of Newton-Schulz.
IN_FLOAT64 = [
    (case, "float64", 1e-9 if case == "soap" else 1e-12)
    for case in CASES
    if "ns" not in CASES[case]
]
IN_FLOAT32 = [
    ("mars_adamw", "float32", 5e-6),
    ("mars_m_exact", "float32", 5e-6),
    ("mars_shampoo_bf16", "float32", 1e-2),
]


@pytest.mark.parametrize(("case", "dtype", "atol"), [*IN_FLOAT64, *IN_FLOAT32])
def test_official_trajectory(case, dtype, atol):
    with jax.enable_x64(dtype == "float64"):
        assert largest_difference(TESTS, case, dtype) <= atol


@pytest.mark.parametrize(
    ("case", "dtype", "atol"),
    [each for each in [*IN_FLOAT64, *IN_FLOAT32] if each[0].startswith("mars")],
)
def test_official_trajectory_of_larger_parameters(reference_dir, case, dtype, atol):
    with jax.enable_x64(dtype == "float64"):
        assert largest_difference(reference_dir, case, dtype) <= atol
