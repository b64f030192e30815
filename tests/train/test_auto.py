"""What a run chooses: the type of matrix products, microbatches, and rematerialisation."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from refusals import refused, stopped
from running import train_here, write_config
from tiny import MODEL, audited, short_config, sophia, tiny_config

from maxmars.config import EvalConfig, MarsConfig, MeshConfig
from maxmars.config.mesh import check_mesh
from maxmars.distributed.sharding import bytes_on_chip, make_mesh
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters, init_params
from maxmars.plan import get_topology
from maxmars.plan.compile import peak_bytes
from maxmars.train import train
from maxmars.train.auto import (
    USABLE,
    check_memory,
    choose_precision,
    less_memory,
    make_estimate,
    slow_network_warning,
    with_remat,
)
from maxmars.train.resolve import resolve_config
from maxmars.train.step import abstract_train_state, make_train_step

AUTO_DTYPE = tiny_config(model=dataclasses.replace(MODEL, compute_dtype="auto"))
LONG = """  # whose logits of attention are a terabyte
    global_batch_size=8,
    num_microbatches=1,
    model=dataclasses.replace(
        MODEL, num_layers=1, num_heads=8, embed_dim=8, max_seq_len=2**16, attention="plain"
    ),
    eval=EvalConfig(every=None),
    optimizer=ADAMW,
"""
AUTO_REMAT = tiny_config(model=dataclasses.replace(MODEL, remat="auto"))


# --- the type of matrix products -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("cpu:2", "float32"),
        pytest.param("v5e:2x2", "bfloat16", marks=pytest.mark.slow),
        pytest.param("h100:8", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_type_is_that_of_the_platform_and_a_given_one_stays(topology, expected):
    try:
        devices = get_topology(topology).devices
    except ImportError as error:
        pytest.skip(str(error))  # a compiler that is not installed
    logged, mesh = [], make_mesh(AUTO_DTYPE.mesh, devices)
    chosen = choose_precision(AUTO_DTYPE, mesh, logged.append)
    assert chosen.model == dataclasses.replace(MODEL, compute_dtype=expected)
    assert len(logged) == 1
    assert expected in logged[0]
    assert choose_precision(tiny_config(), mesh, pytest.fail) == tiny_config()


def test_a_model_whose_type_was_not_chosen_says_so():
    config = AUTO_DTYPE.model
    params, tokens = init_params(config, 0), jnp.zeros((1, MODEL.max_seq_len + 1), jnp.int32)
    with refused(ValueError, "model.compute_dtype=auto"):
        mean_loss(make_model(config, params), tokens)


# --- rematerialisation ---------------------------------------------------------------------------


PLENTY, LITTLE = 10**12, 1
"""Memory in which everything fits, and in which nothing does."""


def chosen_on(topology, memory_bytes, **changes):
    try:
        devices = get_topology(topology).devices
    except ImportError as error:
        pytest.skip(str(error))  # a compiler that is not installed
    config = dataclasses.replace(AUTO_REMAT, **changes)
    parameters = Parameters(config.model, make_mesh(config.mesh, devices))
    return resolve_config(config, parameters, memory_bytes=memory_bytes).config


@pytest.mark.parametrize(
    ("topology", "memory_bytes", "policy"),
    [
        ("cpu:2", LITTLE, None),
        pytest.param("v5e:2x2", PLENTY, "full", marks=pytest.mark.seconds),
        pytest.param("h100:8", PLENTY, None, marks=pytest.mark.seconds),
        pytest.param("h100:8", LITTLE, "full", marks=pytest.mark.seconds),
    ],
)
def test_the_policy_follows_from_the_platform_and_its_memory(topology, memory_bytes, policy):
    assert chosen_on(topology, memory_bytes).model.remat == policy


@pytest.mark.seconds
def test_a_gpu_takes_more_microbatches_before_it_computes_again():
    model = dataclasses.replace(AUTO_REMAT.model, num_layers=12, max_seq_len=256)
    changes = {"model": model, "num_microbatches": None, "global_batch_size": 480}
    whole = chosen_on("h100:8", PLENTY, **changes)
    assert (whole.model.remat, whole.microbatches) == (None, 1)
    for memory_bytes in (10**7, 10**8):
        split = chosen_on("h100:8", memory_bytes, **changes)
        if split.model.remat is None and split.microbatches > 1:
            return
    pytest.fail("no number of microbatches was chosen")


@pytest.mark.seconds
def test_a_tpu_keeps_attention_of_wide_models_where_it_fits():
    wide = dataclasses.replace(AUTO_REMAT.model, embed_dim=1600, num_heads=25, max_seq_len=1024)
    changes = {"model": wide, "global_batch_size": 64, "num_microbatches": None}
    sizes = (PLENTY, *(int(2**34 * 0.7**k) for k in range(12)), LITTLE)
    steps = [chosen_on("v5e:2x2", size, **changes) for size in sizes]
    taken = [(step.model.remat, step.microbatches) for step in steps]
    assert taken[0] == ("attention", 1)
    assert ("full", 1) in taken  # before a second microbatch
    assert taken[-1] == ("full", 16)


def test_a_given_policy_stays_on_any_memory():
    given = with_remat(AUTO_REMAT, "dots")
    parameters = Parameters(given.model, make_mesh(given.mesh))
    resolved = resolve_config(given, parameters, memory_bytes=LITTLE)
    assert (resolved.config, resolved.messages) == (given, ())


def test_what_takes_less_memory_is_named_in_order():
    parameters = Parameters(MODEL, make_mesh(MeshConfig(fsdp=8)))
    config = tiny_config(global_batch_size=32, num_microbatches=1, mesh=MeshConfig(fsdp=8))
    tried = []
    while words := less_memory(config, parameters):
        tried.append(words)
        if words[0] == "--model.remat":
            config = with_remat(config, words[1])
        else:
            config = dataclasses.replace(config, num_microbatches=int(words[1]))
    assert tried == [
        ["--model.remat", "dots"],
        ["--model.remat", "attention"],
        ["--model.remat", "full"],
        ["--num-microbatches", "2"],
        ["--num-microbatches", "4"],
    ]


@pytest.mark.slow
def test_a_run_keeps_its_choices_on_its_mesh_and_chooses_anew_on_another(tmp_path, capsys):
    run = tmp_path / "run"

    def train_to(num_steps, remat, num_microbatches, **changes):
        # In bfloat16 and unrolled, policies round differently.
        model = dataclasses.replace(MODEL, compute_dtype="bfloat16", scan_unroll=3, remat=remat)
        changes |= {"num_steps": num_steps, "num_microbatches": num_microbatches}
        changes |= {"eval": EvalConfig(every=None)}
        train(short_config(tmp_path / "tokens", model=model, **changes), run)

    train_to(2, None, 1)
    train_to(4, "full", 2)
    change = "num_microbatches 1 -> 2, model.remat None -> full"
    assert f"since step 2: {change}; " in capsys.readouterr().out

    train_to(6, "auto", None)
    stored = json.loads((run / "config.json").read_text())
    assert (stored["model"]["remat"], stored["num_microbatches"]) == ("full", 2)
    asked = stored["asked"]
    assert (asked["model.remat"], asked["num_microbatches"]) == ("auto", None)
    found = audited(run, replay=4)
    assert found.verdict == "one trajectory up to rounding"
    assert found.changes == [f"at step 2: {change}"]
    assert found.replayed == "steps 3 to 6 (of 2 sessions), computed again: the same digest"

    train_to(8, "auto", None, mesh=MeshConfig(fsdp=8))
    found = audited(run, replay=2)
    assert found.changes[1].startswith("at step 6: mesh {'data': 8, ")
    assert found.changes[1].endswith("num_microbatches 2 -> 1, model.remat full -> None")
    assert found.replayed == "steps 7 to 8, computed again: the same digest"


@pytest.mark.seconds
def test_a_step_out_of_memory_names_the_next_policy(tmp_path):
    write_config(tmp_path, LONG)
    with stopped(1, "out of memory", "--model.remat dots"):
        train_here(tmp_path, "run")


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        ({"embed_dim": 2**30}, {}, ["optimizer state", "EB", "mesh.fsdp"]),
        ({"num_layers": 10**9}, {}, ["optimizer state", "PB", "mesh.fsdp"]),
        ({"max_seq_len": 2**20}, {"global_batch_size": 2**30}, [f"global_batch_size={2**30}"]),
        (
            {"max_seq_len": 2**20},
            {"eval": EvalConfig(batch_size=2**30)},
            [f"eval.batch_size={2**30}"],
        ),
    ],
)
def test_what_no_memory_holds_is_refused_at_once(model, changes, named):
    config = tiny_config(model=dataclasses.replace(MODEL, **model), **changes)
    mesh = make_mesh(MeshConfig())
    check_mesh(config, mesh.shape)
    with refused(ValueError, *named):
        state = abstract_train_state(config, Parameters(config.model, mesh))
        check_memory(config, mesh, state)


# --- the number of microbatches ------------------------------------------------------------------

UNSET = tiny_config(num_microbatches=None, global_batch_size=480, mesh=MeshConfig(fsdp=8))


def test_the_fewest_microbatches_that_fit():
    parameters, logged = Parameters(UNSET.model, make_mesh(UNSET.mesh)), []
    state = abstract_train_state(UNSET, parameters)
    estimate = make_estimate(UNSET, parameters, state)
    assert estimate is not None
    needs = {
        count: estimate(dataclasses.replace(UNSET, num_microbatches=count))
        for count in (1, 2, 3, 60)
    }
    assert needs[1] > needs[2] > needs[3] > needs[60]

    def chosen(memory_bytes):
        resolved = resolve_config(UNSET, parameters, memory_bytes=memory_bytes)
        logged.extend(resolved.messages)
        return resolved.config

    for count in (1, 3, 60):
        chosen_config = chosen(int(needs[count] / USABLE) + 1)
        assert chosen_config == dataclasses.replace(UNSET, num_microbatches=count)
    assert [line.split(":")[0] for line in logged] == [
        "num_microbatches=3, the fewest that fit",
        "num_microbatches=60, the fewest that fit",
    ]
    assert chosen(1000).num_microbatches == 60
    assert "not even the last fits" in logged[-1]


def test_each_gradient_that_the_optimizer_requests_counts():
    def beside_the_state(optimizer):
        config = dataclasses.replace(UNSET, optimizer=optimizer)
        parameters = Parameters(config.model, make_mesh(config.mesh))
        state = abstract_train_state(config, parameters)
        estimate = make_estimate(config, parameters, state)
        assert estimate is not None
        return estimate(config) - bytes_on_chip(state), bytes_on_chip(state.params)

    usual, params = beside_the_state(MarsConfig())
    assert beside_the_state(MarsConfig(exact=True))[0] == usual + params
    assert beside_the_state(sophia(10))[0] == usual + params


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "full"])
def test_the_estimate_follows_the_compiled_program(remat):
    model = dataclasses.replace(MODEL, num_layers=12, embed_dim=128, max_seq_len=256)
    config = with_remat(dataclasses.replace(UNSET, model=model, num_microbatches=2), remat)
    mesh = make_mesh(config.mesh)
    step = make_train_step(config, Parameters(config.model, mesh))
    peak = peak_bytes(step.lower().compile(), tpu=False)
    estimate = make_estimate(config, step.parameters, step.abstract_state)
    assert estimate is not None
    assert 0.4 < estimate(config) / peak < 2.5


def test_a_slow_mesh_is_warned_of():
    networks = [0, 0, 0, 0, 1, 1, 1, 1]

    def warning(**sizes):
        config = dataclasses.replace(UNSET, mesh=MeshConfig(**sizes))
        mesh = make_mesh(config.mesh, networks=networks)
        return slow_network_warning(config, mesh, networks, "h100:8", "9.9 GB a GPU and step")

    assert warning(data=2, fsdp=4) is warning(data=8) is warning(fsdp=2, tensor=2) is None
    assert warning(fsdp=8) == (
        "warning: mesh.fsdp=8 goes over the slow network between 2 hosts: 9.9 GB a GPU and step; "
        "compare with `maxmars plan CONFIG --topology h100:8 --mesh.data 2 --mesh.fsdp 4 "
        "--mesh.tensor 1`, or leave --mesh out"
    )
