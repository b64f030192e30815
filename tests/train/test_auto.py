"""What a run chooses: the type of matrix products, microbatches, and rematerialisation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from refusals import refused
from tiny import ADAMW, MODEL, short_config, tiny_config

from maxmars.checkpoint.reader import checksum
from maxmars.config import EvalConfig, MeshConfig
from maxmars.config.mesh import check_mesh
from maxmars.distributed.sharding import make_mesh
from maxmars.model.language_model import make_model, mean_loss
from maxmars.model.parameters import Parameters, init_params
from maxmars.plan import get_topology
from maxmars.train import train
from maxmars.train.audit import audit
from maxmars.train.auto import (
    POLICIES,
    USABLE,
    Needs,
    best_policy,
    check_memory,
    choose_microbatches,
    choose_precision,
    fewest_that_fit,
    make_estimate,
    peak_bytes,
    prepare,
    search,
    slow_network_warning,
    with_remat,
)
from maxmars.train.step import abstract_train_state, make_train_step

AUTO_DTYPE = tiny_config(model=dataclasses.replace(MODEL, compute_dtype="auto"))
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


NEEDS = {
    None: Needs(2000, 900.0),
    "dots": Needs(1200, 875.0),
    "attention": Needs(600, 800.0),
    "full": Needs(190, 750.0),
}


@pytest.mark.parametrize(
    ("limit", "policy", "measured"), [(2000, None, 1), (1999, "dots", 2), (190, "full", 4)]
)
def test_the_policy_with_the_least_arithmetic_that_fits(limit, policy, measured):
    tried = []

    def measure(remat):
        tried.append(remat)
        return NEEDS[remat]._replace(seconds=None)

    assert best_policy(measure, limit)[0] == policy
    assert tried == list(POLICIES[:measured])


@pytest.mark.parametrize(
    ("limit", "keep", "policy"),
    [
        (2000, False, "full"),  # keeping an array takes longer there than computing it again
        (2000, True, None),
        (1999, True, "dots"),
        (189, False, "full"),  # nothing fits
    ],
)
def test_of_those_that_fit_the_policy_of_the_shortest_step(limit, keep, policy):
    assert best_policy(NEEDS.__getitem__, limit, keep=keep) == (policy, NEEDS[policy])


def test_a_policy_that_the_compiler_refuses_does_not_fit():
    needs = dict.fromkeys(POLICIES, Needs(None))
    assert best_policy(needs.__getitem__, 10**12) == ("full", Needs(None))
    needs["attention"] = Needs(600, 800.0)
    assert best_policy(needs.__getitem__, 10**12) == ("attention", needs["attention"])


@pytest.mark.slow
def test_what_a_compiled_step_needs_decides():
    config = dataclasses.replace(AUTO_REMAT, optimizer=ADAMW, num_microbatches=1)
    mesh, logged = make_mesh(config.mesh, jax.devices()[:1]), []
    parameters = Parameters(config.model, mesh)
    step = make_train_step(with_remat(config, None), parameters)
    needed = peak_bytes(step.lower().compile(), tpu=False)

    def choose(limit):
        return prepare(config, parameters, log=logged.append, memory_bytes=int(limit)).config

    assert choose(needed / USABLE + 2) == with_remat(config, None)
    assert logged[-1].startswith(f"model.remat=auto: None takes {needed / 1e9:.3f} GB; ")
    assert choose(1) == with_remat(config, "full")
    assert logged[-1].endswith("nothing fits; raise num_microbatches or mesh.fsdp")
    assert len(logged) == 2


def test_a_given_policy_stays_and_unknown_memory_recomputes_nothing():
    mesh, logged = make_mesh(AUTO_REMAT.mesh), []
    given = with_remat(AUTO_REMAT, "dots")
    parameters = Parameters(given.model, mesh)
    assert prepare(given, parameters, log=pytest.fail, memory_bytes=1).config == given
    chosen = prepare(AUTO_REMAT, parameters, log=logged.append).config
    assert chosen == with_remat(AUTO_REMAT, None)
    assert logged == ["model.remat=auto: None, as this device's memory is not known"]


PLENTY, LITTLE = 10**12, 1
"""Memory in which everything fits, and in which nothing does."""


def in_bfloat16(folder, **changes):
    """A run whose policies round differently: unrolled, in bfloat16."""
    model = dataclasses.replace(AUTO_REMAT.model, compute_dtype="bfloat16", scan_unroll=3)
    return short_config(folder / "tokens", model=model, num_steps=4, **changes)


@pytest.mark.slow
def test_a_run_on_another_mesh_chooses_anew(tmp_path):
    config, run = in_bfloat16(tmp_path), tmp_path / "run"
    train(dataclasses.replace(config, num_steps=2), run, memory_bytes=LITTLE)
    train(dataclasses.replace(config, mesh=MeshConfig(fsdp=8)), run, memory_bytes=PLENTY)
    audited = audit(run, replay=2, log=lambda text: None)
    assert "model.remat full -> None" in audited.changes[0]
    assert audited.replayed == "steps 3 to 4, computed again: the same digest"


@pytest.mark.slow
def test_a_run_from_before_choices_were_recorded_goes_on(tmp_path):
    config, run = in_bfloat16(tmp_path), tmp_path / "run"
    train(dataclasses.replace(config, num_steps=2), run)
    for path in run.glob("checkpoints/*/meta/data.json"):
        meta = json.loads(path.read_text())
        meta["config"]["model"]["remat"] = "auto"
        del meta["config"]["asked"]
        path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))
    train(config, run)
    audited = audit(run, replay=2, log=lambda text: None)
    assert (audited.verdict, audited.changes) == ("one trajectory", [])


@pytest.mark.slow
def test_in_less_memory_microbatches_and_policy_are_chosen_anew_and_replayed(tmp_path, capsys):
    config, run = in_bfloat16(tmp_path, num_microbatches=None), tmp_path / "run"
    train(dataclasses.replace(config, num_steps=2), run, memory_bytes=PLENTY)
    train(config, run, memory_bytes=LITTLE)
    change = "num_microbatches 1 -> 2, model.remat None -> full"
    assert f"since step 2: {change}; " in capsys.readouterr().out
    stored = json.loads((run / "config.json").read_text())
    assert stored["model"]["remat"] == "full"
    assert stored["asked"]["model.remat"] == "auto"
    audited = audit(run, replay=2, log=lambda text: None)
    assert audited.verdict == "one trajectory up to rounding"
    assert audited.changes == [f"at step 2: {change}"]
    assert audited.replayed == "steps 3 to 4, computed again: the same digest"


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
    mesh, logged = make_mesh(UNSET.mesh), []
    state = abstract_train_state(UNSET, Parameters(UNSET.model, mesh))
    estimate = make_estimate(UNSET, mesh, state)
    assert estimate is not None
    needs = {
        count: estimate(dataclasses.replace(UNSET, num_microbatches=count))
        for count in (1, 2, 3, 60)
    }
    assert needs[1] > needs[2] > needs[3] > needs[60]
    for count in (1, 3, 60):
        memory = int(needs[count] / USABLE) + 1
        chosen = choose_microbatches(UNSET, mesh, estimate, memory, logged.append)
        assert chosen == dataclasses.replace(UNSET, num_microbatches=count)
    assert [line.split(":")[0] for line in logged] == [
        "num_microbatches=3, the fewest that fit",
        "num_microbatches=60, the fewest that fit",
    ]
    assert choose_microbatches(UNSET, mesh, estimate, 1000, logged.append).num_microbatches == 60
    assert "not even the last fits" in logged[-1]


@pytest.mark.parametrize(("limit", "expected"), [(850, 1), (449, 4), (149, None)])
def test_the_fewest_microbatches_that_fit_by_measuring(limit, expected):
    tried = []

    def measure(config):
        tried.append(config.microbatches)
        return Needs(50 + 800 // config.microbatches)

    chosen, needs = fewest_that_fit(UNSET, [1, 2, 4, 8], measure, limit)
    assert needs.fit(limit) == (expected is not None)
    assert chosen.microbatches == (expected or 8)
    assert needs == Needs(50 + 800 // chosen.microbatches)
    assert len(set(tried)) == len(tried)  # no program is compiled twice


def test_a_policy_that_recomputes_less_is_preferred_whatever_its_microbatch():
    """And where nothing fits, the one of the least memory is left."""
    config = dataclasses.replace(UNSET, global_batch_size=32)
    vectors = {None: 80, "dots": 40, "attention": 20, "full": 10}

    def chosen(usable):
        def measure(config):
            return Needs(100 + vectors[config.model.remat] // config.microbatches)

        fitting = search(config, make_mesh(UNSET.mesh), POLICIES, measure, usable)
        return fitting.model.remat, fitting.microbatches

    assert chosen(180) == (None, 1)
    assert chosen(120) == (None, 4)
    assert chosen(110) == ("dots", 4)
    assert chosen(101) == ("full", 4)


def test_where_no_estimate_can_be_made_the_fewest_that_divide():
    mesh = make_mesh(UNSET.mesh)
    state = abstract_train_state(UNSET, Parameters(UNSET.model, mesh))
    estimate = make_estimate(UNSET, mesh, state)
    assert choose_microbatches(UNSET, mesh, estimate, None, pytest.fail).num_microbatches == 1
    given = dataclasses.replace(UNSET, num_microbatches=4)
    assert choose_microbatches(given, mesh, estimate, 1000, pytest.fail) is given


@pytest.mark.parametrize(
    ("topology", "like"),
    [pytest.param("v5e:2x2", "full", marks=pytest.mark.slow), ("cpu:4", None)],
)
def test_auto_counts_as_what_it_is_to_take(topology, like):
    """On TPUs as the least memory; elsewhere more microbatches are better than recomputing."""
    if topology.startswith("v5e"):
        pytest.importorskip("libtpu", reason="libtpu (extra `tpu`) is not installed")
    config = dataclasses.replace(UNSET, model=AUTO_REMAT.model, mesh=MeshConfig(fsdp=4))
    mesh = get_topology(topology).mesh(config)
    state = abstract_train_state(config, Parameters(config.model, mesh))
    estimate = make_estimate(config, mesh, state)
    assert estimate is not None
    assert estimate(config) == estimate(with_remat(config, like))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "full"])
def test_the_estimate_follows_the_compiled_program(remat):
    model = dataclasses.replace(MODEL, num_layers=12, embed_dim=128, max_seq_len=256)
    config = with_remat(dataclasses.replace(UNSET, model=model, num_microbatches=2), remat)
    mesh = make_mesh(config.mesh)
    step = make_train_step(config, Parameters(config.model, mesh))
    peak = peak_bytes(step.lower().compile(), tpu=False)
    estimate = make_estimate(config, mesh, step.abstract_state)
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
