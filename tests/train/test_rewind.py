"""`maxmars rewind`: to an older checkpoint, past examples, on with a new optimizer."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refused, stopped
from running import (
    records,
    train_here,
    write_config,
)
from tiny import audited, six_steps

from maxmars.checkpoint import list_steps, read
from maxmars.checkpoint.lock import acquire
from maxmars.cli import main
from maxmars.config import MuonConfig
from maxmars.optim import mars as mars_of
from maxmars.train import train
from maxmars.train.rewind import rewind
from maxmars.train.step import match_by_type

BATCH = 16


@pytest.fixture
def run(six_step_copy):
    return six_step_copy


def go_on(run, num_steps=6, **changes):
    return train(dataclasses.replace(six_steps(run.parent, num_steps), **changes), run)


def rewound(run, to, **options):
    return rewind(run, to, log=lambda text: None, **options)


def names(run):
    return {path.name for path in (run / "checkpoints").iterdir() if path.name[0].isdigit()}


def position(run, step):
    return read(run / "checkpoints", step).data_position


@pytest.mark.seconds
def test_back_to_a_checkpoint_the_steps_are_the_same(run):
    digest = read(run / "checkpoints").digest
    rewound(run, 2)
    assert names(run) == {"2", "4.rewound", "6.rewound"}
    assert audited(run).problems == []
    go_on(run)
    assert names(run) == {"2", "4", "6", "4.rewound", "6.rewound"}
    assert read(run / "checkpoints").digest == digest
    found = audited(run, replay=4)
    assert found.problems == []
    assert found.rewinds == ["to step 2 from step 6"]


@pytest.mark.seconds
def test_left_out_examples_are_told_and_replayed(run, capsys):
    digest = read(run / "checkpoints").digest
    main(["rewind", str(run), "--to", "2", "--skip-examples", "5"])
    told = capsys.readouterr()
    assert "32 to 37" in told.err
    assert told.out.startswith("next: ")
    go_on(run)
    assert position(run, 2) == 2 * BATCH
    assert position(run, 6) == 6 * BATCH + 5
    assert read(run / "checkpoints").digest != digest
    main(["audit", str(run), "--replay", "4"])
    told = capsys.readouterr().out
    assert "32 to 37" in told
    assert "the same digest" in told
    with refused(ValueError, "--replay 6", "step 2"):  # over the place where they were left out
        audited(run, replay=6)


@pytest.mark.slow
def test_a_rewind_holds_until_a_later_step_is_saved_and_the_last_one_counts(run):
    rewound(run, 2, skip_examples=9)
    rewound(run, 2, skip_examples=5)  # in place of that, not besides
    go_on(run)
    digest, files = read(run / "checkpoints").digest, names(run)
    go_on(run)  # as a cluster starts it again, here with nothing left to train
    assert (read(run / "checkpoints").digest, names(run)) == (digest, files)
    for step in (4, 6):  # as if it had been killed before it saved anything
        shutil.rmtree(run / "checkpoints" / str(step))
    go_on(run, 8)
    assert position(run, 8) == 8 * BATCH + 5
    rewound(run, 4, skip_examples=5)
    go_on(run, 8)
    assert position(run, 8) == 8 * BATCH + 10
    assert names(run) >= {"6.rewound", "6.rewound-2", "8.rewound"}
    found = audited(run)
    assert found.problems == []
    assert [text.partition(",")[0] for text in found.rewinds] == [
        "to step 2 from step 6",
        "to step 4 from step 8",
    ]


@pytest.mark.seconds
def test_a_rewind_is_taken_back(run):
    """By another one before training goes on, or by hand."""
    rewound(run, 6, skip_examples=5)
    rewound(run, 6)
    rewound(run, 6)  # nothing is left to do
    rewound(run, 2, skip_examples=5)
    for step in (4, 6):
        (run / "checkpoints" / f"{step}.rewound").rename(run / "checkpoints" / str(step))
    go_on(run, 8)
    assert position(run, 8) == 8 * BATCH
    found = audited(run)
    assert found.problems == []
    assert found.rewinds == ["to step 6"]


class Killed(BaseException):
    """As good as a kill: no handler of errors takes it."""


class KillBeforeRename:
    """Ends a process at the rename of a number, once armed: all that `rewind` does are renames."""

    def __init__(self):
        self.left = None
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if event == "os.rename" and self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


@pytest.mark.slow
def test_killed_at_every_moment_it_is_done_by_the_same_command(run, tmp_path):
    (run / "wandb.json").write_text("{}")
    ends, number, kill, killed = {}, -1, KillBeforeRename(), True
    while killed:
        number += 1
        copy = shutil.copytree(run.parent, tmp_path / str(number)) / "run"
        kill.left = number
        try:
            rewound(copy, 2, skip_examples=5)
            killed = False
        except Killed:
            straight = Path(shutil.copytree(copy, copy.parent / "straight"))
            assert audited(straight).problems == []
            newest = list_steps(straight / "checkpoints")[-1]
            go_on(straight)  # from the newest that is left, or as rewound
            assert position(straight, 6) == 6 * BATCH + 5 * (newest == 2)
            assert audited(straight).problems == []
            rewound(copy, 2, skip_examples=5)
        kill.left = None
        assert (copy / "wandb.json.rewound").exists()
        lines = (copy / "journal.jsonl").read_text().splitlines()
        lines = [json.loads(line) | {"time": None} for line in lines]
        left = frozenset(names(copy)), json.dumps(lines)
        if left not in ends:  # else it goes on as the other one did
            go_on(copy)
            assert audited(copy).problems == []
            ends[left] = position(copy, 6), read(copy / "checkpoints").digest
    assert number == 4  # killed at the id of W&B, the journal, two checkpoints
    assert len(set(ends.values())) == 1


@pytest.mark.seconds
def test_examples_are_left_out_from_the_newest_checkpoint_on(run):
    rewound(run, 6, skip_examples=7)
    go_on(run, 8)
    assert names(run) == {"2", "4", "6", "8"}
    assert position(run, 8) == 8 * BATCH + 7


@pytest.mark.slow
def test_the_moments_begin_at_zero_while_step_data_and_schedule_go_on(run):
    config = six_steps(run.parent, 8)
    other = dataclasses.replace(config, optimizer=MuonConfig(learning_rate=1e-3))
    with refused(ValueError, "optimizer", f"maxmars rewind {run} --to 6 --new-optimizer-state"):
        train(other, run, resume_overrides=["optimizer"])
    main(["rewind", str(run), "--to", "6", "--new-optimizer-state"])
    for _ in range(2):  # the second finds nothing left to do
        train(other, run, resume_overrides=["optimizer"])
    ended = read(run / "checkpoints")
    assert (ended.step, ended.data_position) == (8, 8 * BATCH)
    found = audited(run, replay=2)
    assert found.problems == []
    assert "state of the optimizer" in found.rewinds[0]
    with refused(ValueError, "--replay 8", "step 6"):
        audited(run, replay=8)


# A clip and a correction that change no bit, so that a run without them can be compared.
MARS = """
    optimizer=MarsConfig(learning_rate=1e-3, gamma=1e-30, clip_threshold=1e9),
    eval=EvalConfig(every=None),
    checkpoint=CheckpointConfig(every=2, keep_last=9),
    model=dataclasses.replace(MODEL, num_layers=1),
"""


@pytest.mark.slow
def test_parts_of_mars_change_on_a_resume(tmp_path, capsys):
    run, names = tmp_path / "run", "optimizer.gamma,optimizer.clip_threshold"
    write_config(tmp_path, MARS, make="short_config")

    def train_mars(run, steps, *words):
        train_here(tmp_path, run, "--num-steps", steps, *words)

    train_mars("undisturbed", 4)
    shutil.copytree(tmp_path / "undisturbed", run)
    shutil.rmtree(run / "checkpoints" / "4")
    words = ["--optimizer.gamma", "0", "--optimizer.clip-threshold", "None"]
    train_mars(run, 4, *words, "--resume-overrides", names)
    undisturbed = records(tmp_path / "undisturbed")
    assert records(run) == {key: pytest.approx(loss, rel=1e-6) for key, loss in undisturbed.items()}
    main(["audit", str(run), "--replay", "2"])
    assert "the same digest" in capsys.readouterr().out
    # The correction would need the gradient of before.
    with stopped(1, "/last_grad/", "--new-optimizer-state"):
        train_mars(run, 6, "--resume-overrides", names)
    # The clip comes back without the correction, which needs no array.
    train_mars(run, 6, *words[:2], "--resume-overrides", names)
    assert audited(run).problems == []


@pytest.mark.parametrize("variant", ["adamw", "m"])
@pytest.mark.parametrize(
    "change", [{"gamma": 0.0, "clip_threshold": None}, {"exact": True}], ids=str
)
def test_the_moments_of_mars_are_carried_over_bit_by_bit(variant, change):
    params = {"w": jnp.ones([3, 2]), "b": jnp.ones([2])}
    options = {"learning_rate": 1e-3, "variant": variant}
    new, other = (mars_of(**options, **some).init(params) for some in ({}, change))
    saved = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), new)
    changed = match_by_type(saved, other)
    for name in ("mu", "nu", "ema"):
        before, *after = (
            [array for _, array in optax.tree.get_all_with_path(state, name)]
            for state in (saved, changed, match_by_type(changed, new))
        )
        for arrays in after:
            assert jax.tree.all(jax.tree.map(np.array_equal, before, arrays))


@pytest.mark.seconds
def test_a_lie_about_a_rewind_is_found(run):
    rewound(run, 2, skip_examples=5)
    go_on(run, 4)
    path = run / "journal.jsonl"
    written = path.read_text()
    for name in ("position", "skip_examples", "digest", "step"):
        lines = [json.loads(line) for line in written.splitlines()]
        told = next(line for line in lines if line["kind"] == "rewound")
        told[name] = "0" * 64 if name == "digest" else told[name] + 2
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert audited(run, compare_arrays=False).problems, name


@pytest.mark.seconds
def test_rewinds_that_make_no_sense(tmp_path, run):
    shutil.copytree(run / "checkpoints" / "2", tmp_path / "2")
    for file in (run / "checkpoints" / "4" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[::-1])

    def times():
        paths = [path for path in run.rglob("*") if path.name not in (".lock", "checkpoints")]
        return {path: path.stat().st_mtime_ns for path in paths}

    before = times()
    for words, named in (
        ([run, "--to", "3"], ["step 3", "2, 4, 6"]),
        ([run, "--to", "0"], ["step 0"]),
        ([run, "--to", "4"], ["step 4"]),
        ([tmp_path / "new", "--to", "2"], [str(tmp_path / "new")]),
        ([run / "checkpoints" / "2", "--to", "2"], ["2"]),
    ):
        with stopped(1, *named):
            main(["rewind", *map(str, words)])
    lock = acquire(run / "checkpoints")
    with refused(ValueError, run / "checkpoints"):
        rewound(run, 2)
    lock.release()
    assert times() == before


def test_a_session_with_a_field_of_another_version_is_refused_in_a_line(run):
    path = run / "journal.jsonl"
    began, *others = path.read_text().splitlines()
    told = json.loads(began) | {"order": {"skip_examples": 5}}
    path.write_text("\n".join([json.dumps(told), *others, ""]))
    for call in (lambda: go_on(run, 8), lambda: audited(run), lambda: rewound(run, 2)):
        with refused(ValueError, path, "step 0", "order", "--init-from"):
            call()
