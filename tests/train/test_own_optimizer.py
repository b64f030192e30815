"""Optimizers of the user's own: trained, continued, planned, and refused in one line."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from refusals import refused
from tiny import MODEL, first_difference, first_state, random_batch, short_config, values_of
from trees import mesh_of

from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import AdamWConfig, CheckpointConfig, EvalConfig, OptaxConfig, ScheduleConfig
from maxmars.config.errors import in_words
from maxmars.model.parameters import Parameters
from maxmars.train import train
from maxmars.train.optimizer import check_optimizer
from maxmars.train.step import init_train_state

EXAMPLE = Path(__file__).parents[2] / "tools" / "examples" / "own_optimizer.py"
SOURCE = """
import functools
import jax, jax.numpy as jnp, optax, optax.contrib
from maxmars.optim import GradientRequest, mars, with_requests

def adamw(learning_rate, *, matrix_specs, mesh, b1=0.9, b2=0.95, weight_decay=0.1):
    decays = jax.tree.map(lambda spec: spec.is_matrix and not spec.embedding, matrix_specs)
    return optax.adamw(learning_rate, b1=b1, b2=b2, weight_decay=weight_decay, mask=decays)

def keeping(learning_rate, *, matrix_specs, mesh):
    return optax.GradientTransformation(lambda params: params, lambda g, s, params=None: (g, s))

def scheduled(learning_rate):
    return optax.adam(optax.linear_schedule(1e-2, 1e-3, 10))

def sgd(learning_rate):
    return optax.sgd(learning_rate)

exact = functools.partial(mars, exact=True)

def requesting(**request):
    tx = optax.with_extra_args_support(optax.sgd(0.1))
    return lambda rate: with_requests(tx, [GradientRequest(name="there", **request)])

def stateful(state, change):
    update = lambda g, s, params=None: (g, change(s))
    return lambda rate, **options: optax.GradientTransformation(lambda params: state, update)
"""
SMALL = dataclasses.replace(MODEL, num_layers=1)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    return str(tmp_path / "own.py")


def config_of(folder, **changes):
    rare = {"checkpoint": CheckpointConfig(every=None), "eval": EvalConfig(every=None)}
    changes = {"model": SMALL} | rare | changes
    return short_config(folder / "tokens", **changes)


@pytest.mark.seconds
def test_a_state_made_of_the_parameters_begins_with_those_of_the_run(source, tmp_path):
    optimizer = OptaxConfig(make=f"{source}:keeping", learning_rate=1e-3)
    config = config_of(tmp_path, optimizer=optimizer)
    step, state = first_state(config)
    params = jax.tree.map(lambda x: x + 1, state.params)
    state = init_train_state(config, step.parameters, {"params": params})
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, state.params)
    state, metrics = step(state, random_batch(step))  # donates every array once
    assert metrics["train/skipped"] == 0


@pytest.mark.seconds
def test_it_trains_as_the_same_optimizer_of_the_package_and_no_other_continues(tmp_path, source):
    config, run = config_of(tmp_path, optimizer=AdamWConfig(learning_rate=1e-2)), tmp_path / "run"
    train(config, tmp_path / "package")
    own = OptaxConfig(make=f"{source}:adamw", options={"b1": 0.9}, learning_rate=1e-2)
    config = dataclasses.replace(config, optimizer=own)
    train(config, run)
    assert first_difference(tmp_path / "package", run) is None
    assert [*values_of(run, "train/learning_rate")] == [1, 2]
    options = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1}  # with the function's defaults
    assert json.loads((run / "config.json").read_text())["optimizer"]["options"] == options
    assert "b1=0.9, b2=0.95, weight_decay=0.1" in (run / "parameters.txt").read_text()

    def refusal(text, *named, options=own.options, overrides=()):
        Path(source).write_text(text)
        other = OptaxConfig(make=f"{source}:adamw", options=options, learning_rate=1e-2)
        with refused(ValueError, *named):
            more = dataclasses.replace(config, optimizer=other, num_steps=3)
            train(more, run, resume_overrides=[*overrides])

    refusal(SOURCE, "optimizer.options ({'b1': 0.9", options={"b1": 0.8})
    # The function's state is another now, as that of an optimizer of another version would be.
    lion = SOURCE.replace("optax.adamw(learning_rate, b1=b1, b2=b2", "optax.lion(learning_rate")
    refusal(lion, source, run / "sources", f"--init-from {run}")
    state = ("opt_state/0/nu/", f"--init-from {run}")
    refusal(lion, *state, overrides=["optimizer.make"])
    # It requests a gradient at the parameters of the step before, which no checkpoint has.
    requests = '[GradientRequest(name="previous", at="prev_params")]'
    text = SOURCE.replace("return optax.adamw(", "return with_requests(optax.adamw(")
    text = text.replace("mask=decays)", f"mask=decays), requests={requests})")
    refusal(text, "prev_params/", "--new-optimizer-state", overrides=["optimizer.make"])


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


# What `make` is in a file after `SOURCE`, wrong in one way; its options; and what is named.
WRONG = [
    ("1", {}, ["'make'"]),
    ("sgd", {"b3": 1}, ["'b3'", "optimizer.options"]),
    ("lambda rate, *, b1, **options: int(f'b1={b1}')", {"b1": 2}, ["b1=2"]),
    ("lambda rate: 1", {}, ["a int", "optax.GradientTransformation"]),
    (
        "lambda rate, *, matrix_specs: optax.chain(exact(rate, matrix_specs=matrix_specs))",
        {},
        ["prev_grads="],
    ),
    (
        "requesting(at=lambda state, params: params['wte'])",
        {},
        ["requests there", "parameters"],
    ),
    ("requesting(due=lambda state: jnp.zeros(3))", {}, ["requests there", "float32", "bool []"]),
    (
        "lambda rate: optax.stateless(lambda updates, params: jax.tree.map(jnp.sum, updates))",
        {},
        ["own.py:make", "updates", "parameters"],
    ),
    ("lambda rate: optax.lbfgs(rate)", {}, ["'value_fn'"]),
    (
        "stateful({'m': jnp.bfloat16(0)}, lambda s: {'m': s['m'] + jnp.float32(1)})",
        {},
        [" m ", "bfloat16[", "float32[", "old.dtype"],
    ),
    ("stateful({}, lambda s: {'n': jnp.zeros([])})", {}, [" n ", "absent", "float32[]"]),
    ("stateful([jnp.zeros([])], lambda s: tuple(s))", {}, ["containers"]),
    ("stateful({'n': jnp.zeros([0])}, lambda s: s)", {}, [" n ", "float32[0]"]),
    (
        "lambda rate: optax.add_noise(0.01, 0.55, 0)",
        {},
        ["rng_key", "key<fry>[]", "jax.random.key_data(key)"],
    ),
    (
        "lambda rate: optax.inject_hyperparams(optax.adam)(rate)",
        {},
        ["static_args='learning_rate'"],
    ),
]


@pytest.mark.parametrize(("make", "options", "named"), WRONG)
def test_wrong_functions_are_refused_before_anything_is_written(
    tmp_path, source, make, options, named
):
    Path(source).write_text(f"{SOURCE}\nmake = {make}\n")
    own = OptaxConfig(make=f"{source}:make", options=options, learning_rate=0.1)
    with refused(ValueError, *named):
        train(config_of(tmp_path, optimizer=own), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "make",
    [
        "sgd",
        "lambda rate: optax.MultiSteps(optax.adam(rate), 2).gradient_transformation()",
        "exact",
        "stateful({'n': 0}, lambda s: {'n': s['n'] + 1})",
    ],
)
def test_what_is_allowed_is_none_of_these(source, make):
    Path(source).write_text(f"{SOURCE}\nmake = {make}\n")
    own = OptaxConfig(make=f"{source}:make", learning_rate=0.1)
    check_optimizer(own, Parameters(MODEL, mesh_of()))


@pytest.mark.seconds
def test_a_rate_that_the_optimizer_leaves_aside_is_no_metric(tmp_path, source):
    optimizer = OptaxConfig(make=f"{source}:scheduled", learning_rate=1e-3)
    train(config_of(tmp_path, num_steps=1, optimizer=optimizer), tmp_path / "run")
    assert values_of(tmp_path / "run", "train/learning_rate") == {}


@pytest.mark.seconds
def test_what_a_rate_of_zero_makes_not_finite_is_told_apart(tmp_path):
    """Prodigy divides by sums that are zero after a step at the rate 0, where a warm-up begins."""
    optimizer = OptaxConfig(make="optax.contrib:prodigy", learning_rate=1.0)
    config = config_of(tmp_path, optimizer=optimizer, schedule=ScheduleConfig(warmup_steps=2))
    with refused(ValueError, "--schedule.warmup-steps 0", "not finite") as error:
        train(config, tmp_path / "run")
    assert "more schedule" not in in_words(error.value)  # which begins with the same rate
