"""Memory and FLOPs of compiled programs."""

import dataclasses

import jax
import pytest
from refusals import refused
from tiny import tiny_config

from maxmars.config import MeshConfig
from maxmars.distributed.sharding import bytes_on_chip, make_mesh
from maxmars.model.flat_attention import flat_attention
from maxmars.model.parameters import Parameters
from maxmars.plan import get_topology, make_plan
from maxmars.plan.compile import matmul_flops, optimizer_state_bytes
from maxmars.train.step import abstract_train_state, make_train_step

pytestmark = pytest.mark.smoke


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["shampoo", pytest.param("average", marks=pytest.mark.slow)])
def test_memory_is_the_compilers(plan_of, name):
    plan = plan_of(name)
    stats = plan.train_step.executable.memory_analysis()
    memory = plan.memory
    assert memory.compiler["temp_size_in_bytes"] == stats.temp_size_in_bytes
    made = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert memory.peak_bytes == stats.argument_size_in_bytes + stats.temp_size_in_bytes + made
    counted = memory.parameters_bytes + sum(memory.optimizer_state_bytes.values())
    counted += memory.previous_parameters_bytes + memory.other_arguments_bytes
    assert counted + memory.padding_bytes == stats.argument_size_in_bytes
    assert memory.padding_bytes == 0  # a CPU has no tiles
    rest = memory.gradients_bytes + memory.temporaries_bytes
    assert rest == memory.peak_bytes - stats.argument_size_in_bytes


@pytest.mark.slow
def test_packed_data_are_no_padding(plan_of, config_of):
    config = config_of("adamw")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing="split"))
    memory = make_plan(config, get_topology("cpu:8"), evaluate=False).memory
    assert memory.padding_bytes == 0
    assert memory.other_arguments_bytes > plan_of("shampoo").memory.other_arguments_bytes


@pytest.mark.parametrize("name", ["adamw", "mars", "shampoo", "exact"])
def test_state_bytes_are_the_arithmetic_of_the_config(config_of, name):
    d, layers, vocab, length = 32, 3, 264, 16
    kernels = 4 * 12 * layers * d * d // 8  # split over fsdp and tensor
    embeddings = 4 * (vocab * d // 8 + length * d // 4)  # positions over fsdp only
    vectors = 4 * (2 * layers + 1) * d  # a copy everywhere
    every = kernels + embeddings + vectors
    expected = {
        "adamw": {"mu": every, "nu": every},
        "mars": {"mu": every, "nu": every, "last_grad": kernels + embeddings},
        "shampoo": {
            "mu": embeddings + vectors,
            "nu": embeddings + vectors,
            "ema": kernels,
            "last_grad": kernels,
        },
        "exact": {"mu": every, "nu": every},
    }[name]
    config = config_of(name)
    state = abstract_train_state(config, Parameters(config.model, make_mesh(config.mesh)))
    sizes = optimizer_state_bytes(state.opt_state)
    assert {kind: size for kind, size in sizes.items() if size > 100} == expected
    assert bytes_on_chip(state.params) == every
    assert bytes_on_chip(state.prev_params) == (every if name == "exact" else 0)


@pytest.mark.seconds
def test_flops_of_the_model(plan_of, config_of):
    plan = plan_of("shampoo")
    tokens, d, layers, length = plan.config.tokens_per_step, 32, 3, 16
    forward = 2 * 12 * layers * d * d + 2 * 264 * d + 4 * layers * length * d
    of_model = 3 * forward * tokens  # no rematerialisation
    assert plan.flops.hardware - plan.flops.optimizer == of_model
    on_devices = (
        8
        * 5
        * sum(  # products of five steps: A = X Xᵀ, A A and A X
            g.slots // g.owners * 2 * g.rows**2 * (2 * g.cols + g.rows) for g in plan.exchange
        )
    )
    assert plan.flops.optimizer == pytest.approx(on_devices, rel=0.01)
    assert plan.flops.model / tokens == 6 * plan.num_parameters + 12 * layers * d * length
    exact = make_train_step(config_of("exact"), Parameters(config_of("exact").model, plan.mesh))
    assert matmul_flops(exact.trace().jaxpr).total() == 2 * of_model


def test_a_batch_that_no_microbatch_divides():
    config = tiny_config(global_batch_size=12, num_microbatches=1, mesh=MeshConfig(fsdp=8))
    with refused(ValueError, "global_batch_size=12", "8 devices"):
        make_plan(config, get_topology("cpu:8"))


def test_flops_of_a_step_are_the_same_on_every_mesh():
    def flops(mesh, num_devices):
        config = tiny_config(mesh=mesh)
        on = Parameters(config.model, make_mesh(mesh, jax.devices()[:num_devices]))
        step = make_train_step(config, on)
        return matmul_flops(step.trace().jaxpr)

    assert flops(MeshConfig(data=2, fsdp=2, tensor=2), 8) == flops(MeshConfig(data=1), 1)


def test_flops_of_loops_branches_and_devices():
    def program(x):
        x, _ = jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    traced = jax.jit(program).trace(jax.ShapeDtypeStruct((4, 4), "float32"))
    assert matmul_flops(traced.jaxpr) == {"": (5 + 2) * 2 * 4**3}


@pytest.mark.parametrize("length", [512, 1024])
def test_flops_of_a_kernel_are_of_the_blocks_that_it_computes(length):
    def loss(x):
        return flat_attention(x, x, x, head_dim=64, residual_name="kept").sum()

    traced = jax.jit(jax.grad(loss)).trace(jax.ShapeDtypeStruct((2, length, 128), "bfloat16"))
    blocks = length // 512 * (length // 512 + 1) // 2
    forward, backward = 2, 5  # products of a block of 512 x 512 logits
    assert matmul_flops(traced.jaxpr) == {
        "": (forward + backward) * 2 * 2 * 2 * blocks * 512**2 * 64  # rows, heads
    }
