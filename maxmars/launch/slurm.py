"""`maxmars launch slurm`: a batch script that queues itself again until the run is done.

The run uses this Python and a copy of the checkout beside its results, so that what is edited after
the submission changes nothing. Before its time is over, and when it is preempted, SLURM sends
SIGTERM; the run saves and exits with 75, and the script asks for its job to be queued again.
"""

from __future__ import annotations

import getpass
import io
import os
import shlex
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from maxmars.launch import tools
from maxmars.launch.job import Job

_SAVING_S = 180  # before the time limit
_WORD = r"[\w.,:/=@+%-]+"


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """What is asked of SLURM."""

    nodes: int
    gpus_per_node: int = 0
    process_per: Literal["node", "gpu"] = "node"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    max_restarts: int = 100

    def __post_init__(self) -> None:
        """Reject what would not be one word of a line of the script."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                option = f"--{field.name.replace('_', '-')}"
                tools.check_word(value, option, _WORD, "one word, such as SLURM takes there")
        if self.nodes < 1 or self.gpus_per_node < 0:
            raise ValueError(
                f"--nodes={self.nodes} must be at least 1 and "
                f"--gpus-per-node={self.gpus_per_node} at least 0."
            )
        if self.process_per == "gpu" and not self.gpus_per_node:
            raise ValueError("--process-per gpu needs --gpus-per-node.")

    @property
    def tasks_per_node(self) -> int:
        """Processes of the run on each node."""
        return self.gpus_per_node if self.process_per == "gpu" else 1


def check_slurm_name(name: str) -> str:
    """The name of a run, which becomes that of a job and of files."""
    pattern = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
    return tools.check_word(name, "--name", pattern, "run-1: letters, digits and _ . -")


def check_workdir(workdir: str) -> str:
    """A directory that may stand in the script's #SBATCH lines, where nothing can be quoted."""
    if workdir.startswith("gs:"):
        raise ValueError(
            f"--workdir {workdir} is in a bucket, and SLURM's own output and the checkout go there "
            "too: name a directory that all nodes share."
        )
    path = os.path.abspath(workdir)
    return tools.check_word(path, "--workdir", r"/[\w./@+=-]*", "/shared/runs/run-1")


def snapshot(job: Job) -> Path:
    """Where the copy of the checkout is unpacked."""
    return Path(job.workdir) / f"source-{job.source.digest}"


def script(slurm: Slurm, job: Job, *, directory: Path) -> str:
    """The batch script; `directory` is where the run's relative paths begin."""
    source = snapshot(job)
    config = str(source / job.source.config)
    options = {
        "job-name": job.name,
        "nodes": slurm.nodes,
        "ntasks-per-node": slurm.tasks_per_node,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.mem,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "output": f"{job.workdir}/slurm-%j.out",
        "open-mode": "append",
        "signal": f"TERM@{_SAVING_S}",
        "export": "ALL",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    setup = []
    if job.source.setup is not None:
        path = shlex.quote(str(source / job.source.setup))
        setup = [f"srun --ntasks={slurm.nodes} --ntasks-per-node=1 bash {path} || exit"]
    train = shlex.join(job.train_command(sys.executable, config=config))
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *lines,
            "#SBATCH --requeue",
            "set -uo pipefail",
            f"cd {shlex.quote(str(directory))}",
            f"export PYTHONPATH={shlex.quote(str(source))}",
            "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1  # the copy, not what lies here now",
            *setup,
            "",
            "code=0",
            "# The others may still be saving when the first ends.",
            f"srun --kill-on-bad-exit=0 --wait=300 {train} || code=$?",
            "",
            "# 75: saved, to be started again; from 128 on, ended by a signal. A job that was",
            "# cancelled no longer runs, and one that SLURM preempted is queued again by SLURM.",
            "if ((code == 75 || code >= 128)) &&",
            f"  ((${{SLURM_RESTART_COUNT:-0}} < {slurm.max_restarts})) &&",
            '  [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then',
            '  echo "maxmars: exit code $code; queueing the job again"',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def launch(slurm: Slurm, job: Job, *, directory: Path, say: Callable[[str], None] = print) -> str:
    """Unpack the checkout, write the script and submit it; the job's number.

    Raises:
      FileNotFoundError: there is no sbatch.
      ValueError: sbatch refuses.
    """
    tools.require("sbatch")
    source = snapshot(job)
    if not source.exists():
        part = source.with_name(f"{source.name}.part{os.getpid()}")
        part.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(job.source.archive)) as tar:
            tar.extractall(part, filter="data")
        part.rename(source)
    path = Path(job.workdir) / f"{job.name}.sbatch"
    path.write_text(script(slurm, job, directory=directory))
    number = tools.run_or_fail(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    say(f"submitted job {number}: {path}")
    say(f"its output goes to {job.workdir}/slurm-{number}.out")
    return number


def status(name: str) -> list[str]:
    """The command that shows the user's jobs of this name."""
    return ["squeue", f"--user={getpass.getuser()}", f"--name={name}"]


def stop(name: str) -> list[str]:
    """The command that ends them; the run saves first, and is not queued again."""
    return ["scancel", f"--user={getpass.getuser()}", f"--name={name}"]
