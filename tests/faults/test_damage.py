"""A damaged checkpoint is set aside and the one before it used; damaged tokens stop a run."""

import shutil
from pathlib import Path

import pytest
from running import records, train_here
from tiny import short_config

from maxmars.checkpoint import list_steps, read

pytestmark = pytest.mark.slow

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from maxmars.config import EvalConfig
from tiny import short_config

def get_config():
    evaluations = EvalConfig(every=5, num_windows=16, batch_size=16)
    return short_config(Path({tokens!r}), eval=evaluations)
"""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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
    """Tokens, a run of five steps on them with a checkpoint each, and the same one up to six."""
    folder = tmp_path_factory.mktemp("damage")
    short_config(folder / "tokens")
    tests = str(Path(__file__).parents[1])
    text = CONFIG.format(tests=tests, tokens=str(folder / "tokens"))
    (folder / "config.py").write_text(text)
    train_here(folder, "run", "--num-steps", 5)
    shutil.copytree(folder / "run", folder / "undisturbed")
    train_here(folder, "undisturbed", "--num-steps", 6)
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
    train_here(folder, run, "--num-steps", 6)
    printed = "".join(capsys.readouterr())
    assert "continuing from step 1" in printed
    assert "Traceback" not in printed
    assert list_steps(checkpoints) == [1, 2, 3, 4, 5, 6]
    for step in (2, 3, 4, 5):
        assert (checkpoints / f"{step}.damaged").is_dir()
        assert f"checkpoints/{step} skipped: " in printed
    assert_undisturbed(folder, run)


def test_damaged_tokens_stop_a_run_until_they_are_mended(folder, tmp_path, capsys):
    run = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    names = ("train_00000.bin", "train_00001.bin", "meta.json", "val_00000.bin")
    for damage, name in zip((flip, halve, empty, delete), names, strict=True):
        tokens = shutil.copytree(folder / "tokens", tmp_path / damage.__name__)
        damage(tokens / name)
        with pytest.raises(SystemExit) as stop:
            train_here(folder, run, "--num-steps", 6, "--data.path", tokens)
        assert stop.value.code == 1
        assert str(tokens / name) in capsys.readouterr().err
    tokens = shutil.copytree(folder / "tokens", tmp_path / "mended")
    train_here(folder, run, "--num-steps", 6, "--data.path", tokens)
    assert_undisturbed(folder, run)
