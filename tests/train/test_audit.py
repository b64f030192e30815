"""`maxmars audit`: a sound run is one trajectory, and a planted lie is found."""

import dataclasses
import functools
import json
import shutil

import jax
import pytest
from refusals import refused, stopped
from running import run_python
from tiny import ADAMW, MODEL, audited, six_steps

from maxmars.checkpoint import read
from maxmars.checkpoint.reader import checksum
from maxmars.cli import main
from maxmars.config import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    OptaxConfig,
    ScheduleConfig,
)
from maxmars.train import train
from maxmars.train.audit import audit

OWN = """
import jax, optax

def make(learning_rate, *, matrix_specs, mesh):
    labels = jax.tree.map(lambda spec: "rule/adam", matrix_specs)  # a slash in a key of its state
    return optax.multi_transform({"rule/adam": optax.adam(learning_rate)}, labels)
"""


@pytest.mark.seconds
def test_a_sound_run_is_one_trajectory(six_step_run, tmp_path, capsys, caplog):
    output = tmp_path / "out.json"
    main(["audit", str(six_step_run / "run"), "--replay", "2", "--output", str(output)])
    assert ": one trajectory, steps 0 to 6 (sessions: 2, " in capsys.readouterr().out
    assert caplog.text == ""
    written = json.loads(output.read_text())
    assert written["verdict"] == "one trajectory"
    assert written["replayed"] == "steps 5 to 6, computed again: the same digest"
    assert written["config_changes"] == [
        "at step 4: num_steps 4 -> 6, schedule.decay_steps None -> 4"
    ]


def test_the_directory_of_its_checkpoints_means_the_run(six_step_run):
    found = audited(six_step_run / "run" / "checkpoints")
    assert (found.workdir, found.verdict) == (str(six_step_run / "run"), "one trajectory")


def edit(path, number, change):
    """Change a line of a file; None takes it away."""
    lines = path.read_text().splitlines()
    changed = change(json.loads(lines[number]))
    lines[number : number + 1] = [] if changed is None else [json.dumps(line) for line in changed]
    path.write_text("\n".join([*lines, ""]))


def line_with(path, key, step):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return next(i for i, row in enumerate(rows) if key in row and row["step"] == step)


def another_name(workdir):
    checkpoints = workdir / "checkpoints"
    shutil.rmtree(checkpoints / "2")
    shutil.copytree(checkpoints / "4", checkpoints / "2")
    return "step 2: meta is that of step 4"


def say_otherwise(workdir, *, step=6, **said):
    """Have a checkpoint say something else of itself, with a checksum made anew."""
    path = workdir / "checkpoints" / str(step) / "meta" / "data.json"
    meta = json.loads(path.read_text()) | said
    path.write_text(json.dumps(meta | {"checksum": checksum(meta)}))
    return f"step {step}: meta has another {[*said][-1]} than "


def another_config(workdir):
    config = json.loads((workdir / "config.json").read_text())
    return say_otherwise(workdir, step=4, config=config | {"seed": 1})


def arrays_of_step_4(workdir, *digests):
    checkpoints = workdir / "checkpoints"
    shutil.rmtree(checkpoints / "6" / "state")
    shutil.copytree(checkpoints / "4" / "state", checkpoints / "6" / "state")
    other = json.loads((checkpoints / "4/meta/data.json").read_text())
    return say_otherwise(workdir, **{name: other[name] for name in digests})


def arrays_with_all_digests(workdir):
    return arrays_of_step_4(workdir, "leaves", "digest")


def arrays_with_digests_of_their_own(workdir):
    return arrays_of_step_4(workdir, "leaves").replace("leaves", "digest")


def a_lost_newest_checkpoint(workdir):
    shutil.rmtree(workdir / "checkpoints" / "6")
    return "the checkpoint of step 6, complete by journal.jsonl, is gone"


def a_lost_checkpoint_before_a_save_that_a_kill_broke_off(workdir):
    edit(workdir / "journal.jsonl", 6, lambda row: None)
    (workdir / "summary.json").unlink()
    for step in "46":
        shutil.rmtree(workdir / "checkpoints" / step)
    return "the checkpoint of step 4, complete by journal.jsonl, is gone"


def arrays_of_another_step(workdir):
    checkpoints = workdir / "checkpoints"
    shutil.rmtree(checkpoints / "4" / "state")
    shutil.copytree(checkpoints / "2" / "state", checkpoints / "4" / "state")
    return "the checkpoint of step 4 is damaged"


def an_edited_newest_save(workdir):
    edit(workdir / "journal.jsonl", 5, lambda row: [row | {"position": 999}])
    return "journal.jsonl lacks the line of the checkpoint of step 6"


def a_damaged_line(workdir):
    path = workdir / "journal.jsonl"
    path.write_text(path.read_text().replace('"saved"', '"sa"ved', 1))
    return NOT_WHOLE


NOT_WHOLE = "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"
LINES = {  # in place of the line of the first save
    "another position": lambda row: row | {"position": 999},
    "without a field": lambda row: {name: row[name] for name in row if name != "position"},
    "of no kind": lambda row: row | {"kind": "stored"},
    "of other types": lambda row: row | {"metrics": None},
    "with a field more": lambda row: row | {"note": "all is well"},
}


def a_lost_last_end(workdir):
    edit(workdir / "journal.jsonl", 6, lambda row: None)
    return "journal.jsonl lacks its last line of step 6, see summary.json"


def no_journal(workdir):
    (workdir / "journal.jsonl").unlink()
    return "journal.jsonl lacks the line of the checkpoint of step 6"


LIES = (
    another_name,
    functools.partial(say_otherwise, data_position=6 * 16 + 4),
    functools.partial(say_otherwise, data_digest="0" * 64),
    functools.partial(say_otherwise, step=4, tokens=1),
    another_config,
    arrays_with_all_digests,
    arrays_with_digests_of_their_own,
    a_lost_newest_checkpoint,
    a_lost_checkpoint_before_a_save_that_a_kill_broke_off,
    arrays_of_another_step,
    an_edited_newest_save,
    a_damaged_line,
    a_lost_last_end,
    no_journal,
)


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie, six_step_copy, capsys):
    assert_broken(six_step_copy, lie(six_step_copy), capsys)


@pytest.mark.parametrize("name", LINES)
def test_another_line_of_the_journal_is_found(name, six_step_copy, capsys):
    edit(six_step_copy / "journal.jsonl", 1, lambda row: [LINES[name](row)])
    assert_broken(six_step_copy, NOT_WHOLE, capsys)


def test_a_checkpoint_of_another_run_is_found(finished_run, six_step_copy, capsys):
    checkpoint = six_step_copy / "checkpoints" / "2"
    shutil.rmtree(checkpoint)
    shutil.copytree(finished_run / "checkpoints" / "2", checkpoint)
    assert_broken(six_step_copy, "the checkpoint of step 2 is not of this run", capsys)


def assert_broken(run, expected, capsys):
    capsys.readouterr()
    with stopped(1):
        main(["audit", str(run)])
    output = capsys.readouterr().out
    assert output.startswith(f"{run}: broken, ")
    assert expected in output


@pytest.mark.parametrize("lie", [arrays_with_all_digests, arrays_with_digests_of_their_own])
@pytest.mark.seconds
def test_a_run_does_not_go_on_from_a_lie(lie, six_step_copy):
    digest = read(six_step_copy / "checkpoints").digest
    lie(six_step_copy)
    train(six_steps(six_step_copy.parent), six_step_copy)
    names = {path.name for path in (six_step_copy / "checkpoints").iterdir()}
    assert {"2", "4", "6.damaged", "6"} <= names
    assert read(six_step_copy / "checkpoints").digest == digest


EDITS = (  # of a line of the metrics: a key that it has, its step, and lines in place of it
    ("train/loss", 3, lambda row: [row | {"train/loss": 1.0}], 2),
    ("eval/loss", 6, lambda row: [row | {"eval/loss": 1.0}], 6),
    ("perf/tokens_per_sec", 3, lambda row: [row | {"perf/tokens_per_sec": 1e9}], 2),
    ("train/loss", 5, lambda row: [row, row], 4),
    ("train/loss", 1, lambda row: None, 0),
)


@pytest.mark.seconds
def test_a_damaged_state_is_told_without_errors_of_its_threads(six_step_copy):
    for file in (six_step_copy / "checkpoints" / "4" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    told = run_python("-m", "maxmars", "audit", six_step_copy, code=1)
    assert "step 4 is damaged" in told.stdout
    assert "Traceback" not in told.stderr


def test_edited_metrics_are_told_and_make_no_run_broken(six_step_copy, capsys):
    path = six_step_copy / "metrics.jsonl"
    assert audited(six_step_copy, compare_arrays=False).metrics == "as recorded"
    recorded = path.read_text()
    for key, step, change, since in EDITS:
        path.write_text(recorded)
        edit(path, line_with(path, key, step), change)
        found = audited(six_step_copy, compare_arrays=False)
        assert (found.verdict, found.metrics) == ("one trajectory", f"changed since step {since}")
    path.unlink()
    main(["audit", str(six_step_copy)])  # exits with 0
    assert "  metrics.jsonl: changed since step 0\n" in capsys.readouterr().out


@pytest.mark.seconds
def test_what_a_kill_leaves_is_no_lie(six_step_copy):
    # A line that was being written, of a step that was not saved.
    with (six_step_copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/loss": 5.0}\n{"step": 8, "tr')
    found = audited(six_step_copy)
    assert (found.verdict, found.uncovered_metrics) == ("one trajectory", 1)
    train(six_steps(six_step_copy.parent, 8), six_step_copy)
    found = audited(six_step_copy)
    assert found.verdict == "one trajectory"
    assert (found.last_step, found.sessions, found.uncovered_metrics) == (8, 3, 0)


@pytest.mark.seconds
def test_an_evaluation_that_a_later_session_makes_is_vouched_for(six_step_copy):
    # As after SIGTERM at the step of an evaluation, which comes when the run goes on.
    config = six_steps(six_step_copy.parent, 8)
    for every in (None, 2):
        evaluations = dataclasses.replace(config.eval, every=every)
        train(dataclasses.replace(config, eval=evaluations), six_step_copy)
    assert audited(six_step_copy).metrics == "as recorded"
    metrics = six_step_copy / "metrics.jsonl"
    edit(metrics, line_with(metrics, "eval/loss", 8), lambda row: [row | {"eval/loss": 1.0}])
    assert audited(six_step_copy).metrics == "changed since step 8"


@pytest.mark.seconds
def test_what_a_kill_leaves_of_a_deleted_checkpoint_is_no_lie(six_step_copy, tmp_path):
    checkpoints = six_step_copy / "checkpoints"
    shutil.copytree(checkpoints / "4" / "meta", tmp_path / "meta")
    config = six_steps(six_step_copy.parent, 8)
    train(dataclasses.replace(config, checkpoint=CheckpointConfig(every=2)), six_step_copy)
    shutil.copytree(tmp_path / "meta", checkpoints / "4" / "meta")  # the run keeps two: 6 and 8
    assert audited(six_step_copy).verdict == "one trajectory"
    shutil.rmtree(checkpoints / "6" / "state")
    (problem,) = audited(six_step_copy).problems
    assert problem.startswith("the checkpoint of step 6 is ")


@pytest.mark.slow
def test_a_run_in_64_bits_is_audited_in_64_bits(tmp_path):
    model = dataclasses.replace(MODEL, param_dtype="float64", compute_dtype="float64")
    with jax.enable_x64(True):
        config = six_steps(tmp_path, 1, model=model)
        train(dataclasses.replace(config, eval=EvalConfig(every=None)), tmp_path / "run")
        assert audited(tmp_path / "run").verdict == "one trajectory"
    with refused(ValueError, tmp_path / "run", "float64", "JAX_ENABLE_X64=1"):
        audited(tmp_path / "run")
    assert audited(tmp_path / "run", compare_arrays=False).verdict == "one trajectory"


@pytest.mark.seconds
def test_steps_after_a_change_on_purpose_are_replayed_with_the_config_that_made_them(six_step_copy):
    """The checkpoints of steps 6 and 10 have no statistics of norms, that of step 8 has some."""
    faster = dataclasses.replace(ADAMW, learning_rate=1e-2)
    schedule = ScheduleConfig(warmup_steps=0, decay_steps=12)
    config = six_steps(six_step_copy.parent, 8, optimizer=faster, schedule=schedule)
    guard = GuardConfig(grad_norm_spike_threshold=9.0, max_consecutive_skips=9)
    overrides = ["optimizer.learning_rate", "guard"]
    train(dataclasses.replace(config, guard=guard), six_step_copy, resume_overrides=overrides)
    found = audited(six_step_copy, replay=2)
    assert found.replayed == "steps 7 to 8, computed again: the same digest"
    (change,) = (line for line in found.config_changes if line.startswith("at step 6: "))
    assert all(name in change for name in overrides)
    assert (
        audited(six_step_copy, replay=4).replayed
        == "steps 3 to 6 (of 2 sessions), computed again: the same digest"
    )
    with refused(ValueError, "--replay 8", "step 6"):
        audited(six_step_copy, replay=8)

    before, after = (set(read(six_step_copy / "checkpoints", step).types) for step in (6, 8))
    assert {name.split("/")[0] for name in before ^ after} == {"guard"}
    train(dataclasses.replace(config, num_steps=10), six_step_copy, resume_overrides=overrides)
    for step in ("4", "6"):  # the journal tells when it changed
        shutil.rmtree(six_step_copy / "checkpoints" / step)
    assert audited(six_step_copy, replay=2).problems == []


@pytest.mark.seconds
def test_steps_of_an_own_optimizer_are_replayed_only_with_the_text_that_made_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    warmup = ScheduleConfig(warmup_steps=9)  # longer than the run, of which a replay is a part
    config = six_steps(tmp_path, optimizer=optimizer, schedule=warmup)
    train(dataclasses.replace(config, num_steps=4), tmp_path / "run")
    own.write_text(OWN.replace("optax.adam(learning_rate)", "optax.adam(learning_rate, b1=0.8)"))
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    config = dataclasses.replace(config, optimizer=optimizer)
    train(config, tmp_path / "run", resume_overrides=["optimizer.make"])
    shutil.move(own, tmp_path / "elsewhere.py")  # the run keeps a copy
    found = audited(tmp_path / "run", replay=2)
    assert found.replayed == "steps 5 to 6, computed again: the same digest"
    kept = tmp_path / "run" / "sources" / "optimizer" / "own.py"
    own.write_text(OWN)  # where the file lay in training: only the run's copy counts
    for count, named in ((6, ["step 4"]), (4, ["steps 1 to 4", kept])):
        with refused(ValueError, f"--replay {count}", *named):
            audited(tmp_path / "run", replay=count)
    kept.write_text(OWN)
    found = audited(tmp_path / "run", replay=4)
    assert found.replayed == "steps 1 to 4, computed again: the same digest"
    assert str(kept) in " ".join(found.code)
    assert found.verdict == "one trajectory"


def test_steps_that_cannot_be_replayed_are_told_before_arrays_are_read(six_step_run):
    told = []
    with refused(ValueError, "--replay 3", "2, 4, 6"):
        audit(six_step_run / "run", replay=3, log=told.append)
    assert told == []


def test_what_cannot_be_audited(six_step_run, tmp_path):
    for arguments, code, named in (
        ([str(tmp_path)], 1, tmp_path),
        ([str(six_step_run / "run"), "--replay", "0"], 2, "replay=0"),
    ):
        with stopped(code, named):
            main(["audit", *arguments])
