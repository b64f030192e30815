"""Momentum kernels on meshes: the numbers of one device, and no transfers of their own."""

import re

import jax
import pytest
from gpt2_matrices import PARTITIONS, make_mesh, shapes, specs
from jax.sharding import NamedSharding
from trees import assert_close, compiled_update, put, random_tree, take_steps

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


def draw(seed, mesh):
    return put(random_tree(seed, SHAPES, dtype="float64"), mesh, PARTITIONS)


def optimizer(name, mesh, kernel):
    make, options, arguments = CASES[name]
    given = {"momentum_kernel": momentum_kernel(**arguments)} if kernel else {}
    return make(0.1, matrix_specs=specs(), mesh=mesh, **options, **given)


def run(name, mesh):
    params, *gradients = (draw(seed, mesh) for seed in range(5))
    return take_steps(optimizer(name, mesh, kernel=True), params, gradients)


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["muon", "mars", pytest.param("soap", marks=pytest.mark.slow)])
def test_a_mesh_changes_nothing(x64, name):
    expected = run(name, None)
    for shape in [(1, 8, 1), (2, 2, 2), (1, 4, 2)]:
        mesh = make_mesh(shape)
        found = run(name, mesh)
        assert_close(jax.device_get(found.updates), expected.updates, atol=1e-12)
        emas = 0
        for path, x in jax.tree_util.tree_leaves_with_path(found.state):
            names = [getattr(key, "name", None) for key in path]
            if {"ema", "other_emas"} & set(names):
                wanted = NamedSharding(mesh, PARTITIONS[path[-1].key])
                assert x.sharding.is_equivalent_to(wanted, x.ndim)
                emas += 1
        assert emas == len(SHAPES) * len(CASES[name][2]["decays"])


@pytest.mark.parametrize("name", ["muon", "mars"])
def test_it_transfers_nothing(x64, name):
    mesh = make_mesh((1, 4, 2))
    params = draw(0, mesh)

    def collectives(kernel):
        tx = optimizer(name, mesh, kernel)
        text = compiled_update(tx, params, tx.init(params)).as_text()
        kinds = r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
        return sorted(re.findall(rf"{kinds}(?:-start)?\(", text))

    assert collectives(kernel=True) == collectives(kernel=False) != []
