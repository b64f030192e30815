"""`maxmars launch slurm` on a real SLURM: which jobs are queued again, and which are not."""

import json
import re
import time

import jax
import pytest
from fake_cloud import launch
from real_slurm import KILL_WAIT_S, RealSlurm, why_absent
from running import environment, wait_for

from maxmars.checkpoint import list_steps

CONFIG = """
from maxmars.config import *

def get_config():
    return TrainConfig(
        name="tiny", num_steps=2000, global_batch_size=16, num_microbatches=1,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=257,
                         compute_dtype="float32"),
        optimizer=AdamWConfig(), schedule=ScheduleConfig(warmup_steps=2), mesh=MeshConfig(),
        data=GrainConfig(source="data.py:windows", options={{"hold": {hold!r}}}),
        eval=EvalConfig(every=None), checkpoint=CheckpointConfig(every=1000),
        log=LogConfig(every=1),
    )
"""
# Slow tokens, which do not come at all while there is a file.
DATA = """
import os, time
import grain
import numpy as np

def window(hold, length, i):
    while os.path.exists(hold):
        time.sleep(0.1)
    time.sleep(0.02)
    return np.arange(length + 1) % 7 + i % 5

def windows(*, split, length, hold):
    return grain.MapDataset.range(40_000).map(lambda i: window(hold, length, i))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(why_absent() is not None, reason=f"{why_absent()}"),
]


@pytest.fixture(scope="module")
def slurm():
    with RealSlurm() as running:
        yield running


class Launched:
    """What a user does with one run from a login node."""

    def __init__(self, slurm, folder, capsys):
        self.slurm, self.folder, self.workdir = slurm, folder, folder / "run"
        self._capsys = capsys
        self.hold = folder / "hold"
        (folder / "config.py").write_text(CONFIG.format(hold=str(self.hold)))
        (folder / "data.py").write_text(DATA)

    def maxmars(self, *words):
        """What `maxmars launch slurm` prints."""
        code, printed = launch("slurm", *words), self._capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    def launch(self, *options):
        words = ["config.py", "--name", "run", "--workdir", str(self.workdir), *options]
        return re.match(r"submitted job (\d+):", self.maxmars(*words))[1]

    def wait_for(self, condition):
        def shown():
            outputs = [path.read_text() for path in self.workdir.glob("slurm-*.out")]
            return "\n".join([*outputs, self.slurm.ask("squeue")])

        wait_for(condition, 120, shown)

    def state(self, job):
        return self.slurm.job(job)["JobState"]

    def steps(self):
        path = self.workdir / "metrics.jsonl"
        return path.read_text().count("train/loss") if path.exists() else 0


@pytest.fixture
def launched(slurm, tmp_path, tmp_path_factory, monkeypatch, capsys):
    jax.devices()  # this process's eight, before the variables are those of the jobs
    cache = tmp_path_factory.getbasetemp() / "slurm-cache"
    for name, value in (environment(cache) | slurm.environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield Launched(slurm, tmp_path, capsys)
    slurm.ask("scancel", "--user=root")


def test_sbatch_takes_the_script_of_a_dry_run(slurm, launched):
    script = launched.folder / "run.sbatch"

    def tested(*options):
        words = ["config.py", "--name", "run", "--workdir", str(launched.workdir), "--dry-run"]
        script.write_text(launched.maxmars(*words, *options))
        return slurm.run("sbatch", "--test-only", str(script))

    options = ["--nodes", "2", "--cpus-per-task", "1", "--time", "1:00:00", "--partition", "main"]
    for given in ([], [*options, "--mem", "500M", "--sbatch", "--exclusive", "--srun=--mpi=none"]):
        done = tested(*given)
        assert (done.returncode, " to start at " in done.stderr) == (0, True), done.stderr
    assert "allocation failure" in tested("--nodes", "3").stderr  # of two
    assert slurm.ask("squeue", "--noheader") == ""


def test_a_run_that_is_started_twice_then_preempted_then_stopped(slurm, launched):
    """The same command leaves a run its restarts; it saves however long that takes."""
    job = launched.launch("--nodes", "2")
    launched.wait_for(lambda: launched.steps() > 0)
    other = launched.launch("--nodes", "2")
    launched.wait_for(lambda: launched.state(other) == "FAILED")
    assert slurm.job(other)["ExitCode"] == "78:0"
    assert launched.state(job) == "RUNNING"

    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    slurm.ask("sbatch", *urgent, "--wrap", "true")
    launched.wait_for(lambda: slurm.job(job)["Restarts"] == "1")
    launched.wait_for(lambda: launched.state(job) == "RUNNING")
    before = launched.steps()
    launched.wait_for(lambda: launched.steps() > before)

    launched.hold.touch()
    assert f"job {job}: " in launched.maxmars("stop", "--name", "run")
    time.sleep(2 * KILL_WAIT_S)
    assert launched.state(job) == "RUNNING"
    launched.hold.unlink()
    launched.wait_for(lambda: launched.state(job) == "FAILED")
    assert slurm.job(job)["ExitCode"] == "75:0"
    assert slurm.job(job)["Restarts"] == "1"  # as before
    saved = max(list_steps(launched.workdir / "checkpoints"))
    assert saved == launched.steps() > before


def test_gpus_that_jax_does_not_use_end_the_job(slurm, launched):
    prolog = launched.folder / "prolog.sh"
    prolog.write_text("unset JAX_PLATFORMS\n")
    job = launched.launch("--nodes", "2", "--gpus-per-node", "1", "--prolog", str(prolog))
    launched.wait_for(lambda: launched.state(job) == "FAILED")
    # JAX may abort the one (134) that loses the other before it has seen its own error.
    assert slurm.job(job)["ExitCode"] in ("78:0", "0:6", "134:0")
    assert slurm.job(job)["Restarts"] == "0"
    assert "SLURM_GPUS_ON_NODE=1" in (launched.workdir / f"slurm-{job}.out").read_text()


def test_ten_stops_with_hardly_a_step_are_not_queued_again(slurm, launched):
    # Nine starts before: each takes some seconds. The job waits meanwhile.
    job = launched.launch("--sbatch", "--hold")
    before = {"job": job, "step": 0, "count": 9, "stopped": True}
    notes = launched.workdir / "starts.json"
    notes.write_text(json.dumps(before))
    slurm.ask("scontrol", "release", job)

    def has_begun():
        starts = json.loads(notes.read_text())
        return starts["count"] == 10 and not starts["stopped"]

    launched.wait_for(has_begun)
    slurm.ask("scancel", "--signal=TERM", job)  # as SLURM does before a time limit
    launched.wait_for(lambda: launched.state(job) == "FAILED")
    assert slurm.job(job)["ExitCode"] == "78:0"
    assert slurm.job(job)["Restarts"] == "1"
