"""Launchers that start a run again whatever happens: `maxmars train` itself makes an end of it.

SLURM, JobSet and a TPU are played as their manuals say they restart. The processes are real, two of
one run. Data of the user's own make one of them fail or abort in the middle of a step.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
import yaml
from running import environment, finish, finish_well, free_port, start, wait_until, write_config

from maxmars import cli
from maxmars.checkpoint import list_steps
from maxmars.distributed.exits import EXIT_CODE

CONFIG = """
    num_steps=24,
    num_microbatches=1,
    model=dataclasses.replace(MODEL, num_layers=1),
    optimizer=ADAMW,
    data=GrainConfig(source="faulty.py:windows", options={"faults": FAULTS}),
    eval=EvalConfig(every=None),
    checkpoint=CheckpointConfig(every=None),
"""
FAULTY = """
import os
from pathlib import Path

import grain, jax
import numpy as np

read = 0

def window(faults, length, i):
    global read
    read += 1
    fault = Path(faults) / str(jax.process_index())
    if read > 160 and fault.exists():
        kind = fault.read_text()
        if kind == "abort":
            os.abort()
        raise OSError(f"{kind} in window {i}")
    return np.arange(length + 1) % 7 + i % 5

def windows(*, split, length, faults):
    return grain.MapDataset.range(400).map(lambda i: window(faults, length, i))
"""

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def folder(tmp_path):
    """With a config file, and `faults`, where a file named by the number of a process is its
    fault."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faulty.py").write_text(FAULTY)
    return write_config(tmp_path, CONFIG.replace("FAULTS", repr(str(tmp_path / "faults"))))


def set_faults(folder, faults):
    for number, kind in faults.items():
        (folder / "faults" / str(number)).write_text(kind)


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Slurm:
    """Queues a job again when its script asks for that; each node has one task."""

    SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
worst=0
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=0 "$@" & tasks[task]=$!; done
for task in 0 1; do
  code=0; wait "${tasks[task]}" || code=$?
  ((code == 0)) || echo "srun: error: n$task: task $task: Exited with exit code $code" >>OUTPUT
  ((code <= worst)) || worst=$code
done
exit $worst
"""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.chdir(folder)
        said = shlex.quote(str(folder / "run" / "slurm-42.out"))
        program(folder / "bin" / "srun", self.SRUN.replace("OUTPUT", said))
        program(folder / "bin" / "sbatch", "#!/bin/bash\necho 42\n")
        asked = f'echo "$*" >>{folder}/asked; echo JobState=RUNNING Requeue=1'
        program(folder / "bin" / "scontrol", f"#!/bin/bash\n{asked}\n")
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        config, workdir = str(folder / "config.py"), str(folder / "run")
        words = ["launch", "slurm", config, "--name", "run", "--nodes", "2", "--workdir", workdir]
        cli.main(words)

    def run(self):
        """The exit code of each start, and all that was printed."""
        codes, output = [], ""
        while True:
            (self.folder / "asked").write_text("")
            job = {
                "JAX_COORDINATOR_PORT": str(free_port()),
                "SLURM_STEP_NODELIST": "127.0.0.1",
                "SLURM_JOB_ID": "42",
                "SLURM_NTASKS": "2",
                "SLURM_RESTART_COUNT": str(len(codes)),
            }
            done = subprocess.run(
                ["bash", str(self.folder / "run" / "run.sbatch")],
                env=environment(self.folder / "cache") | job,
                capture_output=True,
                text=True,
                timeout=240,
            )
            codes.append(done.returncode)
            output += done.stdout + done.stderr
            if "requeue 42" not in (self.folder / "asked").read_text():
                return codes, output


class JobSet:
    """Starts all pods again when one fails, unless the manifest's rules fail the JobSet."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        monkeypatch.chdir(folder)
        config, workdir = str(folder / "config.py"), str(folder / "run")
        (folder / "network.yaml").write_text("metadata: {annotations: {played: 'true'}}\n")
        words = ["launch", "gke", "--dry-run", config, "--name", "run", "--topology", "h100:16"]
        words += ["--workdir", workdir, "--patch", str(folder / "network.yaml")]
        with contextlib.redirect_stdout(io.StringIO()) as manifest:
            cli.main([*words, "--", "--global-batch-size", "16"])
        (jobs,) = yaml.safe_load(manifest.getvalue())["spec"]["replicatedJobs"]
        job = jobs["template"]["spec"]
        self.pods = job["completions"]
        (rule,) = job["podFailurePolicy"]["rules"]
        self.fails_on = rule["onExitCodes"]["values"]
        (container,) = job["template"]["spec"]["containers"]
        last = container["command"][2].splitlines()[-1]
        self.command = last.replace("exec python3 ", f"exec {shlex.quote(sys.executable)} ")
        self.command = self.command.replace(" config.py ", f" {folder}/config.py ")

    def run(self):
        codes, output = [], ""
        while True:
            place = f"127.0.0.1:{free_port()}"
            command = self.command.replace("run-slice-job-0-0.run:8476", place)
            pods = [
                subprocess.Popen(
                    ["bash", "-c", command],
                    env=environment(self.folder / "cache") | {"JOB_COMPLETION_INDEX": str(i)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for i in range(self.pods)
            ]
            ended = [finish(pod) for pod in pods]
            codes.append(max(code % 256 for code, _ in ended))
            output += "".join(text for _, text in ended)
            if codes[-1] == 0 or any(code in self.fails_on for code, _ in ended):
                return codes, output


@pytest.mark.slow
def test_an_error_of_one_process_ends_them_all(folder, monkeypatch):
    set_faults(folder, {1: "no such disk"})
    codes, output = JobSet(folder, monkeypatch).run()
    assert len(codes) == 1, output
    assert "no such disk in window" in output
    assert "has lost another process of the run" in output


@pytest.mark.slow
def test_after_ten_starts_that_came_to_nothing_all_processes_refuse(folder, monkeypatch):
    started = Slurm(folder, monkeypatch)
    before = {"job": "42", "step": 0, "count": 10, "stopped": True}
    (folder / "run" / "starts.json").write_text(json.dumps(before))
    codes, output = started.run()
    assert codes == [78], output
    assert output.count("maxmars: error: ") == 2
    assert "10 starts in a row" in output
    assert started.run()[0] == [0]  # a person looked after it, and starts it again


@pytest.mark.slow
def test_crashes_with_a_checkpoint_between_them_go_on(folder):
    set_faults(folder, {0: "abort"})
    often = ("--checkpoint.every", "1", "--num-steps", "100", "--global-batch-size", "8")
    reached = []
    for _ in range(4):
        code, output = finish(start(folder, "run", *often))
        assert code == -signal.SIGABRT, output
        reached.append(max(list_steps(folder / "run" / "checkpoints")))
    assert reached == sorted(set(reached))


@pytest.mark.slow
def test_the_start_after_a_stop_while_starting_does_not_wait(folder):
    notes = folder / "run" / "starts.json"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        before = notes.read_bytes() if notes.exists() else b""
        process = start(folder, "run")
        wait_until(lambda b=before: notes.exists() and notes.read_bytes() != b, process)
        process.send_signal(number)
        ended, output = finish(process)
        assert ended in (EXIT_CODE, *([130] if number == signal.SIGINT else [])), output
    (output,) = finish_well([start(folder, "run")])
    assert "starts in a row" not in output
