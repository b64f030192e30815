"""Optimizers of optax by name, `optax.contrib:adopt`: made, masked, planned, and refused.

`tests/cli/test_train_every_optimizer.py` trains them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from refusals import refused, stopped
from tiny import MODEL, SOPHIA_FILE, random_params

from maxmars.cli import main
from maxmars.config import AdamWConfig, ModuleConfig, OptaxConfig, load_config
from maxmars.model.parameters import Parameters
from maxmars.train.optimizer import check_optimizer, make_optimizer

PARAMETERS = Parameters(MODEL)
DECAYS = jax.tree.map(lambda kind: kind == "matrix", PARAMETERS.kinds)
LARS = {"weight_decay": 0.1, "trust_ratio_mask": False}


def named(make, learning_rate=1e-2, **options):
    made = OptaxConfig(make=make, options=options, learning_rate=learning_rate)
    return made.with_defaults()


def assert_same_trajectory(tx, other):
    """Three steps of two optimizers are equal bit by bit."""
    results = []
    for each in (tx, other):
        params = random_params(MODEL)
        state, update = each.init(params), jax.jit(each.update)
        for seed in (1, 2, 3):
            updates, state = update(random_params(MODEL, seed), state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    ("optimizer", "equal"),
    [
        (
            named("optax.contrib:adopt"),
            lambda rate: optax.chain(
                optax.contrib.scale_by_adopt(0.9, 0.9999, 1e-6),
                optax.add_decayed_weights(0.0, DECAYS),
                optax.scale_by_learning_rate(rate),
            ),
        ),
        (
            named("optax:adamw", b2=0.95, weight_decay=0.1),
            lambda rate: make_optimizer(AdamWConfig(), PARAMETERS, rate),
        ),
        (
            named("optax:lars", **LARS),  # whose argument is called weight_decay_mask
            lambda rate: optax.lars(rate, weight_decay_mask=DECAYS, **LARS),
        ),
    ],
    ids=["adopt", "adamw", "lars"],
)
def test_what_decays_is_filled_in(optimizer, equal):
    rate = jnp.float32(1e-2)
    assert_same_trajectory(make_optimizer(optimizer, PARAMETERS, rate), equal(rate))


@pytest.mark.parametrize(
    "make",
    [
        *(f"optax:{name}" for name in ("lamb", "adafactor", "sm3", "novograd", "radam", "adan")),
        *(f"optax.contrib:{n}" for n in ("adopt", "prodigy", "cocob", "schedule_free_adamw")),
    ],
)
def test_those_that_take_gradients_state_and_parameters(make):
    check_optimizer(named(make), PARAMETERS)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("optax.contrib:sophia", ["obj_fn"]),
        ("optax.contrib:momo", ["'value'"]),
        ("optax.contrib:muon", ["embeddings", "optimizer=muon"]),
        ("optax:lbfgs", ["'value_fn'"]),
        ("optax.contrib:mechanize", ["'init'"]),
        ("optax:apply_if_finite", ["max_consecutive_errors"]),
    ],
)
def test_those_that_need_more(make, words):
    with refused(ValueError, make, *words):
        check_optimizer(named(make), PARAMETERS)


@pytest.mark.parametrize("make", ["optax.contrib:adoptt", "optaxx:adam", "optax:contrib"])
def test_there_is_none_of_this_name(make):
    with refused(ValueError, f"optimizer.make={make!r}", make.partition(":")[2]):
        named(make)


def test_a_model_is_named_by_its_file_alone():
    with refused(ValueError, "model.make='flax.nnx:Linear'", "my_model.py:make"):
        ModuleConfig(make="flax.nnx:Linear", vocab_size=8, max_seq_len=8)


def test_options_are_the_defaults_of_the_package():
    config = load_config("gpt2:optimizer=optax.contrib:adopt")
    assert config.name == "gpt2-small-adopt"
    assert config.optimizer.options == {
        "b1": 0.9,
        "b2": 0.9999,
        "eps": 1e-6,
        "mu_dtype": None,
        "nesterov": False,
        "use_clipping": True,
    }
    assert "weight_decay_mask" not in named("optax:lars").options


SIZE = """--num-steps 4 --global-batch-size 8 --schedule.warmup-steps 1
    --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --model.max-seq-len 16
    --model.scan-unroll 1 --eval.num-windows 8 --eval.batch-size 8"""


def test_it_is_refused_in_a_line(byte_tokens, tmp_path):
    words = ["train", f"quickstart:data={byte_tokens},optimizer=optax:lbfgs", *SIZE.split()]
    with stopped(1, "optimizer.make='optax:lbfgs'") as errors:
        main([*words, "--num-processes", "1", "--workdir", str(tmp_path / "run")])
    assert errors.getvalue().count("error:") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("name", "field", "buffer"),
    [("optax.contrib:adopt", "b1", "nu"), (f"{SOPHIA_FILE}:sophia", "rho", "hessian")],
    ids=["adopt", "sophia"],
)
@pytest.mark.seconds
def test_it_is_planned_and_compared(name, field, buffer, byte_tokens, tmp_path, capsys):
    config, size = f"quickstart:data={byte_tokens}", SIZE.split()
    main(["plan", f"{config},optimizer={name}", "--topology", "cpu:1", *size])
    printed = capsys.readouterr().out
    assert name.partition(":")[2] in printed
    assert buffer in printed
    words = ["--tune", "learning_rate", field, "--workdir", str(tmp_path), "--dry-run"]
    main(["compare", config, "--optimizers", "mars", name, *words, *size])
    assert name.partition(":")[2] in capsys.readouterr().out
