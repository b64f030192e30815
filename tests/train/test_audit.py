"""`maxmars audit`: a sound run is one trajectory, and a planted lie is found."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import pytest
import tiny
from refusals import refused
from tiny import ADAMW, MODEL

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


def config_of(folder, **changes):
    return tiny.short_config(
        folder / "tokens",
        num_steps=6,
        eval=EvalConfig(every=3, num_windows=16, batch_size=16),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
        **changes,
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run of 6 steps in two sessions, of which the first was ended after 4."""
    folder = tmp_path_factory.mktemp("audited")
    config = config_of(folder)
    train(dataclasses.replace(config, num_steps=4), folder / "run")
    train(config, folder / "run")
    return folder


@pytest.fixture
def copied(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy" / "run"


def check(workdir, **arguments):
    return audit(workdir, log=lambda text: None, **arguments)


@pytest.mark.seconds
def test_a_sound_run_is_one_trajectory(sound, tmp_path, capsys, caplog):
    main(["audit", str(sound / "run"), "--replay", "2", "--output", str(tmp_path / "out.json")])
    assert ": one trajectory, steps 0 to 6 (sessions: 2, " in capsys.readouterr().out
    assert caplog.text == ""
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["verdict"] == "one trajectory"
    assert written["replayed"] == "steps 5 to 6, computed again: the same digest"
    assert written["config_changes"] == [
        "at step 4: num_steps 4 -> 6, schedule.decay_steps None -> 4"
    ]


def test_the_directory_of_its_checkpoints_means_the_run(sound):
    audited = check(sound / "run" / "checkpoints")
    assert (audited.workdir, audited.verdict) == (str(sound / "run"), "one trajectory")


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
    config = config_of(workdir.parent, seed=1)
    train(dataclasses.replace(config, num_steps=2), workdir.parent / "other")
    shutil.rmtree(workdir / "checkpoints" / "2")
    shutil.copytree(workdir.parent / "other/checkpoints/2", workdir / "checkpoints" / "2")
    return "the checkpoint of step 2 is not of this run"


def an_edited_line(workdir):
    edit(workdir / "journal.jsonl", 1, lambda row: [row | {"position": 999}])
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


def an_edited_newest_save(workdir):
    edit(workdir / "journal.jsonl", 5, lambda row: [row | {"position": 999}])
    return "journal.jsonl lacks the line of the checkpoint of step 6"


def a_damaged_line(workdir):
    path = workdir / "journal.jsonl"
    path.write_text(path.read_text().replace('"saved"', '"sa"ved', 1))
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


def a_line_without_a_field(workdir):
    edit(workdir / "journal.jsonl", 1, lambda row: [{k: row[k] for k in row if k != "position"}])
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


def a_line_of_no_kind(workdir):
    edit(workdir / "journal.jsonl", 1, lambda row: [row | {"kind": "stored"}])
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


def a_line_of_other_types(workdir):
    edit(workdir / "journal.jsonl", 1, lambda row: [row | {"metrics": None}])
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


def a_field_more(workdir):
    edit(workdir / "journal.jsonl", 1, lambda row: [row | {"note": "all is well"}])
    return "journal.jsonl is not whole: its line `saved` of step 4 was not written after the line"


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
        an_edited_line,
        an_edited_newest_save,
        a_damaged_line,
        a_line_without_a_field,
        a_line_of_no_kind,
        a_line_of_other_types,
        a_field_more,
        a_lost_last_end,
        no_journal,
    ],
)
def test_a_lie_is_found(lie, copied, capsys):
    expected = lie(copied)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["audit", str(copied)])
    assert exit_info.value.code == 1
    output = capsys.readouterr().out
    assert output.startswith(f"{copied}: broken, ")
    assert expected in output


@pytest.mark.parametrize(
    "lie",
    [another_position, other_data, arrays_with_all_digests, arrays_with_digests_of_their_own],
)
@pytest.mark.seconds
def test_a_run_does_not_go_on_from_a_lie(lie, copied):
    digest = read(copied / "checkpoints").digest
    lie(copied)
    train(config_of(copied.parent), copied)
    names = {path.name for path in (copied / "checkpoints").iterdir()}
    assert {"2", "4", "6.damaged", "6"} <= names
    assert read(copied / "checkpoints").digest == digest


EDITS = {  # of a line of the metrics: a key that it has, its step, and lines in place of it
    "a loss": ("train/loss", 3, lambda row: [row | {"train/loss": 1.0}], 2),
    "an evaluation": ("eval/loss", 6, lambda row: [row | {"eval/loss": 1.0}], 6),
    "a speed": ("perf/tokens_per_sec", 3, lambda row: [row | {"perf/tokens_per_sec": 1e9}], 2),
    "twice": ("train/loss", 5, lambda row: [row, row], 4),
    "gone": ("train/loss", 1, lambda row: None, 0),
}


@pytest.mark.seconds
def test_a_damaged_state_is_told_without_errors_of_its_threads(copied):
    for file in (copied / "checkpoints" / "4" / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:1000])
    command = [sys.executable, "-m", "maxmars", "audit", str(copied)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert "step 4 is damaged" in told.stdout
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize("name", EDITS)
def test_edited_metrics_are_told_and_make_no_run_broken(name, copied, capsys):
    path = copied / "metrics.jsonl"
    main(["audit", str(copied)])
    assert "  metrics.jsonl: as recorded\n" in capsys.readouterr().out
    key, step, change, since = EDITS[name]
    edit(path, line_with(path, key, step), change)
    main(["audit", str(copied)])  # exits with 0
    told = capsys.readouterr().out
    assert told.startswith(f"{copied}: one trajectory, ")
    assert f"  metrics.jsonl: changed since step {since}\n" in told


@pytest.mark.seconds
def test_without_metrics_steps_are_replayed_and_lies_about_states_are_found(copied):
    (copied / "metrics.jsonl").unlink()
    audited = check(copied, replay=2)
    assert (audited.verdict, audited.metrics) == ("one trajectory", "changed since step 0")
    assert audited.replayed is not None
    expected = arrays_of_another_step(copied)
    assert [problem.startswith(expected) for problem in check(copied).problems] == [True]


@pytest.mark.seconds
def test_what_a_kill_leaves_is_no_lie(copied):
    # A line that was being written, of a step that was not saved.
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/loss": 5.0}\n{"step": 8, "tr')
    audited = check(copied)
    assert (audited.verdict, audited.uncovered_metrics) == ("one trajectory", 1)
    train(dataclasses.replace(config_of(copied.parent), num_steps=8), copied)
    audited = check(copied)
    assert audited.verdict == "one trajectory"
    assert (audited.last_step, audited.sessions, audited.uncovered_metrics) == (8, 3, 0)


@pytest.mark.seconds
def test_an_evaluation_that_a_later_session_makes_is_vouched_for(tmp_path):
    # As after SIGTERM at the step of an evaluation, which comes when the run goes on.
    config, run = config_of(tmp_path), tmp_path / "run"
    train(dataclasses.replace(config, num_steps=4, eval=EvalConfig(every=None)), run)
    evaluating = dataclasses.replace(config.eval, every=2)
    train(dataclasses.replace(config, num_steps=4, eval=evaluating), run)
    assert check(run).metrics == "as recorded"
    metrics = run / "metrics.jsonl"
    edit(metrics, line_with(metrics, "eval/loss", 4), lambda row: [row | {"eval/loss": 1.0}])
    assert check(run).metrics == "changed since step 4"


@pytest.mark.seconds
def test_what_a_kill_leaves_of_a_deleted_checkpoint_is_no_lie(tmp_path):
    config, run = config_of(tmp_path), tmp_path / "run"
    train(config, run)
    shutil.copytree(run / "checkpoints/4/meta", tmp_path / "meta")
    train(dataclasses.replace(config, num_steps=8, checkpoint=CheckpointConfig(every=2)), run)
    shutil.copytree(tmp_path / "meta", run / "checkpoints/4/meta")  # the run keeps two: 6 and 8
    assert check(run).verdict == "one trajectory"
    shutil.rmtree(run / "checkpoints/6/state")
    assert [text.split(" is ")[0] for text in check(run).problems] == ["the checkpoint of step 6"]


@pytest.mark.slow
def test_a_run_in_64_bits_is_audited_in_64_bits(tmp_path):
    model = dataclasses.replace(MODEL, param_dtype="float64", compute_dtype="float64")
    with jax.enable_x64(True):
        config = dataclasses.replace(config_of(tmp_path, model=model), num_steps=1)
        train(config, tmp_path / "run")
        assert check(tmp_path / "run").verdict == "one trajectory"
    with refused(ValueError, tmp_path / "run", "float64", "JAX_ENABLE_X64=1"):
        check(tmp_path / "run")
    assert check(tmp_path / "run", compare_arrays=False).verdict == "one trajectory"


@pytest.mark.seconds
def test_steps_after_a_change_on_purpose_are_replayed_with_the_config_that_made_them(copied):
    """The checkpoints of steps 6 and 10 have no statistics of norms, that of step 8 has some."""
    config = config_of(copied.parent, optimizer=dataclasses.replace(ADAMW, learning_rate=1e-2))
    config = dataclasses.replace(config, schedule=ScheduleConfig(warmup_steps=0, decay_steps=12))
    guard = GuardConfig(grad_norm_spike_threshold=9.0, max_consecutive_skips=9)
    overrides = ["optimizer.learning_rate", "guard"]
    undisturbed = copied.parent / "undisturbed"
    shutil.copytree(copied, undisturbed)
    train(dataclasses.replace(config, num_steps=8, guard=guard), copied, resume_overrides=overrides)
    audited = check(copied, replay=2)
    assert audited.replayed == "steps 7 to 8, computed again: the same digest"
    (change,) = (line for line in audited.config_changes if line.startswith("at step 6: "))
    assert all(name in change for name in overrides)
    assert (
        check(copied, replay=4).replayed
        == "steps 3 to 6 (of 2 sessions), computed again: the same digest"
    )
    with refused(ValueError, "--replay 8", "step 6"):
        check(copied, replay=8)

    before, after = (set(read(copied / "checkpoints", step).types) for step in (6, 8))
    assert {name.split("/")[0] for name in before ^ after} == {"guard"}
    longer = dataclasses.replace(config, num_steps=10)
    train(longer, copied, resume_overrides=overrides)
    train(longer, undisturbed, resume_overrides=overrides[:1])  # the guard changes no update
    assert read(copied / "checkpoints").digest == read(undisturbed / "checkpoints").digest
    assert check(copied, replay=2).problems == []
    for step in ("4", "6"):  # the journal tells when it changed
        shutil.rmtree(copied / "checkpoints" / step)
    assert check(copied, replay=2).problems == []


@pytest.mark.seconds
def test_steps_of_an_own_optimizer_are_replayed_only_with_the_text_that_made_them(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    config = config_of(tmp_path, optimizer=optimizer)
    train(dataclasses.replace(config, num_steps=4), tmp_path / "run")
    own.write_text(OWN.replace("optax.adam(learning_rate)", "optax.adam(learning_rate, b1=0.8)"))
    optimizer = OptaxConfig(make=f"{own}:make", learning_rate=1e-3)
    config = dataclasses.replace(config, optimizer=optimizer)
    train(config, tmp_path / "run", resume_overrides=["optimizer.make"])
    audited = check(tmp_path / "run", replay=2)
    assert audited.replayed == "steps 5 to 6, computed again: the same digest"
    shutil.move(own, tmp_path / "elsewhere.py")  # the run keeps a copy
    assert check(tmp_path / "run", replay=2).replayed == audited.replayed
    kept = tmp_path / "run" / "sources" / "optimizer" / "own.py"
    own.write_text(OWN)  # where the file lay in training: only the run's copy counts
    for count, named in ((6, ["step 4"]), (4, ["steps 1 to 4", kept])):
        with refused(ValueError, f"--replay {count}", *named):
            check(tmp_path / "run", replay=count)
    kept.write_text(OWN)
    audited = check(tmp_path / "run", replay=4)
    assert audited.replayed == "steps 1 to 4, computed again: the same digest"
    assert str(kept) in " ".join(audited.code)
    assert audited.verdict == "one trajectory"


@pytest.mark.seconds
def test_steps_of_a_run_shorter_than_its_warmup_can_be_replayed(tmp_path):
    config = dataclasses.replace(config_of(tmp_path), schedule=ScheduleConfig(warmup_steps=9))
    train(config, tmp_path / "run")
    audited = check(tmp_path / "run", replay=2)
    assert audited.replayed == "steps 5 to 6, computed again: the same digest"


def test_steps_that_cannot_be_replayed_are_told_before_arrays_are_read(sound):
    told = []
    with refused(ValueError, "--replay 3", "2, 4, 6"):
        audit(sound / "run", replay=3, log=told.append)
    assert told == []


def test_what_cannot_be_audited(sound, tmp_path, capsys):
    for arguments, expected in (
        ([str(tmp_path)], str(tmp_path)),
        ([str(sound / "run"), "--replay", "0"], "replay=0"),
        ([str(sound / "run"), "--replay", "3"], "2, 4, 6"),
    ):
        with pytest.raises(SystemExit):
            main(["audit", *arguments])
        errors = capsys.readouterr().err
        assert expected in errors
        assert "Traceback" not in errors
