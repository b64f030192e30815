"""Damaged bookkeeping neither stops a run nor changes it, and what can be written anew is."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny

from maxmars.checkpoint import read
from maxmars.config import CheckpointConfig
from maxmars.train import train
from maxmars.train.init_from import InitFrom
from maxmars.train.metrics import read_metrics
from maxmars.train.verify_resume import first_difference

LINES = ("metrics.jsonl", "sessions.jsonl", "receipts.jsonl")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of 2 steps from the weights of another, and its config to go on with."""
    folder = tmp_path_factory.mktemp("bookkeeping")
    config = tiny.short_config(
        folder / "tokens", num_steps=4, checkpoint=CheckpointConfig(every=2, keep_last=9)
    )
    train(dataclasses.replace(config, num_steps=1), folder / "origin", quiet=True)
    start = InitFrom(path=str(folder / "origin"))
    short = dataclasses.replace(config, num_steps=2)
    train(short, folder / "run", init_from=start, quiet=True)
    shutil.copytree(folder / "run", folder / "sound")
    train(config, folder / "sound", quiet=True)
    return config, folder


@pytest.mark.slow
def test_no_damage_of_bookkeeping_stops_a_run_or_changes_it(stopped, tmp_path, caplog):
    config, folder = stopped
    run, sound = tmp_path / "run", folder / "sound"
    shutil.copytree(folder / "run", run)
    damaged_lines = ["[" * 100_000, '{"step": 1e999, "kind": "began"}', "\0" * 50]
    for name in LINES:
        with (run / name).open("a") as file:
            file.write("\n".join(damaged_lines) + '\n{"cut off')
    link = Path("nowhere/nothing")
    for name in ("config.json", "verified/host_000.jsonl"):
        (run / name).unlink()
        (run / name / "inside").mkdir(parents=True)
    for name in ("environment.json", "logs/host_000.log"):
        (run / name).unlink()
        (run / name).symlink_to(link)
    (run / "parameters.txt").write_bytes(b"\xff\0")
    shutil.rmtree(run / "tokenizer")
    (run / "tokenizer").symlink_to(link)
    (run / "skipped_steps").write_text("no directory")
    (run / "init_from.json").write_text('{"path": 7}')

    start = InitFrom(path=str(folder / "origin"))
    train(config, run, init_from=start, quiet=True)
    assert first_difference(sound, run) is None
    assert read_metrics(run)[0]["step"] == read_metrics(sound)[0]["step"]
    names = ("config.json", "environment.json", "data.json", "parameters.txt")
    for name in (*names, "tokenizer/tokenizer_config.json"):
        assert (run / name).read_bytes() == (sound / name).read_bytes()
    origin = json.loads((run / "init_from.json").read_text())
    assert origin == json.loads((sound / "init_from.json").read_text())
    for name in LINES:
        assert (run / f"{name}.damaged").read_text().splitlines() == [*damaged_lines, '{"cut off']
        assert f"{name}: 3 damaged of " in caplog.text
    for name in ("config.json", "environment.json", "tokenizer", "skipped_steps"):
        assert f"{run / name} cannot be used; it is now {name}.damaged" in caplog.text
    assert (run / "config.json.damaged" / "inside").is_dir()
    assert (run / "tokenizer.damaged").readlink() == link

    caplog.clear()  # it was said once
    train(dataclasses.replace(config, num_steps=5), run, quiet=True)
    assert caplog.text == ""


def damage_of_metrics(kind, text):
    lines = text.splitlines(keepends=True)
    if kind == "a_number_changed":
        number = next(n for n, line in enumerate(lines) if '"train/loss": ' in line)
        lines[number] = lines[number].replace('"train/loss": ', '"train/loss": 1')
    return "" if kind == "all_lost" else "".join(lines if kind == "a_number_changed" else lines[2:])


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "kind",
    [
        "a_number_changed",
        pytest.param("lines_lost", marks=slow),
        pytest.param("all_lost", marks=slow),
    ],
)
def test_metrics_that_are_not_what_was_recorded_are_told(stopped, tmp_path, caplog, kind):
    config, folder = stopped
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(damage_of_metrics(kind, text))
    train(config, run, quiet=True)
    assert "metrics.jsonl is not what was recorded between steps 0 and 2" in caplog.text
    assert read(run / "checkpoints").digest == read(folder / "sound" / "checkpoints").digest


@slow
def test_a_lost_receipt_is_told(stopped, tmp_path, caplog):
    config, folder = stopped
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    (run / "receipts.jsonl").unlink()
    train(config, run, quiet=True)
    assert "receipts.jsonl lacks receipts of step 2 or before; the run goes on" in caplog.text
