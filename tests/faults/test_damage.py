"""A damaged checkpoint is set aside and the one before it used; damaged tokens stop a run."""

import shutil
from pathlib import Path

import pytest
from damage import flip, halve
from refusals import stopped
from running import records, train_here, write_config
from tiny import short_config

from maxmars.checkpoint import list_steps, read

pytestmark = pytest.mark.slow


def empty(path):
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(b"")


def delete(path):
    path.unlink()


def largest_array(checkpoint):
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens, an undisturbed run of six steps on them with a checkpoint each, and a copy that has
    those of the first five."""
    folder = tmp_path_factory.mktemp("damage")
    short_config(folder / "tokens")
    evaluations = "EvalConfig(every=5, num_windows=16, batch_size=16)"
    write_config(folder, f"num_steps=6, eval={evaluations}", make="short_config")
    train_here(folder, "undisturbed")
    shutil.copytree(folder / "undisturbed", folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "6")
    return folder


def assert_undisturbed(folder, run):
    end = read(folder / "undisturbed" / "checkpoints")
    assert read(run / "checkpoints").digests == end.digests
    assert records(run) == records(folder / "undisturbed")


def test_a_run_goes_on_before_every_kind_of_damage(folder, tmp_path, capsys):
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    checkpoints = run / "checkpoints"
    flip(largest_array(checkpoints / "2"))
    halve(largest_array(checkpoints / "3"))
    delete(largest_array(checkpoints / "4"))
    empty(checkpoints / "5")
    train_here(folder, run)
    printed = "".join(capsys.readouterr())
    assert "continuing from step 1" in printed
    assert "Traceback" not in printed
    assert list_steps(checkpoints) == [1, 2, 3, 4, 5, 6]
    for step in (2, 3, 4, 5):
        assert (checkpoints / f"{step}.damaged").is_dir()
        assert f"checkpoints/{step} skipped: " in printed
    assert_undisturbed(folder, run)


def test_damaged_tokens_stop_a_run_until_they_are_mended(folder, tmp_path):
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    names = ("train_00000.bin", "train_00001.bin", "meta.json", "val_00000.bin")
    for damage, name in zip((flip, halve, empty, delete), names, strict=True):
        tokens = shutil.copytree(folder / "tokens", tmp_path / damage.__name__)
        damage(tokens / name)
        with stopped(1, str(tokens / name)):
            train_here(folder, run, "--data.path", tokens)
    tokens = shutil.copytree(folder / "tokens", tmp_path / "mended")
    train_here(folder, run, "--data.path", tokens)
    assert_undisturbed(folder, run)
