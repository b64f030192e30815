"""Whole runs whose working directory is in a bucket, through the real libraries.

They read where the server is at their first use: hence processes of their own.
"""

import html
import importlib.util
import json
import re
import signal
from pathlib import Path

import fake_gcs
import pytest
from running import (
    finish,
    finish_well,
    free_port,
    run_python,
    start_python,
    wait_until,
    write_config,
)
from xla_flags import xla_flags

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs (extra `gcs`)"
    ),
    pytest.mark.slow,
]

TESTS = str(Path(__file__).parents[1])

RUNS = """
import dataclasses, json, pathlib, sys
sys.path.insert(0, sys.argv[2])
sys.modules["matplotlib"] = None  # reports without figures
from maxmars.distributed import sharding
from maxmars.checkpoint import list_steps, read
from maxmars.cli import main
from maxmars.config import MeshConfig, OptaxConfig, ScheduleConfig
from maxmars.train import train
from maxmars.eval import load
from tiny import short_config

folder, bucket = pathlib.Path(sys.argv[1]), "gs://bucket/runs/tiny"
file = folder / "own.py"
file.write_text("import optax\\nmake = optax.sgd\\n")
optimizer = OptaxConfig(make=f"{file}:make", learning_rate=0.1)
schedule = ScheduleConfig(warmup_steps=0, decay_steps=4)
four = short_config(folder / "tokens", num_steps=4, optimizer=optimizer, schedule=schedule)
train(four, folder / "local")
train(dataclasses.replace(four, num_steps=2), bucket)
train(four, bucket, profile=(4, 4))
local, remote = (read(f"{place}/checkpoints").digests for place in (folder / "local", bucket))
model = load(f"{bucket}/checkpoints/3", mesh=sharding.make_mesh(MeshConfig()))
file.unlink()  # the bucket has it
main(["audit", bucket, "--replay", "1"])
main(["report", bucket, "--out", str(folder / "drawn")])
main(["export", f"{bucket}/checkpoints/4", str(folder / "exported")])
print(json.dumps([local == remote, list_steps(f"{bucket}/checkpoints"), model.name]))
"""

CONFIG = """
    mesh=MeshConfig(data=2),
    schedule=ScheduleConfig(warmup_steps=0, decay_steps=1000),
    checkpoint=CheckpointConfig(every=5),
"""


def records(text):
    rows = [json.loads(line) for line in text.splitlines()]
    losses = [(r["step"], k, r[k]) for r in rows for k in ("train/loss", "eval/loss") if k in r]
    assert len({(step, key) for step, key, _ in losses}) == len(losses)  # none is there twice
    return losses


def test_a_run_in_a_bucket_equals_one_on_the_disk(tmp_path):
    with fake_gcs.serve() as server:
        environment = server.environment | {"XLA_FLAGS": xla_flags(2)}
        done = run_python("-c", RUNS, tmp_path, TESTS, environment=environment)
    assert "continuing from step 2" in done.stdout
    assert "steps 4 to 4, computed again: the same digest" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [1, 2, 3, 4], "tiny, step 3"]
    local = {p.relative_to(tmp_path / "local").as_posix() for p in tmp_path.rglob("local/**/*.*")}
    names = [name for name in server.objects if name.startswith("runs/tiny/")]
    remote = {name.removeprefix("runs/tiny/") for name in names}
    local, remote = (
        {name for name in names if not name.startswith("checkpoints/")} for names in (local, remote)
    )
    traces = {name for name in remote if name.startswith("profile/host_000/")}
    assert any(name.endswith(".xplane.pb") for name in traces)
    assert remote - traces == local
    page = html.unescape((tmp_path / "drawn" / "report.md").read_text())
    assert "Made by `maxmars report` of gs://bucket/runs/tiny." in page
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| 4 of 4, " in card
    assert "tiny: one trajectory, steps 0 to 4 (sessions: 2, " in card
    assert "gs://" not in card
    text = server.text("runs/tiny/metrics.jsonl")
    assert records(text) == records((tmp_path / "local" / "metrics.jsonl").read_text())
    assert server.text("runs/tiny/logs/host_000.log").count("done: ") == 2


@pytest.mark.multiprocess
def test_taken_over_killed_and_continued(tmp_path):
    committed = re.compile(r"run/checkpoints/(\d+)/commit_success.txt")

    def start_run(workdir, *arguments, devices=2):
        command = ["-m", "maxmars", "train", tmp_path / "config.py", "--workdir", workdir]
        words = [*command, *arguments]
        return start_python(tmp_path, *words, devices=devices, variables=server.variables)

    def committed_steps():
        return [int(m[1]) for m in map(committed.fullmatch, [*server.objects]) if m]

    with fake_gcs.serve() as server:
        write_config(tmp_path, CONFIG, make="short_config")
        workdir = "gs://bucket/run"
        # A second between saves, where real runs have minutes.
        rarely = ["--num-steps", "100000", "--checkpoint.every-minutes", "0.02"]
        rarely += ["--checkpoint.every", "None"]
        first = start_run(workdir, *rarely)
        wait_until(lambda: len(committed_steps()) > 1, first)
        second = start_run(workdir, *rarely, "--checkpoint.keep-last", "1000")
        code, output = finish(first)
        assert code == 1  # which no launcher starts again
        assert f"process {second.pid} on" in output.splitlines()[-1]
        assert f"{workdir}/checkpoints" in output.splitlines()[-1]
        left = committed_steps()
        wait_until(lambda: max(committed_steps()) > max(left), second)
        second.send_signal(signal.SIGKILL)
        assert finish(second)[0] == -signal.SIGKILL
        metrics = records(server.text("run/metrics.jsonl"))
        steps = committed_steps()
        assert set(left) < set(steps)  # the first has deleted none of them
        assert {step for step, *_ in metrics} >= set(range(1, max(steps) + 1))

        last = max(steps) + 7
        shared = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2]
        shared += ["--num-steps", last, "--process-id"]
        both = [start_run(workdir, *shared, i, devices=1) for i in range(2)]
        finish_well(both)
        for host in ("000", "001"):
            assert f"continuing from step {max(steps)}" in server.text(f"run/logs/host_{host}.log")
        trained = {step for step, *_ in records(server.text("run/metrics.jsonl"))}
        assert trained >= set(range(1, last + 1))
        assert json.loads(server.text("run/checkpoints/owner.json"))["pid"] == both[0].pid
