"""`kill -9` of a preparation after some of its tasks, and the same command again. MAXMARS_KILLS
raises the number of kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import wait_until

from maxmars.cli import main

KILLS = int(os.environ.get("MAXMARS_KILLS", "1"))


def contents(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != "meta.json"}


def metadata(directory):
    fields = json.loads((directory / "meta.json").read_text())
    return {name: value for name, value in fields.items() if name != "command"}  # it names OUT


def children(pid):
    """Of any generation."""
    try:
        own = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"processes {pids} outlive the one that started them"
        time.sleep(0.05)


@pytest.fixture
def corpus(tmp_path):
    """Many documents, one of them long, in two kinds of files."""
    generator = random.Random(0)
    words = [f"word{i}" for i in range(1000)]

    def text(size):
        return " ".join(generator.choices(words, k=size))

    (tmp_path / "text").mkdir()
    with (tmp_path / "text" / "a.jsonl").open("w") as file:
        for _ in range(2000):
            file.write(json.dumps({"text": text(generator.randrange(600))}) + "\n")
    (tmp_path / "text" / "b.txt").write_text(text(700_000))
    return str(tmp_path / "text" / "*")


@pytest.mark.slow
def test_kill_and_run_again(tmp_path, corpus, capsys):
    """One of two commands that share the work is killed; then both run, in any order."""
    tasks, whole = ["--task-bytes", "500000"], tmp_path / "whole"
    shares = [["--tasks", f"{i}/2"] for i in range(2)]

    def prepare_here(out, *options):
        main(["data", "prepare", corpus, str(out), *tasks, "--workers", "0", *options])

    prepare_here(whole)
    generator = random.Random(0)
    for kill in range(KILLS):
        out = tmp_path / f"out{kill}"
        share, num_done = generator.choice(shares), generator.randrange(1, 4)
        words = ["data", "prepare", corpus, out, *tasks, "--workers", "2", *share]
        process = subprocess.Popen(
            [sys.executable, "-m", "maxmars", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda out=out, n=num_done: len([*out.glob("tasks/*.json")]) >= n, process)
        started = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert started
        wait_until_gone(started)
        capsys.readouterr()
        generator.shuffle(shares)
        for share in shares:
            prepare_here(out, *share)
        assert "continuing" in capsys.readouterr().err
        assert contents(out) == contents(whole)
        assert metadata(out) == metadata(whole)
        assert {path.name for path in out.iterdir()} == {*contents(whole), "meta.json"}
        shutil.rmtree(out)
