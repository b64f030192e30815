"""`maxmars audit`: a sound run is one trajectory, and a planted lie is found."""

import dataclasses
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
    main(
        [
            "audit",
            str(six_step_run / "run"),
            "--replay",
            "2",
            "--output",
            str(tmp_path / "out.json"),
        ]
    )
    assert ": one trajectory, steps 0 to 6 (sessions: 2, " in capsys.readouterr().out
    assert caplog.text == ""
    written = json.loads((tmp_path / "out.json").read_text())
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


def another_position(workdir):
    return say_otherwise(workdir, data_position=6 * 16 + 4)


def another_count_of_tokens(workdir):
    return say_otherwise(workdir, step=4, tokens=1)


def another_config(workdir):
    config = json.loads((workdir / "config.json").read_text())
    return say_otherwise(workdir, step=4, config=config | {"seed": 1})


def other_data(workdir):
    return say_otherwise(workdir, data_digest="0" * 64)


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


def a_checkpoint_of_another_run(workdir):
    config = six_steps(workdir.parent, seed=1)
    train(dataclasses.replace(config, num_steps=2), workdir.parent / "other")
    shutil.rmtree(workdir / "checkpoints" / "2")
    shutil.copytree(workdir.parent / "other/checkpoints/2", workdir / "checkpoints" / "2")
    return "the checkpoint of step 2 is not of this run"


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


@pytest.mark.parametrize(
    "lie",
    [
        another_name,
        another_position,
        another_count_of_tokens,
        another_config,
        other_data,
        arrays_with_all_digests,
        arrays_with_digests_of_their_own,
        a_lost_newest_checkpoint,
        a_lost_checkpoint_before_a_save_that_a_kill_broke_off,
        arrays_of_another_step,
        a_checkpoint_of_another_run,
        an_edited_newest_save,
        a_damaged_line,
        a_lost_last_end,
        no_journal,
    ],
)
def test_a_lie_is_found(lie, six_step_copy, capsys):
    assert_broken(six_step_copy, lie(six_step_copy), capsys)


@pytest.mark.parametrize("name", LINES)
def test_another_line_of_the_journal_is_found(name, six_step_copy, capsys):
    edit(six_step_copy / "journal.jsonl", 1, lambda row: [LINES[name](row)])
    assert_broken(six_step_copy, NOT_WHOLE, capsys)


def assert_broken(run, expected, capsys):
    capsys.readouterr()
    with stopped(1):
        main(["audit", str(run)])
    output = capsys.readouterr().out
    assert output.startswith(f"{run}: broken, ")
    assert expected in output


@pytest.mark.parametrize(
    "lie",
    [another_position, other_data, arrays_with_all_digests, arrays_with_digests_of_their_own],
)
@pytest.mark.seconds
def test_a_run_does_not_go_on_from_a_lie(lie, six_step_copy):
    digest = read(six_step_copy / "checkpoints").digest
    lie(six_step_copy)
    train(six_steps(six_step_copy.parent), six_step_copy)
    names = {path.name for path in (six_step_copy / "checkpoints").iterdir()}
    assert {"2", "4", "6.damaged", "6"} <= names
    assert read(six_step_copy / "checkpoints").digest == digest


EDITS = {  # of a line of the metrics: a key that it has, its step, and lines in place of it
    "a loss": ("train/loss", 3, lambda row: [row | {"train/loss": 1.0}], 2),
    "an evaluation": ("eval/loss", 6, lambda row: [row | {"eval/loss": 1.0}], 6),
    "a speed": ("perf/tokens_per_sec", 3, lambda row: [row | {"perf/tokens_per_sec": 1e9}], 2),
    "twice": ("train/loss", 5, lambda row: [row, row], 4),
    "gone": ("train/loss", 1, lambda row: None, 0),
}


@pytest.mark.seconds
def test_a_damaged_state_is_told_without_errors_of_its_threads(six_step_copy):
    for file in (six_step_copy / "checkpoints" / "4" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    told = run_python("-m", "maxmars", "audit", six_step_copy, code=1)
    assert "step 4 is damaged" in told.stdout
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("name", EDITS)
def test_edited_metrics_are_told_and_make_no_run_broken(name, six_step_copy, capsys):
    path = six_step_copy / "metrics.jsonl"
    main(["audit", str(six_step_copy)])
    assert "  metrics.jsonl: as recorded\n" in capsys.readouterr().out
    key, step, change, since = EDITS[name]
    edit(path, line_with(path, key, step), change)
    main(["audit", str(six_step_copy)])  # exits with 0
    told = capsys.readouterr().out
    assert told.startswith(f"{six_step_copy}: one trajectory, ")
    assert f"  metrics.jsonl: changed since step {since}\n" in told


@pytest.mark.seconds
def test_without_metrics_steps_are_replayed_and_lies_about_states_are_found(six_step_copy):
    (six_step_copy / "metrics.jsonl").unlink()
    found = audited(six_step_copy, replay=2)
    assert (found.verdict, found.metrics) == ("one trajectory", "changed since step 0")
    assert found.replayed is not None
    expected = arrays_of_another_step(six_step_copy)
    assert [problem.startswith(expected) for problem in audited(six_step_copy).problems] == [True]


@pytest.mark.seconds
def test_what_a_kill_leaves_is_no_lie(six_step_copy):
    # A line that was being written, of a step that was not saved.
    with (six_step_copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/loss": 5.0}\n{"step": 8, "tr')
    found = audited(six_step_copy)
    assert (found.verdict, found.uncovered_metrics) == ("one trajectory", 1)
    train(dataclasses.replace(six_steps(six_step_copy.parent), num_steps=8), six_step_copy)
    found = audited(six_step_copy)
    assert found.verdict == "one trajectory"
    assert (found.last_step, found.sessions, found.uncovered_metrics) == (8, 3, 0)


@pytest.mark.seconds
def test_an_evaluation_that_a_later_session_makes_is_vouched_for(tmp_path):
    # As after SIGTERM at the step of an evaluation, which comes when the run goes on.
    config, run = six_steps(tmp_path), tmp_path / "run"
    train(dataclasses.replace(config, num_steps=4, eval=EvalConfig(every=None)), run)
    evaluating = dataclasses.replace(config.eval, every=2)
    train(dataclasses.replace(config, num_steps=4, eval=evaluating), run)
    assert audited(run).metrics == "as recorded"
    metrics = run / "metrics.jsonl"
    edit(metrics, line_with(metrics, "eval/loss", 4), lambda row: [row | {"eval/loss": 1.0}])
    assert audited(run).metrics == "changed since step 4"


@pytest.mark.seconds
def test_what_a_kill_leaves_of_a_deleted_checkpoint_is_no_lie(tmp_path):
    config, run = six_steps(tmp_path), tmp_path / "run"
    train(config, run)
    shutil.copytree(run / "checkpoints/4/meta", tmp_path / "meta")
    train(dataclasses.replace(config, num_steps=8, checkpoint=CheckpointConfig(every=2)), run)
    shutil.copytree(tmp_path / "meta", run / "checkpoints/4/meta")  # the run keeps two: 6 and 8
    assert audited(run).verdict == "one trajectory"
    shutil.rmtree(run / "checkpoints/6/state")
    assert [text.split(" is ")[0] for text in audited(run).problems] == ["the checkpoint of step 6"]


@pytest.mark.slow
def test_a_run_in_64_bits_is_audited_in_64_bits(tmp_path):
    model = dataclasses.replace(MODEL, param_dtype="float64", compute_dtype="float64")
    with jax.enable_x64(True):
        config = dataclasses.replace(six_steps(tmp_path, model=model), num_steps=1)
        train(config, tmp_path / "run")
        assert audited(tmp_path / "run").verdict == "one trajectory"
    with refused(ValueError, tmp_path / "run", "float64", "JAX_ENABLE_X64=1"):
        audited(tmp_path / "run")
    assert audited(tmp_path / "run", compare_arrays=False).verdict == "one trajectory"


@pytest.mark.seconds
def test_steps_after_a_change_on_purpose_are_replayed_with_the_config_that_made_them(six_step_copy):
    """The checkpoints of steps 6 and 10 have no statistics of norms, that of step 8 has some."""
    config = six_steps(
        six_step_copy.parent, optimizer=dataclasses.replace(ADAMW, learning_rate=1e-2)
    )
    config = dataclasses.replace(config, schedule=ScheduleConfig(warmup_steps=0, decay_steps=12))
    guard = GuardConfig(grad_norm_spike_threshold=9.0, max_consecutive_skips=9)
    overrides = ["optimizer.learning_rate", "guard"]
    undisturbed = six_step_copy.parent / "undisturbed"
    shutil.copytree(six_step_copy, undisturbed)
    train(
        dataclasses.replace(config, num_steps=8, guard=guard),
        six_step_copy,
        resume_overrides=overrides,
    )
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
    longer = dataclasses.replace(config, num_steps=10)
    train(longer, six_step_copy, resume_overrides=overrides)
    train(longer, undisturbed, resume_overrides=overrides[:1])  # the guard changes no update
    assert read(six_step_copy / "checkpoints").digest == read(undisturbed / "checkpoints").digest
    assert audited(six_step_copy, replay=2).problems == []
    for step in ("4", "6"):  # the journal tells when it changed
        shutil.rmtree(six_step_copy / "checkpoints" / step)
    assert audited(six_step_copy, replay=2).problems == []


@pytest.mark.seconds
def test_steps_of_an_own_optimizer_are_replayed_only_with_the_text_that_made_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    config = six_steps(tmp_path, optimizer=optimizer)
    train(dataclasses.replace(config, num_steps=4), tmp_path / "run")
    own.write_text(OWN.replace("optax.adam(learning_rate)", "optax.adam(learning_rate, b1=0.8)"))
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    config = dataclasses.replace(config, optimizer=optimizer)
    train(config, tmp_path / "run", resume_overrides=["optimizer.make"])
    found = audited(tmp_path / "run", replay=2)
    assert found.replayed == "steps 5 to 6, computed again: the same digest"
    shutil.move(own, tmp_path / "elsewhere.py")  # the run keeps a copy
    assert audited(tmp_path / "run", replay=2).replayed == found.replayed
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


@pytest.mark.seconds
def test_steps_of_a_run_shorter_than_its_warmup_can_be_replayed(tmp_path):
    config = dataclasses.replace(six_steps(tmp_path), schedule=ScheduleConfig(warmup_steps=9))
    train(config, tmp_path / "run")
    found = audited(tmp_path / "run", replay=2)
    assert found.replayed == "steps 5 to 6, computed again: the same digest"


def test_steps_that_cannot_be_replayed_are_told_before_arrays_are_read(six_step_run):
    told = []
    with refused(ValueError, "--replay 3", "2, 4, 6"):
        audit(six_step_run / "run", replay=3, log=told.append)
    assert told == []


def test_what_cannot_be_audited(six_step_run, tmp_path):
    for arguments, code, named in (
        ([str(tmp_path)], 1, tmp_path),
        ([str(six_step_run / "run"), "--replay", "0"], 2, "replay=0"),
        ([str(six_step_run / "run"), "--replay", "3"], 1, "2, 4, 6"),
    ):
        with stopped(code, named):
            main(["audit", *arguments])
