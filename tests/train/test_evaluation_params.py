"""Which parameters are evaluated and exported: their average, or those that an optimizer names."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from refusals import refused
from safetensors.numpy import load_file
from tiny import (
    MODEL,
    audited,
    first_difference,
    first_state,
    parameters_of,
    random_batch,
    short_config,
    tiny_config,
    validation_batches,
)
from trees import assert_close

from maxmars.checkpoint import load as load_checkpoint
from maxmars.checkpoint import read
from maxmars.cli import main
from maxmars.config import AdamWConfig, MarsConfig, MeshConfig, ModuleConfig, OptaxConfig
from maxmars.data.batches import open_data
from maxmars.distributed import sharding
from maxmars.eval import load
from maxmars.eval.validation import make_eval_step, validation_loss
from maxmars.model.parameters import Parameters
from maxmars.train import InitFrom, train
from maxmars.train.metrics import read_metrics
from maxmars.train.step import (
    abstract_saved_state,
    make_train_step,
)

ADAMW = AdamWConfig(learning_rate=1e-2)
DECAY = 0.9
OWN = """
import os
import jax, jax.numpy as jnp, optax, optax.contrib
from flax import nnx

class Bigrams(nnx.Module):
    def __init__(self, size, dtype, rngs):
        values = jax.random.normal(rngs.params(), (size, 16)).astype(dtype)
        self.table = nnx.Param(values, out_sharding=("vocab", "embed"))
        self.output_embedding = nnx.Param(values[::-1], out_sharding=("vocab", "embed"))

    def __call__(self, tokens, segment_ids=None, positions=None):
        return self.table[...][tokens]

def bigrams(*, rngs, vocab_size, max_seq_len, dtype="float32"):
    return Bigrams(vocab_size, dtype, rngs)

def free(learning_rate):
    return optax.contrib.schedule_free_adamw(learning_rate), optax.contrib.schedule_free_eval_params

def alone(learning_rate):
    return optax.contrib.schedule_free_adamw(learning_rate)

def lying(learning_rate):
    factor = float(os.environ.get("FACTOR", "1"))
    return optax.sgd(learning_rate), lambda _, params: jax.tree.map(lambda x: factor * x, params)

def partial(learning_rate):
    return optax.sgd(learning_rate), lambda state, params: params["table"]

def number(learning_rate):
    return optax.sgd(learning_rate), 1
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def own(file, name):
    return OptaxConfig(make=f"{file}:{name}", learning_rate=1e-2)


def small(file, dtype="float32"):
    """A model that compiles in no time."""
    return ModuleConfig(
        make=f"{file}:bigrams", options={"dtype": dtype}, vocab_size=257, max_seq_len=16
    )


def config_of(folder, **changes):
    model = dataclasses.replace(MODEL, num_layers=1)
    changes = {"optimizer": ADAMW, "num_steps": 4, "model": model} | changes
    return short_config(folder / "tokens", **changes)


def saved_arrays(workdir, config, step=None):
    """The state in a checkpoint of a run, on one device."""
    train_step = make_train_step(config, parameters_of(config))
    saved = read(workdir / "checkpoints", step)
    return load_checkpoint(saved.path.parent, abstract_saved_state(train_step, saved), saved.step)


def loss_of(params, config):
    mesh = sharding.make_mesh(config.mesh)
    on_mesh = jax.device_put(params, Parameters(config.model, mesh).shardings)
    batches = validation_batches(open_data(config.data, "val", model=config.model), config, mesh)
    return validation_loss(make_eval_step(config.model, mesh), mesh, on_mesh, batches).loss


def weighted(weights, trees):
    return jax.tree.map(lambda *each: sum(map(np.multiply, weights, each)), *trees)


def differs(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any((np.asarray(a) != np.asarray(b)).any() for a, b in pairs)


# --- the average ---------------------------------------------------------------------------------


@pytest.mark.seconds
def test_the_average_is_that_of_the_parameters_after_each_update(file):
    """In NumPy: weights (1 - d) d^(t - i) over 1 - d^t; a skipped step leaves it as it was."""
    config = tiny_config(ema_decay=DECAY, num_microbatches=1, optimizer=ADAMW, model=small(file))
    step, state = first_state(config)
    assert_close(state.evaluation_params, state.params)
    rng, history = np.random.default_rng(0), []
    for number in range(5):
        batch = random_batch(step, rng)
        if number == 2:
            batch["mask"] = jnp.zeros(batch["tokens"].shape, bool)
        before = jax.device_get(state.evaluation_params)
        state, metrics = step(state, batch)
        if number == 2:
            assert metrics["train/skipped"] == 1
            assert_close(state.evaluation_params, before)
            continue
        history.append(jax.device_get(state.params))
        t = len(history)
        weights = np.array([(1 - DECAY) * DECAY ** (t - i) for i in range(1, t + 1)])
        expected = weighted(weights / (1 - DECAY**t), history)
        assert_close(state.evaluation_params, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """An undisturbed run that averages, and `run`, which was continued after 2 of its 4 steps."""
    folder = tmp_path_factory.mktemp("averaged")
    config = config_of(folder, ema_decay=DECAY, schedule=fixed(4))
    train(config, folder / "undisturbed")
    shutil.copytree(folder / "undisturbed", folder / "run")
    for step in "34":
        shutil.rmtree(folder / "run" / "checkpoints" / step)
    train(config, folder / "run")
    return folder


def fixed(steps):
    return dataclasses.replace(tiny_config().schedule, warmup_steps=0, decay_steps=steps)


@pytest.mark.seconds
def test_a_continued_average_is_the_same_bit_by_bit(averaged):
    assert first_difference(averaged / "run", averaged / "undisturbed") is None
    found = audited(averaged / "run", replay=2)
    assert (found.problems, found.sessions) == ([], 2)
    assert found.replayed


@pytest.mark.seconds
def test_it_is_evaluated_told_and_exported(averaged, tmp_path):
    config, run = config_of(averaged, ema_decay=DECAY), averaged / "run"
    state = saved_arrays(run, config).state
    assert differs(state.evaluation_params, state.params)
    last = [row for row in read_metrics(run) if "eval/loss" in row][-1]
    assert last["eval/loss"] == pytest.approx(loss_of(state.evaluation_params, config), abs=1e-6)
    assert last["eval/loss"] != pytest.approx(loss_of(state.params, config), abs=1e-6)
    assert 0 < last["eval/params_distance"] < 1
    for told in ("summary.json", "logs/host_000.log"):
        assert f"ema_decay={DECAY}" in (run / told).read_text()
    loaded = load(run)
    assert_close(loaded.params, state.evaluation_params)
    assert "evaluation parameters" in loaded.name
    main(["export", str(run), str(tmp_path / "exported")])
    assert f"ema_decay={DECAY}" in (tmp_path / "exported" / "README.md").read_text()
    weights = load_file(tmp_path / "exported" / "model.safetensors")
    ours = np.asarray(state.evaluation_params["wpe"]["embedding"])
    assert any(np.array_equal(array, ours) for array in weights.values())
    trained = np.asarray(state.params["wpe"]["embedding"])
    assert not any(np.array_equal(array, trained) for array in weights.values())


@pytest.mark.seconds
def test_another_run_starts_from_it_and_with_the_optimizers_state_from_the_parameters(
    averaged, tmp_path
):
    config = config_of(averaged, ema_decay=DECAY, num_steps=1)
    state = saved_arrays(averaged / "run", config).state
    for with_state, expected in ((False, state.evaluation_params), (True, state.params)):
        source = InitFrom(path=str(averaged / "run"), optimizer_state=with_state)
        train(config, tmp_path / str(with_state), init_from=source)
        first = next(r for r in read_metrics(tmp_path / str(with_state)) if "eval/loss" in r)
        assert first["step"] == 0
        assert first["eval/loss"] == pytest.approx(loss_of(expected, config), abs=1e-6)


@pytest.mark.seconds
def test_it_is_turned_on_and_off_on_purpose_and_in_float32_where_the_parameters_are_in_bfloat16(
    file, tmp_path
):
    run, model = tmp_path / "run", small(file, "bfloat16")
    plain = config_of(tmp_path, model=model, num_steps=2, schedule=fixed(4))
    train(plain, run)
    assert not any("evaluation" in name for name in read(run / "checkpoints").types)
    assert not any("eval/params_distance" in row for row in read_metrics(run))
    config = dataclasses.replace(plain, num_steps=3, ema_decay=DECAY)
    with refused(ValueError, "ema_decay (None there, 0.9 here)"):
        train(config, run)
    train(config, run, resume_overrides=["ema_decay"])
    train(dataclasses.replace(config, num_steps=4), run)
    average = saved_arrays(run, config).state.evaluation_params
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), average)
    assert differs(average, rounded)
    assert_close(load(run).params, rounded)
    assert audited(run, replay=1).problems == []
    off = dataclasses.replace(plain, num_steps=5)
    train(off, run, resume_overrides=["ema_decay"])
    assert not any("evaluation" in name for name in read(run / "checkpoints").types)
    assert audited(run, replay=1).problems == []


@pytest.mark.seconds
def test_a_changed_average_is_found(averaged, tmp_path):
    """An array that differs from its digest, and a checkpoint of another run, whose parameters are
    the same ones and whose digests agree."""
    shutil.copytree(averaged / "run", tmp_path / "array")
    shutil.copytree(averaged / "run", tmp_path / "checkpoint")
    config = config_of(averaged, ema_decay=0.5, schedule=fixed(4))
    train(config, tmp_path / "other")
    theirs, ours = (read(run / "checkpoints") for run in (tmp_path / "other", averaged / "run"))
    same = {n for n, digest in ours.digests.items() if theirs.digests[n] == digest}
    assert {n for n in ours.digests if n not in same} == {
        n for n in ours.digests if n.startswith("evaluation_params/")
    }
    for run, part in (("array", "checkpoints/4/state"), ("checkpoint", "checkpoints/4")):
        shutil.rmtree(tmp_path / run / part)
        shutil.copytree(tmp_path / "other" / part, tmp_path / run / part)
        assert audited(tmp_path / run).problems, run


@pytest.mark.slow
def test_it_averages_beside_what_else_a_step_keeps(tmp_path):
    optimizer, mesh = MarsConfig(exact=True), MeshConfig(data=2, fsdp=2, tensor=2)
    config = config_of(tmp_path, ema_decay=DECAY, optimizer=optimizer, mesh=mesh, num_steps=2)
    train(config, tmp_path / "run")
    assert audited(tmp_path / "run", replay=1).problems == []


# --- what an optimizer names ---------------------------------------------------------------------


@pytest.mark.seconds
def test_schedule_free_is_evaluated_where_it_says(file, tmp_path):
    config = config_of(tmp_path, optimizer=own(file, "free"), schedule=fixed(4), model=small(file))
    run = tmp_path / "run"
    train(config, tmp_path / "undisturbed")
    shutil.copytree(tmp_path / "undisturbed", run)
    for step in "34":
        shutil.rmtree(run / "checkpoints" / step)
    train(config, run)
    assert first_difference(run, tmp_path / "undisturbed") is None
    assert audited(run, replay=2).problems == []
    state = saved_arrays(run, config).state
    expected = optax.contrib.schedule_free_eval_params(state.opt_state, state.params)
    assert differs(expected, state.params)
    last = [row for row in read_metrics(run) if "eval/loss" in row][-1]
    # The run computes them within a program, and here one operation at a time: the last bit of a
    # loss of 16, 1.9e-6, may be another one.
    assert last["eval/loss"] == pytest.approx(loss_of(expected, config), abs=2e-6)
    assert last["eval/loss"] != pytest.approx(loss_of(state.params, config), abs=2e-6)
    assert "eval/params_distance" in last
    loaded = load(run).params  # which runs none of the optimizer's code
    assert_close(loaded, expected, rtol=1e-5, atol=1e-6)
    assert_close(loaded, state.evaluation_params)


@pytest.mark.seconds
def test_an_optimizer_that_begins_to_name_them_continues(file, tmp_path):
    config = config_of(tmp_path, optimizer=own(file, "alone"), num_steps=2, model=small(file))
    train(config, tmp_path / "run")
    for name, steps, has in (("free", 3, True), ("alone", 4, False)):
        config = dataclasses.replace(config, optimizer=own(file, name), num_steps=steps)
        train(config, tmp_path / "run", resume_overrides=["optimizer.make"])
        types = read(tmp_path / "run" / "checkpoints").types
        assert any(n.startswith("evaluation_params/") for n in types) == has
    assert audited(tmp_path / "run", replay=1).problems == []


@pytest.mark.seconds
def test_a_lie_about_what_is_named_is_found(file, tmp_path, monkeypatch):
    config = config_of(tmp_path, optimizer=own(file, "lying"), num_steps=2, model=small(file))
    monkeypatch.setenv("FACTOR", "2")
    train(config, tmp_path / "run")
    assert audited(tmp_path / "run", replay=1).problems == []
    monkeypatch.setenv("FACTOR", "1")
    (problem,) = audited(tmp_path / "run", replay=1).problems
    assert "digest" in problem


@pytest.mark.parametrize(
    ("name", "ema_decay", "named"),
    [
        ("partial", None, ["own.py:partial", "evaluation_params"]),
        ("number", None, ["own.py:number", "evaluation_params(opt_state, params)"]),
        ("free", 0.5, ["own.py:free", "ema_decay=0.5"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused(file, tmp_path, name, ema_decay, named):
    config = config_of(tmp_path, optimizer=own(file, name), ema_decay=ema_decay, model=small(file))
    with refused(ValueError, *named):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
