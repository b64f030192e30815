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


def mars_options(details):
    """Arguments of `mars` for those of the official constructors of MARS and MARS-M."""
    arguments = dict(details["kw"])
    options = {"exact": not arguments.pop("is_approx", True)}
    if details["kind"] == "mars":
        options |= {
            "variant": arguments.pop("mars_type").removeprefix("mars-"),
            "embeddings": "orthogonalize",
            "optimize_vectors": arguments.pop("optimize_1d", False),
            "vector_learning_rate_scale": arguments.pop("lr_1d") / details["lr0"],
            "vector_weight_decay": arguments.pop("weight_decay_1d"),
        }
        options["b1"], options["b2"] = arguments.pop("betas")
        options["vector_b1"], options["vector_b2"] = arguments.pop("betas_1d")
    else:
        options |= {
            "variant": "m",
            "b1": arguments.pop("momentum"),
            "weight_decay": arguments.pop("wd"),
            "eps": arguments.pop("adamw_eps"),
        }
        options["vector_b1"], options["vector_b2"] = arguments.pop("adamw_betas")
        if details["kind"] == "mars_m_efficient":
            options |= {"memory_efficient": True, "clip_threshold": None}
    return options | arguments


def official_optimizer(details, rate, specs, ns_dtype):
    """Our optimizer for the official one of a case."""
    arguments = details["kw"]
    match details["kind"]:
        case "muon":
            return muon(rate, matrix_specs=specs, ns_dtype=ns_dtype, **arguments)
        case "moonlight":
            b1, b2 = arguments["adamw_betas"]
            return moonlight(
                rate,
                matrix_specs=specs,
                momentum=arguments["momentum"],
                weight_decay=arguments["wd"],
                eps=arguments["adamw_eps"],
                vector_b1=b1,
                vector_b2=b2,
                ns_steps=arguments["ns_steps"],
                ns_dtype=ns_dtype,
            )
        case "soap":
            return soap(
                rate,
                matrix_specs=specs,
                weight_decay=arguments["weight_decay"],
                precondition_frequency=arguments["precondition_frequency"],
                max_precondition_dim=arguments["max_precond_dim"],
            )
        case "sophia":
            b1, b2 = arguments["betas"]
            return sophia(
                rate,
                b1=b1,
                b2=b2,
                rho=arguments["rho"],
                weight_decay=arguments["weight_decay"],
                batch_tokens=details["batch_tokens"],
                update_hessian_every=details["update_hessian_every"],
            )
        case _:
            options = mars_options(details)
            return mars(rate, matrix_specs=specs, ns_dtype=ns_dtype, **options)


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
