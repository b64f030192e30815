"""A run that is steered by hand: to an older checkpoint, past examples, with a new optimizer."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from refusals import refused
from running import finish, records, start, start_python, start_two, wait_until

from maxmars.checkpoint import list_steps, read
from maxmars.cli import main
from maxmars.config import CheckpointConfig, EvalConfig, MuonConfig
from maxmars.optim import mars as mars_of
from maxmars.train import Steering, train
from maxmars.train.audit import audit
from maxmars.train.step import carried_over

BATCH = 16


def config_of(folder, num_steps=6):
    return tiny.short_config(
        folder / "tokens",
        num_steps=num_steps,
        eval=EvalConfig(every=3, num_windows=16, batch_size=16),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steered")
    train(config_of(folder), folder / "run")
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy" / "run"


def steer(run, num_steps=6, **steering):
    return train(config_of(run.parent, num_steps), run, steering=Steering(**steering))


def names(run):
    return {path.name for path in (run / "checkpoints").iterdir() if path.name[0].isdigit()}


def position(run, step):
    return read(run / "checkpoints", step).data_position


@pytest.mark.seconds
def test_back_to_a_checkpoint_the_steps_are_the_same(run):
    digest = read(run / "checkpoints").digest
    steer(run, rewind=2)
    assert names(run) == {"2", "4", "6", "4.rewound", "6.rewound"}
    assert read(run / "checkpoints").digest == digest
    audited = audit(run, replay=4, log=lambda text: None)
    assert audited.problems == []
    assert audited.orders == ["at step 2, back from step 6"]


@pytest.mark.seconds
def test_left_out_examples_are_told_and_replayed(run, capsys):
    digest = read(run / "checkpoints").digest
    steer(run, rewind=2, skip_examples=5)
    assert position(run, 2) == 2 * BATCH
    assert position(run, 6) == 6 * BATCH + 5
    assert read(run / "checkpoints").digest != digest
    main(["audit", str(run), "--replay", "4"])
    told = capsys.readouterr().out
    assert "32 to 37" in told
    assert "the same digest" in told
    with refused(ValueError, "--replay 6", "step 2"):  # over the place where they were left out
        audit(run, replay=6, log=lambda text: None)


@pytest.mark.slow
def test_an_order_is_carried_out_once(run):
    """As by a cluster that starts the same command again, here with nothing left to train."""
    steer(run, rewind=2, skip_examples=5)
    digest, files = read(run / "checkpoints").digest, names(run)
    steer(run, rewind=2, skip_examples=5)
    assert (read(run / "checkpoints").digest, names(run)) == (digest, files)
    steer(run, num_steps=8, rewind=2, skip_examples=5)  # it goes on to another end
    assert position(run, 8) == 8 * BATCH + 5
    steer(run, num_steps=8, rewind=4, skip_examples=5)  # another order
    assert position(run, 8) == 8 * BATCH + 10
    assert names(run) >= {"6.rewound", "6.rewound-2", "8.rewound"}
    config = dataclasses.replace(config_of(run.parent, 8), seed=1)  # the same of another config
    steering = Steering(rewind=4, skip_examples=5)
    train(config, run, steering=steering, resume_overrides=["seed"])
    assert position(run, 8) == 8 * BATCH + 10
    assert names(run) >= {"6.rewound-3", "8.rewound-2"}
    audited = audit(run, log=lambda text: None)
    assert audited.problems == []
    assert len(audited.orders) == 2


@pytest.mark.seconds
def test_a_kill_before_anything_is_saved_leaves_the_order_to_the_next_start(run):
    steer(run, rewind=2, skip_examples=5)
    for step in (4, 6):
        shutil.rmtree(run / "checkpoints" / str(step))
    steer(run, rewind=2, skip_examples=5)
    assert position(run, 6) == 6 * BATCH + 5
    audited = audit(run, log=lambda text: None)
    assert audited.problems == []
    assert "6" in audited.orders[0]


@pytest.mark.seconds
def test_a_kill_while_checkpoints_are_set_aside_leaves_the_order_to_the_next_start(run):
    (run / "checkpoints" / "4").rename(run / "checkpoints" / "4.rewound")
    steer(run, rewind=2, skip_examples=5)
    assert names(run) == {"2", "4", "6", "4.rewound", "6.rewound"}
    audited = audit(run, log=lambda text: None)
    assert audited.problems == []
    assert audited.orders == ["at step 2, back from step 6, examples 32 to 37 left out"]


def test_examples_are_left_out_from_the_newest_checkpoint_on(run):
    steer(run, num_steps=8, skip_examples=7)
    assert names(run) == {"2", "4", "6", "8"}
    assert position(run, 8) == 8 * BATCH + 7


@pytest.mark.slow
def test_the_moments_begin_at_zero_while_step_data_and_schedule_go_on(run):
    config = config_of(run.parent, 8)
    other = dataclasses.replace(config, optimizer=MuonConfig(learning_rate=1e-3))
    with refused(ValueError, "optimizer", "--new-optimizer-state"):
        train(other, run, resume_overrides=["optimizer"])
    undisturbed = run.parent / "undisturbed"
    shutil.copytree(run, undisturbed)
    train(config_of(run.parent, 8), undisturbed)
    steering = Steering(new_optimizer_state=True)
    for _ in range(2):  # the second finds nothing left to do
        train(config, run, steering=steering, resume_overrides=["optimizer"])
    ended = [read(some / "checkpoints") for some in (run, undisturbed)]
    assert ended[0].step == ended[1].step
    assert ended[0].data_position == ended[1].data_position
    assert ended[0].digest != ended[1].digest
    audited = audit(run, replay=2, log=lambda text: None)
    assert audited.problems == []
    assert "state of the optimizer" in audited.orders[0]
    with refused(ValueError, "--replay 8", "step 6"):
        audit(run, replay=8, log=lambda text: None)


MARS = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, MarsConfig
from tiny import short_config

def get_config():
    # A clip and a correction that change no bit, so that a run without them can be compared.
    return short_config(
        Path({folder!r}) / "tokens",
        optimizer=MarsConfig(learning_rate=1e-3, gamma=1e-30, clip_threshold=1e9),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
    )
"""


@pytest.mark.slow
def test_parts_of_mars_change_on_a_resume(tmp_path, capsys):
    run, names = tmp_path / "run", "optimizer.gamma,optimizer.clip_threshold"
    text = MARS.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    (tmp_path / "config.py").write_text(text)

    def train_mars(run, steps, *words):
        given = ["--workdir", str(run), "--num-steps", str(steps), "--num-processes", "1"]
        main(["train", str(tmp_path / "config.py"), *given, *words])

    train_mars(run, 2)
    shutil.copytree(run, tmp_path / "undisturbed")
    train_mars(tmp_path / "undisturbed", 4)
    words = ["--optimizer.gamma", "0", "--optimizer.clip-threshold", "None"]
    train_mars(run, 4, *words, "--resume-overrides", names)
    undisturbed = records(tmp_path / "undisturbed")
    assert records(run) == {key: pytest.approx(loss, rel=1e-6) for key, loss in undisturbed.items()}
    main(["audit", str(run), "--replay", "2"])
    assert "the same digest" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # the correction would need the gradient of before
        train_mars(run, 6, "--resume-overrides", names)
    told = capsys.readouterr().err
    assert "/last_grad/" in told
    assert "--new-optimizer-state" in told
    # The clip comes back without the correction, which needs no array.
    train_mars(run, 6, *words[:2], "--resume-overrides", names)
    assert audit(run, log=lambda text: None).problems == []


@pytest.mark.parametrize("variant", ["adamw", "m"])
@pytest.mark.parametrize(
    "change", [{"gamma": 0.0, "clip_threshold": None}, {"exact": True}], ids=str
)
def test_the_moments_of_mars_are_carried_over_bit_by_bit(variant, change):
    params = {"w": jnp.ones([3, 2]), "b": jnp.ones([2])}
    options = {"learning_rate": 1e-3, "variant": variant}
    new, other = (mars_of(**options, **some).init(params) for some in ({}, change))
    saved = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), new)
    changed = carried_over(saved, other)
    for name in ("mu", "nu", "ema"):
        before, *after = (
            [array for _, array in optax.tree.get_all_with_path(state, name)]
            for state in (saved, changed, carried_over(changed, new))
        )
        for arrays in after:
            assert jax.tree.all(jax.tree.map(np.array_equal, before, arrays))


@pytest.mark.seconds
def test_a_lie_about_what_was_left_out_is_found(run):
    steer(run, rewind=2, skip_examples=5)
    path = run / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    began = next(line for line in lines if line.get("order"))
    began["position"] = 2 * BATCH
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert audit(run, log=lambda text: None).problems


def test_orders_that_make_no_sense(tmp_path, run):
    before = names(run)
    for steering, named in (({"rewind": 3}, ["step 3", "2, 4, 6"]), ({"rewind": 0}, ["step 0"])):
        with refused(FileNotFoundError, *named):
            steer(run, **steering)
    assert names(run) == before
    for steering in (Steering(rewind=2), Steering(skip_examples=1)):
        with refused(ValueError, "--rewind", str(tmp_path / "new")):
            train(config_of(run.parent), tmp_path / "new", steering=steering)
    assert not (tmp_path / "new").exists()


CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from maxmars.config import CheckpointConfig, LionConfig
from tiny import ADAMW, tiny_config

def get_config():
    checkpoint = CheckpointConfig(every=2, keep_last=99)
    return tiny_config(num_steps=6, num_microbatches=1, optimizer=ADAMW, checkpoint=checkpoint)
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_are_killed_in_a_steered_session_and_go_on(tmp_path):
    """Bit by bit as one process that was left alone: back, past examples, with a new optimizer and
    a guard of gradient norms, which skips steps."""
    config = CONFIG.format(tests=str(Path(__file__).parents[1]))
    (tmp_path / "config.py").write_text(config)
    alone, two = tmp_path / "alone", tmp_path / "two"
    assert finish(start(tmp_path, "alone"))[0] == 0
    shutil.copytree(alone, two)
    (tmp_path / "config.py").write_text(config.replace("optimizer=ADAMW", "optimizer=LionConfig()"))
    until = "--num-steps 60 --checkpoint.every 10 --resume-overrides guard,optimizer"
    order = "--rewind 2 --skip-examples 5 --new-optimizer-state"
    guard = "--guard.grad-norm-spike-threshold 1 --guard.history 3 --guard.max-consecutive-skips 50"
    words = [*until.split(), *order.split(), *guard.split()]

    killed = start_two(tmp_path, "two", *words)
    try:
        wait_until(lambda: (30, "train/loss") in records(two), killed[0])
    finally:
        for process in killed:
            process.kill()
    for process in killed:
        finish(process)
    assert not (two / "checkpoints" / "60").exists()
    for code, output in map(finish, start_two(tmp_path, "two", *words)):
        assert code == 0, output
    code, output = finish(start(tmp_path, "alone", *words))
    assert code == 0, output
    ends = [read(run / "checkpoints") for run in (two, alone)]
    assert ends[0].step == 60
    assert ends[0].digest == ends[1].digest
    assert ends[0].data_position == ends[1].data_position == 60 * BATCH + 5
    skipped = tiny.values_of(two, "train/skipped")
    assert skipped == tiny.values_of(alone, "train/skipped")
    assert max(skipped.values()) > 0
    assert {"4.rewound", "6.rewound"} <= names(two)

    replay = str(60 - list_steps(two / "checkpoints")[-2])
    words = ["-m", "maxmars", "audit", two, "--replay", replay]
    code, output = finish(start_python(tmp_path, *words, devices=2))
    assert code == 0, output
    for told in ("back from step 6", "32 to 37", "a new state of the optimizer", "the same digest"):
        assert told in output
    journal = (two / "journal.jsonl").read_text()
    lines = [json.loads(line) for line in journal.splitlines()]
    for lie in (
        {"order": {"rewind": 4}},
        {"order": {"skip_examples": 6}},
        {"order": {"new_optimizer_state": False}},
        {"config": {"optimizer": {"learning_rate": 1.0}}},
        {"config": {"guard": {"grad_norm_spike_threshold": 2.0}}},
    ):
        told = [merged(line, lie) if line.get("order") else line for line in lines]
        (two / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
        assert audit(two, compare_arrays=False, log=lambda text: None).problems, lie
    (two / "journal.jsonl").write_text(journal)
    for key in ("train/skipped", "train/grad_norm"):
        metrics = (two / "metrics.jsonl").read_text()
        rows = [json.loads(row) for row in metrics.splitlines()]
        row = next(row for row in rows if row.get("train/skipped"))
        row[key] += 1
        (two / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        audited = audit(two, compare_arrays=False, log=lambda text: None)
        assert audited.problems == []
        assert "changed since step" in audited.metrics, key
        (two / "metrics.jsonl").write_text(metrics)
    (two / "journal.jsonl").write_text("\n".join(journal.splitlines()[1:]))
    with pytest.raises(SystemExit):
        main(["audit", str(two)])


def merged(line, lie):
    """The line with the fields of the lie, which may be groups."""
    return line | {
        name: merged(line[name], value) if isinstance(value, dict) else value
        for name, value in lie.items()
    }
