"""Steps, sweeping and setting aside, on local paths and on what looks like an object store."""

import importlib.util
import os

import pytest
from etils import epath

from maxmars.checkpoint import directory, list_steps


@pytest.fixture
def local(tmp_path):
    for step in (3, 20):
        (tmp_path / str(step) / "meta").mkdir(parents=True)
    return directory.resolve(tmp_path)


@pytest.fixture
def remote(local, monkeypatch):
    """The same directory, taken for one in a bucket."""
    monkeypatch.setattr(directory, "is_remote", lambda path: True)
    return local


def test_paths_of_buckets_stay_what_they_are():
    path = directory.resolve("gs://bucket/run/checkpoints")
    assert isinstance(path, epath.Path)
    assert os.fspath(path / "3") == "gs://bucket/run/checkpoints/3"
    assert directory.is_remote(path)


def test_local_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.fspath(directory.resolve("a/b")) == str(tmp_path / "a/b")
    assert os.fspath(directory.resolve("~/b")) == str(tmp_path / "b")
    assert not directory.is_remote(directory.resolve("a"))


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_what_buckets_need_is_said():
    for look in (directory.find, list_steps):
        with pytest.raises(
            ImportError,
            match=r"gs://bucket needs the library gcsfs: `pip install 'maxmars\[gcs\]'`",
        ):
            look("gs://bucket/run")


def test_what_counts_as_a_step(local):
    for name in ("4.damaged", "5.orbax-checkpoint-tmp", ".lock.d", "x"):
        (local / name).mkdir()
    (local / "6").touch()
    assert list_steps(local) == [3, 20]
    assert list_steps(local / "missing") == []


def test_sweep_leaves_all_but_unfinished_saves(local):
    for name in ("4.damaged", "5.orbax-checkpoint-tmp-12"):
        (local / name / "state").mkdir(parents=True)
    directory.sweep(local)
    assert {path.name for path in local.iterdir()} == {"3", "20", "4.damaged"}


def test_in_a_bucket_a_step_counts_once_it_is_committed(remote):
    (remote / "3" / "commit_success.txt").touch()
    assert list_steps(remote) == [3]
    directory.sweep(remote)
    assert {path.name for path in remote.iterdir()} == {"3"}


def test_names_of_what_is_set_aside(local):
    names = []
    for _ in range(3):
        names.append(directory.set_aside(local, 3).name)
        (local / "3").mkdir()
    assert names == ["3.damaged", "3.damaged-2", "3.damaged-3"]
    assert (local / "3.damaged" / "meta").is_dir()
