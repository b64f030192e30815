"""A damaged checkpoint is set aside and the one before it used; damaged tokens stop a run."""

import shutil
from pathlib import Path

import pytest
from running import records
from tiny import short_config

from maxmars import cli
from maxmars.checkpoint import read

pytestmark = pytest.mark.slow

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny import short_config

def get_config():
    return short_config(Path({tokens!r}))
"""


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def largest_array(checkpoint):
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens, a run of four steps on them with a checkpoint each, and the same one up to six."""
    folder = tmp_path_factory.mktemp("damage")
    short_config(folder / "tokens")
    tests = str(Path(__file__).parents[1])
    text = CONFIG.format(tests=tests, tokens=str(folder / "tokens"))
    (folder / "config.py").write_text(text)
    train(folder, folder / "run", 4)
    shutil.copytree(folder / "run", folder / "undisturbed")
    train(folder, folder / "undisturbed", 6)
    return folder


def train(folder, workdir, num_steps, *options):
    words = ["train", str(folder / "config.py"), "--workdir", str(workdir)]
    words += ["--num-steps", str(num_steps), "--num-processes", "1"]
    cli.main([*words, *map(str, options)])


@pytest.mark.parametrize("damage", [flip, halve, empty, delete])
def test_a_damaged_checkpoint(folder, tmp_path, capsys, damage):
    run = shutil.copytree(folder / "run", tmp_path / "run")
    damage(largest_array(run / "checkpoints" / "4"))
    train(folder, run, 6)
    printed = capsys.readouterr()
    assert "continuing from step 3" in printed.out + printed.err
    assert (run / "checkpoints" / "4.damaged").is_dir()
    end = read(folder / "undisturbed" / "checkpoints")
    assert read(run / "checkpoints").digests == end.digests
    assert records(run) == records(folder / "undisturbed")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "train_00000.bin"),
        (halve, "train_00001.bin"),
        (empty, "meta.json"),
        (delete, "val_00000.bin"),
    ],
)
def test_damaged_tokens(folder, tmp_path, capsys, damage, name):
    run = shutil.copytree(folder / "run", tmp_path / "run")
    tokens = shutil.copytree(folder / "tokens", tmp_path / "tokens")
    damage(tokens / name)
    with pytest.raises(SystemExit) as stop:
        train(folder, run, 6, "--data.path", tokens)
    assert stop.value.code == 1
    assert str(tokens / name) in capsys.readouterr().err
    tokens = shutil.copytree(folder / "tokens", tmp_path / "mended")
    train(folder, run, 6, "--data.path", tokens)
    end = read(folder / "undisturbed" / "checkpoints")
    assert read(run / "checkpoints").digests == end.digests
