"""`kill -9` at random moments of a preparation, and the same command again. MAXMARS_KILLS raises
the number of kills."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLS = int(os.environ.get("MAXMARS_KILLS", "2"))


def command(source, out, *options):
    return [sys.executable, "-m", "maxmars", "data", "prepare", source, out, *options]


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
def test_kill_and_run_again(tmp_path, corpus):
    """One of two commands that share the work is killed; then both run, in any order."""
    options = ["--workers", "2", "--task-bytes", "500000"]
    shares = [["--tasks", f"{i}/2"] for i in range(2)]
    start, whole = time.monotonic(), tmp_path / "whole"
    subprocess.run(command(corpus, str(whole), *options), check=True, capture_output=True)
    duration = time.monotonic() - start
    generator, continued = random.Random(0), 0
    for kill in range(KILLS):
        out = tmp_path / f"out{kill}"
        process = subprocess.Popen(
            command(corpus, str(out), *options, *generator.choice(shares)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(generator.uniform(0.0, duration))
        started = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_gone(started)
        generator.shuffle(shares)
        for share in shares:
            again = command(corpus, str(out), *options, *share)
            result = subprocess.run(again, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr
            continued += "continuing" in result.stderr
        assert contents(out) == contents(whole)
        assert metadata(out) == metadata(whole)
        assert {path.name for path in out.iterdir()} == {*contents(whole), "meta.json"}
        subprocess.run(["rm", "-r", out], check=True)
    print(f"{continued} of {KILLS} runs continued")
    assert continued >= KILLS // 5
