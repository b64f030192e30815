"""What may change when a run continues, and what of it is recorded."""

import dataclasses
import functools
import json
import shutil

import pytest
import tiny
from tiny import ADAMW, MODEL

from maxmars import sharding
from maxmars.config import EvalConfig, GuardConfig, ScheduleConfig
from maxmars.optimizer_config import AdoptConfig, MarsConfig
from maxmars.resume import continued_config
from maxmars.train import train


@pytest.fixture(scope="module")
def short_config(tmp_path_factory):
    """Makes configs of two steps."""
    return functools.partial(tiny.short_config, tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, short_config):
    """A run of two steps."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    train(short_config(), workdir)
    return workdir


@pytest.fixture
def continuing(two_steps, short_config):
    """The config that the run would continue with."""

    def continuing(config, *overrides, messages=None):
        return continued_config(
            short_config(),
            config,
            two_steps / "checkpoints",
            mesh=sharding.make_mesh(config.mesh),
            overrides=overrides,
            say=(messages if messages is not None else []).append,
        )

    return continuing


def rows_of(workdir, key):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_run_goes_on_with_another_rate_and_batch_size(two_steps, short_config, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(two_steps, workdir)
    config = short_config(
        num_steps=4,
        global_batch_size=8,
        optimizer=dataclasses.replace(ADAMW, learning_rate=1e-2),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=10**6),
        eval=EvalConfig(every=None),
    )
    names = ["optimizer.learning_rate", "global_batch_size"]
    train(config, workdir, resume_overrides=names)
    assert rows_of(workdir, "train/learning_rate")[4] == pytest.approx(1e-2)
    for step, position in ((2, 2 * 16), (4, 2 * 16 + 2 * 8)):
        meta = json.loads((workdir / "checkpoints" / str(step) / "meta" / "data.json").read_text())
        assert meta["data_position"] == position
    (line,) = (workdir / "config_changes.jsonl").read_text().splitlines()
    changes = json.loads(line)
    assert changes["step"] == 2
    assert changes["changed"]["optimizer.learning_rate"] == [6e-4, 1e-2]
    assert changes["changed"]["num_steps"] == [2, 4]
    train(config, workdir)  # from here on they are the run's own
    assert (workdir / "config_changes.jsonl").read_text().count("\n") == 1


def test_only_what_is_named_changes(continuing, short_config):
    messages = []
    fields = {"gradient_clip_norm": 2.0, "seed": 1, "guard": GuardConfig(history=5)}
    config = short_config(**fields)
    named = ("gradient_clip_norm", "seed", "guard")
    assert continuing(config, *named, messages=messages) == config
    assert messages[0].startswith("changed on purpose: seed from 0 to 1, gradient_clip_norm from")
    with pytest.raises(ValueError, match=r"seed \(0 there.*\. .* guard,gradient_clip_norm,seed\."):
        continuing(config, "guard", "gradient_clip_norm")
    assert continuing(short_config(), *named) == short_config()  # nothing left to change


def test_a_field_that_does_not_exist(continuing, short_config):
    with pytest.raises(ValueError, match=r"no such field \(did you mean optimizer\.weight_decay\?"):
        continuing(short_config(), "optimizer.weight_decy")
    with pytest.raises(ValueError, match=r"--resume-overrides x: the config has no such field;"):
        continuing(short_config(), "x")


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        (
            {"model": dataclasses.replace(MODEL, num_layers=2)},
            "model",
            r"params/h/.* is float32\[3,.* there and float32\[2,.* here\. .* another --workdir\.",
        ),
        (
            {"optimizer": MarsConfig()},
            "optimizer",
            r"that is another optimizer.* --init-from ",
        ),
        ({"optimizer": AdoptConfig()}, "optimizer", r"that is another optimizer"),
    ],
)
def test_what_does_not_fit_cannot_be_changed(continuing, short_config, changes, name, reason):
    config = short_config(**changes)
    with pytest.raises(ValueError, match=rf"--resume-overrides cannot change {name}.*: {reason}"):
        continuing(config, name)
    with pytest.raises(ValueError, match="holds another run") as error:
        continuing(config)
    assert "--resume-overrides" not in str(error.value)  # it would not help


def test_the_model_may_be_computed_in_another_way(continuing, short_config):
    config = short_config(model=dataclasses.replace(MODEL, document_end_id=256))
    assert continuing(config, "model.document_end_id") == config


def test_overrides_need_a_run(short_config, tmp_path):
    with pytest.raises(ValueError, match=r"there is no checkpoint in .*; leave it out, or check"):
        train(short_config(), tmp_path / "run", resume_overrides=["seed"])
    assert not (tmp_path / "run").exists()
