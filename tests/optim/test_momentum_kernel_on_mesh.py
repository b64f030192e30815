"""Momentum kernels on meshes: the numbers of one device, and no transfers of their own."""

import re

import jax
import numpy as np
import pytest
from gpt2_matrices import PARTITIONS, make_mesh, shapes, specs
from jax.sharding import NamedSharding

from maxmars.optim import kernel_preset, mars, momentum_kernel, muon, soap

SHAPES = shapes(layers=4, embed=16, heads=4)
CONSTANTS = {"decays": (0.85, 0.98), "weights": (0.5, 0.4), "gradient_weight": 0.1}
# Only sides of which a gradient has the whole space: else rounding decides on the bases.
SOAP = {"eps": 1e-2, "precondition_frequency": 2, "max_precondition_dim": 16}
CASES = {
    "muon": (muon, {"ns_dtype": "float64"}, kernel_preset("eight_ema", switch_step=1, end_step=4)),
    "mars": (mars, {}, CONSTANTS | {"debias": True}),
    "soap": (soap, SOAP, CONSTANTS | {"debias": True}),
}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


def put(tree, mesh):
    if mesh is None:
        return tree
    return jax.device_put(tree, {name: NamedSharding(mesh, PARTITIONS[name]) for name in tree})


def optimizer(name, mesh, kernel):
    make, options, arguments = CASES[name]
    given = {"momentum_kernel": momentum_kernel(**arguments)} if kernel else {}
    return make(0.1, matrix_specs=specs(), mesh=mesh, **options, **given)


def run(name, mesh, steps=4):
    tx, params = optimizer(name, mesh, kernel=True), put(random_tree(0), mesh)
    state, update, results = tx.init(params), jax.jit(tx.update), []
    for step in range(1, steps + 1):
        updates, state = update(put(random_tree(step), mesh), state, params)
        results.append(jax.device_get(updates))
    return results, state


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["muon", "mars", pytest.param("soap", marks=pytest.mark.slow)])
def test_a_mesh_changes_nothing(x64, name):
    expected, _ = run(name, None)
    for shape in [(1, 8, 1), (2, 2, 2), (1, 4, 2)]:
        mesh = make_mesh(shape)
        found, state = run(name, mesh)
        for a, b in zip(found, expected, strict=True):
            for key in SHAPES:
                np.testing.assert_allclose(a[key], b[key], rtol=0, atol=1e-12)
        emas = 0
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            names = [getattr(key, "name", None) for key in path]
            if {"ema", "other_emas"} & set(names):
                wanted = NamedSharding(mesh, PARTITIONS[path[-1].key])
                assert x.sharding.is_equivalent_to(wanted, x.ndim)
                emas += 1
        assert emas == len(SHAPES) * len(CASES[name][2]["decays"])


@pytest.mark.parametrize("name", ["muon", "mars"])
def test_it_transfers_nothing(x64, name):
    mesh = make_mesh((1, 4, 2))
    params = put(random_tree(0), mesh)

    def collectives(kernel):
        tx = optimizer(name, mesh, kernel)
        text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
        kinds = r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
        return sorted(re.findall(rf"{kinds}(?:-start)?\(", text))

    assert collectives(kernel=True) == collectives(kernel=False) != []
