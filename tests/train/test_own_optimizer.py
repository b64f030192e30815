"""Optimizers of the user's own: trained, continued, planned, and refused in one line."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refused
from tiny import MODEL, first_difference, first_state, random_batch, series, short_config
from trees import mesh_of

from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import (
    AdamWConfig,
    CheckpointConfig,
    OptaxConfig,
    ScheduleConfig,
)
from maxmars.config.errors import in_words
from maxmars.config.user_code import Source
from maxmars.model.parameters import Parameters
from maxmars.train import train
from maxmars.train.optimizer import check_optimizer
from maxmars.train.step import init_train_state

EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "own_optimizer.py"
SOURCE = """
from typing import Any, NamedTuple
import jax, jax.numpy as jnp, optax, optax.contrib
from maxmars.optim import GradientRequest, WeightUpdate, mars, muon, with_requests

class Counted(NamedTuple):
    count: jax.Array
    inner: Any

def counting(learning_rate, *, matrix_specs, mesh):
    sgd = optax.sgd(learning_rate)

    def init(params):
        return Counted(jnp.zeros([], jnp.int32), sgd.init(params))

    def update(updates, state, params=None):
        updates, inner = sgd.update(updates, state.inner, params)
        return updates, Counted(state.count + 1, inner)

    return optax.GradientTransformation(init, update)

def injected(learning_rate, *, matrix_specs, mesh):
    return optax.inject_hyperparams(optax.adam)(learning_rate)

def plain(learning_rate):
    return optax.sgd(learning_rate)

def adamw(learning_rate, *, matrix_specs, mesh, b1=0.9, b2=0.95, weight_decay=0.1):
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    return optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays)

def keeping(learning_rate, *, matrix_specs, mesh):
    return optax.GradientTransformation(lambda params: params, lambda g, s, params=None: (g, s))

def refusing(learning_rate, *, b1, **options):
    raise ValueError(f"b1={b1} must be below 1")

def muonh(learning_rate, *, matrix_specs):
    hyperball = WeightUpdate(hyperball=True)
    matrix = muon(learning_rate, weight_update=hyperball, matrix_specs=matrix_specs)
    is_matrix = lambda spec: "matrix" if spec.kind == "matrix" else "other"
    rules = {"matrix": matrix, "other": optax.adam(learning_rate)}
    return optax.partition(rules, jax.tree.map(is_matrix, matrix_specs))

def number(learning_rate, **options):
    return 1

def sums(learning_rate, **options):
    return optax.stateless(lambda updates, params: jax.tree.map(lambda x: x.sum(), updates))

def exact(learning_rate, *, matrix_specs, mesh):
    return mars(learning_rate, exact=True, matrix_specs=matrix_specs)

def forgetting(learning_rate, *, matrix_specs, mesh):
    return optax.chain(exact(learning_rate, matrix_specs=matrix_specs, mesh=mesh))

def requesting(learning_rate, **request):
    tx = optax.with_extra_args_support(optax.sgd(learning_rate))
    return with_requests(tx, [GradientRequest(name="there", **request)])

def nowhere(learning_rate):
    return requesting(learning_rate, at=lambda state, params: params["wte"])

def whenever(learning_rate):
    return requesting(learning_rate, due=lambda state: jnp.zeros(3))

def stateful(init, change):
    return optax.GradientTransformation(init, lambda g, s, params=None: (g, change(g, s)))

def widening(learning_rate, **options):
    zeros = lambda params: {"m": jax.tree.map(lambda p: jnp.zeros_like(p, jnp.bfloat16), params)}
    return stateful(zeros, lambda g, s: {"m": jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], g)})

def averaging(learning_rate, **options):
    zero = lambda params: {"n": jnp.zeros([], jnp.int32)}
    return stateful(zero, lambda g, s: {"n": s["n"] + 1.0})

def growing(learning_rate, **options):
    return stateful(lambda params: {}, lambda g, s: {"n": jnp.zeros([])})

def regrouping(learning_rate, **options):
    return stateful(lambda params: [jnp.zeros([])], lambda g, s: tuple(s))

def integer(learning_rate, **options):
    return stateful(lambda params: {"n": 0}, lambda g, s: {"n": s["n"] + 1})

def keyed(learning_rate, **options):
    return optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(learning_rate))

def empty(learning_rate, **options):
    return stateful(lambda params: {"n": jnp.zeros([0])}, lambda g, s: s)

def searching(learning_rate, **options):
    return optax.lbfgs(learning_rate)

def schedule_free(learning_rate, **options):
    return optax.contrib.schedule_free_adamw(learning_rate)

def scheduled(learning_rate):
    return optax.adam(optax.linear_schedule(1e-2, 1e-3, 10))

def prodigy(learning_rate):
    return optax.contrib.prodigy(learning_rate)

def accumulating(learning_rate, **options):
    return optax.MultiSteps(optax.adam(learning_rate), 2).gradient_transformation()

not_a_function = 1
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    return str(tmp_path / "own.py")


def test_a_matrix_of_zeros_is_refused_under_hyperball(source, tmp_path):
    config = short_config(
        tmp_path / "tokens", optimizer=OptaxConfig(make=f"{source}:muonh", learning_rate=1e-2)
    )
    parameters = Parameters(config.model, mesh_of(fsdp=4))
    params = init_train_state(config, parameters).params
    params["h"]["mlp"]["c_fc"]["kernel"] = params["h"]["mlp"]["c_fc"]["kernel"].at[2].set(0)
    with refused(ValueError, "h.mlp.c_fc.kernel", "2"):
        init_train_state(config, parameters, {"params": params})


@pytest.mark.seconds
def test_a_state_made_of_the_parameters_begins_with_those_of_the_run(source, tmp_path):
    optimizer = OptaxConfig(make=f"{source}:keeping", learning_rate=1e-3)
    config = short_config(tmp_path / "tokens", optimizer=optimizer)
    step, state = first_state(config)
    params = jax.tree.map(lambda x: x + 1, state.params)
    state = init_train_state(config, step.parameters, {"params": params})
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, state.params)
    state, metrics = step(state, random_batch(step))  # donates every array once
    assert metrics["train/skipped"] == 0


@pytest.mark.seconds
def test_it_trains_as_the_same_optimizer_of_the_package_and_continues(tmp_path, source):
    config = short_config(
        tmp_path / "tokens",
        optimizer=AdamWConfig(learning_rate=1e-2),
        num_steps=3,
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=3),
        checkpoint=CheckpointConfig(every=None),
    )
    train(config, tmp_path / "package")
    own = OptaxConfig(make=f"{source}:adamw", options={"b1": 0.9}, learning_rate=1e-2)
    config = dataclasses.replace(config, optimizer=own)
    train(dataclasses.replace(config, num_steps=2), tmp_path / "continued")
    moved = shutil.move(source, tmp_path / "tokens")  # where the file lies does not matter
    own = dataclasses.replace(own, make=f"{moved}:adamw")
    config = dataclasses.replace(config, optimizer=own)
    train(config, tmp_path / "continued")
    assert first_difference(tmp_path / "package", tmp_path / "continued") is None
    assert {step for step, _ in series(tmp_path / "continued")} == {1, 2, 3}
    kept = tmp_path / "continued" / "sources" / "optimizer"
    assert [path.name for path in kept.iterdir()] == ["own.py"]
    assert [path.name for path in kept.parent.iterdir()] == ["optimizer"]

    # The function's state is another now, as that of an optimizer of another version would be.
    changed = SOURCE.replace("optax.adamw(learning_rate, b1=b1, b2=b2", "optax.lion(learning_rate")
    Path(moved).write_text(changed)
    own = OptaxConfig(make=f"{moved}:adamw", options={"b1": 0.9}, learning_rate=1e-2)
    more = dataclasses.replace(config, optimizer=own, num_steps=4)
    with refused(ValueError, moved, kept.parent, f"--init-from {tmp_path / 'continued'}"):
        train(more, tmp_path / "continued")
    with refused(ValueError, "opt_state/0/nu/", f"--init-from {tmp_path / 'continued'}"):
        train(more, tmp_path / "continued", resume_overrides=["optimizer.make"])

    # It requests a gradient at the parameters of the step before, which no checkpoint has.
    requests = '[GradientRequest(name="previous", at="prev_params")]'
    changed = SOURCE.replace("return optax.adamw(", "return with_requests(optax.adamw(")
    changed = changed.replace("mask=decays)", f"mask=decays), requests={requests})")
    Path(moved).write_text(changed)
    more = dataclasses.replace(more, optimizer=dataclasses.replace(own, make=f"{moved}:adamw"))
    with refused(ValueError, "prev_params/", "--new-optimizer-state"):
        train(more, tmp_path / "continued", resume_overrides=["optimizer.make"])


@pytest.mark.seconds
def test_its_state_may_be_a_class_of_its_file(tmp_path, source):
    own = OptaxConfig(make=f"{source}:counting", learning_rate=1e-2)
    checkpoints = CheckpointConfig(every=None)
    config = short_config(tmp_path / "tokens", optimizer=own, num_steps=2, checkpoint=checkpoints)
    assert train(config, tmp_path / "run").step == 2
    assert train(dataclasses.replace(config, num_steps=3), tmp_path / "run").step == 3
    first, again = (Source.parse(f"{source}:counting").load() for _ in range(2))
    assert first is again
    Path(source).write_text(f"{SOURCE}\n# changed\n")
    assert Source.parse(f"{source}:counting").load() is not first


def test_the_example_is_a_config_whose_options_change_on_the_command_line():
    arguments = ["--optimizer.options.b1", "0.9", "--optimizer.learning-rate", "1e-3"]
    config = parse_arguments(
        ConfigArguments, [str(EXAMPLE), *arguments], prog="maxmars train"
    ).config
    options = {"b1": 0.9, "gamma": 0.025, "weight_decay": 0.01}
    assert config.optimizer == OptaxConfig(
        make=f"{EXAMPLE}:mars_nadam", options=options, learning_rate=1e-3
    )
    check_optimizer(config.optimizer, Parameters(MODEL, mesh_of()))


DEFAULTS = """
raise RuntimeError("a file is not run before a run has joined the other processes")
B2 = 0.95

def make(lr=0.1, b1=0.9, *, decay: float = 0, steps=5, nesterov=True, scale="rms", b2=B2, mask=None,
         lowest=-1e-3, infinite=1e999, mesh=1, **more):
    ...

async def other(learning_rate, b3=1): ...

def plain(): ...
"""


def options_of(*words):
    return parse_arguments(ConfigArguments, words, prog="maxmars train").config.optimizer.options


def test_keyword_defaults_of_the_function_are_its_options(tmp_path):
    """Also where the command line names the function; what the config file gives counts more."""
    own = tmp_path / "own.py"
    own.write_text(DEFAULTS)
    spec, numbers = f"quickstart:optimizer={own}:make", {"b1": 0.9, "decay": 0.0, "steps": 5}
    defaults = numbers | {"nesterov": True, "scale": "rms", "lowest": -1e-3}
    assert options_of(spec) == defaults
    assert type(options_of(spec)["decay"]) is float
    typed = ("--optimizer.options.decay", "0.1", "--optimizer.options.nesterov", "False")
    assert options_of(spec, *typed) == defaults | {"decay": 0.1, "nesterov": False}
    assert options_of(f"quickstart:optimizer={own}:plain") == {}

    example = [str(EXAMPLE), "--optimizer.options.b1", "0.8", "--optimizer.options.steps", "3"]
    changed = options_of(*example, "--optimizer.make", f"{own}:make")
    assert changed == defaults | {"b1": 0.8, "steps": 3}  # nothing of the function before is left
    assert options_of(str(EXAMPLE), f"--optimizer.make={own}:make") == defaults | {"b1": 0.95}


@pytest.mark.seconds
def test_a_run_records_the_defaults_and_continues_with_them(tmp_path, source):
    """Python has the same options as the command line."""
    own = OptaxConfig(make=f"{source}:adamw", options={"b1": 0.8}, learning_rate=1e-2)
    config = short_config(tmp_path / "tokens", optimizer=own, num_steps=1)
    train(config, tmp_path / "run")
    options = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.1}
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["optimizer"]["options"]
    assert recorded == options
    table = (tmp_path / "run" / "parameters.txt").read_text()
    assert "b1=0.8, b2=0.95, weight_decay=0.1" in table
    options["b1"] = 0.9
    changed = dataclasses.replace(config, optimizer=dataclasses.replace(own, options=options))
    with refused(ValueError, "optimizer.options ({'b1': 0.8"):
        train(changed, tmp_path / "run")


@pytest.mark.parametrize(
    ("make", "options", "kind", "named"),
    [
        ("own.py:not_a_function", {}, ValueError, ["'not_a_function'"]),
        ("none.py:adamw", {}, FileNotFoundError, ["none.py"]),
        ("own.py:adamw", {"b3": 1}, ValueError, ["'b3'", "optimizer.options"]),
        ("own.py:plain", {"b3": 1}, ValueError, ["'b3'", "optimizer.options"]),
        ("own.py:refusing", {"b1": 2}, ValueError, ["b1=2"]),
        ("own.py:number", {}, ValueError, ["a int", "optax.GradientTransformation"]),
        ("own.py:forgetting", {}, ValueError, ["prev_grads="]),
        ("own.py:nowhere", {}, ValueError, ["requests there", "parameters"]),
        ("own.py:whenever", {}, ValueError, ["requests there", "float32", "bool []"]),
        ("own.py:sums", {}, ValueError, ["own.py:sums", "updates", "parameters"]),
        ("own.py:searching", {}, ValueError, ["'value_fn'"]),
        ("own.py:widening", {}, ValueError, ["m/h/", "bfloat16[", "float32[", "old.dtype"]),
        ("own.py:averaging", {}, ValueError, [" n ", "int32[]", "float32[]"]),
        ("own.py:growing", {}, ValueError, [" n ", "absent", "float32[]"]),
        ("own.py:regrouping", {}, ValueError, ["containers"]),
        ("own.py:keyed", {}, ValueError, ["0/rng_key", "key<fry>[]", "jax.random.key_data(key)"]),
        ("own.py:empty", {}, ValueError, [" n ", "float32[0]"]),
        ("own.py:injected", {}, ValueError, ["static_args='learning_rate'"]),
    ],
)
def test_wrong_functions_are_refused_before_anything_is_written(
    tmp_path, source, make, options, kind, named
):
    own = OptaxConfig(make=str(tmp_path / make), options=options, learning_rate=0.1)
    with refused(kind, *named):
        train(short_config(tmp_path / "tokens", optimizer=own), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make", ["schedule_free", "accumulating", "integer", "counting", "plain", "exact"]
)
def test_what_is_allowed_is_none_of_these(source, make):
    own = OptaxConfig(make=f"{source}:{make}", learning_rate=0.1)
    check_optimizer(own, Parameters(MODEL, mesh_of()))


@pytest.mark.seconds
def test_a_rate_that_the_optimizer_leaves_aside_is_no_metric(tmp_path, source):
    def trained(make):
        optimizer = OptaxConfig(make=f"{source}:{make}", learning_rate=1e-3)
        config = short_config(tmp_path / "tokens", num_steps=1, optimizer=optimizer)
        train(config, tmp_path / make)
        return (tmp_path / make / "metrics.jsonl").read_text()

    assert "train/learning_rate" not in trained("scheduled")
    assert "train/learning_rate" in trained("plain")


@pytest.mark.seconds
def test_what_a_rate_of_zero_makes_not_finite_is_told_apart(tmp_path, source):
    """Prodigy divides by sums that are zero after a step at the rate 0, where a warm-up begins."""

    def config(warmup):
        return short_config(
            tmp_path / "tokens",
            num_steps=3,
            optimizer=OptaxConfig(make=f"{source}:prodigy", learning_rate=1.0),
            schedule=ScheduleConfig(warmup_steps=warmup),
            checkpoint=CheckpointConfig(every=None),
        )

    with refused(ValueError, "--schedule.warmup-steps 0", "not finite") as error:
        train(config(warmup=2), tmp_path / "from_zero")
    assert "more schedule" not in in_words(error.value)  # which begins with the same rate
    assert np.isfinite(train(config(warmup=0), tmp_path / "run").eval_loss)
