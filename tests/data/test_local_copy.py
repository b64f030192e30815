import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest
from tiny import tiny_config
from token_directories import write_nanogpt, write_shards

from maxmars.data import local_copy as module
from maxmars.data.formats import open_split
from maxmars.data.local_copy import local_copy
from maxmars.data.pipeline import open_data
from maxmars.data_config import MixtureConfig, MixturePart, TokenShardsConfig

STREAM = np.random.default_rng(0).integers(0, 257, 5000)
VAL = STREAM[:1000]
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def source(tmp_path):
    write_shards(tmp_path / "bucket", STREAM, VAL, vocab_size=257)
    (tmp_path / "bucket" / "raw_text.parquet").write_bytes(b"not for reading tokens")
    return tmp_path / "bucket"


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def test_a_copy_has_what_reading_takes_and_is_made_once(source, tmp_path, monkeypatch):
    copy = local_copy(source, tmp_path / "cache" / "of tokens")
    expected = contents(source)
    del expected["raw_text.parquet"]
    assert contents(copy) == expected
    assert copy.name.startswith("bucket-")
    assert copy.parent == tmp_path / "cache" / "of tokens"
    assert np.array_equal(open_split(copy, "train").read(0, 5000), STREAM)
    monkeypatch.setattr(module, "_copy_all", None)
    assert local_copy(source, copy.parent) == copy


def test_changed_data_is_another_copy(source, tmp_path):
    first = local_copy(source, tmp_path / "cache")
    shutil.rmtree(source)
    write_shards(source, STREAM[::-1], VAL, vocab_size=257)  # the same names and sizes
    second = local_copy(source, tmp_path / "cache")
    assert second != first
    assert np.array_equal(open_split(second, "train").read(0, 5000), STREAM[::-1])
    write_nanogpt(tmp_path / "nanogpt", STREAM, VAL)
    assert set(contents(local_copy(tmp_path / "nanogpt", tmp_path / "cache"))) == {
        "train.bin",
        "val.bin",
    }


def test_a_file_that_differs_from_its_checksum_is_not_copied(source, tmp_path):
    path = source / "train_00002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(ValueError, match=r"bucket/train_00002\.bin does not match its checksum"):
        local_copy(source, tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")] == []


def test_a_missing_file_is_named(source, tmp_path):
    (source / "train_00002.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"train_00002\.bin is missing"):
        local_copy(source, tmp_path / "cache")


def test_a_small_disk_is_found_before_anything_is_copied(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"cache has 1\.0 GB free, too little for the 0\.0 GB of"):
        local_copy(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin"))


def slow_copy(source, cache, log):
    """In another process: says which files it copies, slowly."""
    original = module._copy_file

    def copy_file(source, target, *rest):
        with log.open("a") as file:
            file.write(f"{os.getpid()} {target.name}\n")
        time.sleep(0.2)
        original(source, target, *rest)

    module._copy_file = copy_file
    local_copy(source, cache)


def test_processes_of_a_host_copy_once(source, tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache"
    processes = [SPAWN.Process(target=slow_copy, args=(source, cache, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    lines = log.read_text().splitlines()
    assert len({line.split()[0] for line in lines}) == 1
    assert len(lines) == 9  # meta.json, four shards of train and of val
    (copy,) = (p for p in cache.iterdir() if not p.name.startswith("."))
    open_split(copy, "train").verify()


def test_a_killed_copy_is_never_used_and_goes_on(source, tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache"
    process = SPAWN.Process(target=slow_copy, args=(source, cache, log))
    process.start()
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert [p for p in cache.iterdir() if not p.name.startswith(".")] == []
    (partial,) = cache.glob(".*.partial")
    done = [p.name for p in partial.iterdir() if not p.name.endswith(".tmp")]
    assert 3 <= len(done) < 9
    (partial / "train_00003.bin.tmp").write_bytes(b"half of it")
    log.unlink()
    slow_copy_in_this_process = SPAWN.Process(target=slow_copy, args=(source, cache, log))
    slow_copy_in_this_process.start()
    slow_copy_in_this_process.join(60)
    assert len(log.read_text().splitlines()) == 9 - len(done)
    copy = local_copy(source, cache)
    for split in ("train", "val"):
        open_split(copy, split).verify()
    assert not any(p.name.endswith(".tmp") for p in copy.iterdir())


def test_the_config_asks_for_copies(source, tmp_path):
    cache, model = str(tmp_path / "cache"), tiny_config().model
    one = TokenShardsConfig(path=str(source), cache_dir=cache)
    part = MixturePart(path=str(source), weight=1.0)
    for config in (one, MixtureConfig(parts=(part, part), cache_dir=cache)):
        tokens = open_data(config, "train", model=model)
        assert {stream.directory.parent for stream in tokens.streams} == {tmp_path / "cache"}
        assert np.array_equal(tokens.streams[0].read(0, 5000), STREAM)
