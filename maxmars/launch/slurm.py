"""`maxmars launch slurm`: a batch script that queues itself again until the run is done.

The run uses this Python, with a copy of maxmars and of the user's files beside the results, so that
later edits change nothing. Before the time limit, and when SLURM preempts the job, the job gets
SIGTERM; the run saves and exits with 75, and the script asks SLURM to requeue its own job, unless
`stop` has set Requeue=0. `script` is the whole of it, in bash.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tyro.conf import UseAppendAction, arg

from maxmars.config.checks import NotNegative, Positive, UsageError
from maxmars.launch import wheel
from maxmars.launch.job import (
    PROLOG,
    SETUP,
    STARTS_AGAIN,
    Job,
    RunOptions,
    check_word,
    log,
    run_or_fail,
)

_PACKAGE = "package"  # folder of the unpacked wheel in the copy
_SAVING_S = 180  # time to save before the time limit
_WORD = r"[]\w.,:/=@+%&|*()[~^!-]+"  # an #SBATCH line takes no quotes


@dataclass(frozen=True, kw_only=True)
class SlurmName:
    """Jobs of SLURM by the name of their run: show them, or stop the run, which saves first."""

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch slurm status --name run1",
        "maxmars launch slurm stop --name run1",
    )

    name: Annotated[str, arg(metavar="NAME")]
    """Name of the run, and of its jobs."""

    def check(self) -> None:
        """Check the words that go to SLURM.

        Raises:
          UsageError: a word is invalid; the message names the option.
        """
        pattern = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
        check_word(self.name, "--name", pattern, "run-1: letters, digits and _ . -")

    @property
    def _jobs(self) -> list[str]:
        return [f"--user={getpass.getuser()}", f"--name={self.name}"]

    def show_status(self) -> int:
        """Show the user's jobs of this name; returns squeue's exit code."""
        return subprocess.run(["squeue", *self._jobs]).returncode

    def stop(self) -> None:
        """End the user's jobs of this name. A job that trains saves first and takes its time; a
        plain scancel would kill it after SLURM's KillWait.

        Raises:
          ValueError: a program of SLURM fails.
        """
        states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
        listed = run_or_fail(["squeue", *self._jobs, states, "--noheader", "--format=%A"])
        jobs = listed.split()
        for job in jobs:  # first, or a job that saves would be queued again
            run_or_fail(["scontrol", "update", f"JobId={job}", "Requeue=0"])
        for job in jobs:
            steps = run_or_fail(["squeue", "--steps", f"--jobs={job}", "--noheader"])
            if re.search(rf"^ *{job}\.\d+ ", steps, re.M):
                run_or_fail(["scancel", "--signal=TERM", job])  # to the steps, not the batch script
                log(f"job {job}: asked to save; it ends then, and is not queued again")
            else:
                run_or_fail(["scancel", job])
                log(f"job {job}: cancelled, as it does not train now")
        if not jobs:
            log(f"there is no job {self.name}")


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(RunOptions, SlurmName):
    """Train under SLURM. At its time limit the job saves and is queued again, until all steps are
    done.

    Options after -- go to `maxmars train`.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars launch slurm gpt2 --name run1 --workdir /shared/run1 \\",
        "  --nodes 2 --gpus-per-node 8 -- --data.path /shared/openwebtext",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "name",
        "workdir",
        "nodes",
        "gpus-per-node",
        "cpus-per-task",
        "mem",
        "time",
        "partition",
        "account",
        "dry-run",
    )

    nodes: Positive[int] = 1
    """Number of nodes."""
    gpus_per_node: NotNegative[int] = 0
    """Number of GPUs of each node."""
    process_per: Literal["node", "gpu"] = "node"
    """Processes of the run: one for each node, with all its GPUs, or one for each GPU."""
    cpus_per_task: Positive[int] | None = None
    """Number of cores for each process."""
    mem: str | None = None
    """Memory of each node, such as 200G."""
    time: str | None = None
    """Time limit, such as 24:00:00; before it the run saves, and its job is queued again."""
    partition: str | None = None
    """Partition of the job."""
    account: str | None = None
    """Account of the job."""
    qos: str | None = None
    """Quality of service of the job."""
    constraint: str | None = None
    """Features of the nodes, such as `h100&ib`."""
    sbatch: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="OPTION")] = ()
    """Another option of sbatch, as one word: --sbatch=--gres=gpu:8. May be repeated."""
    srun: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="OPTION")] = ()
    """Another option of the srun that trains: --srun=--container-image=IMAGE. May be repeated."""
    prolog: Annotated[Path | None, arg(metavar="FILE.sh")] = None
    """Bash script that the batch script sources. Variables that it exports, for example by `module
    load`, reach --setup and the run."""

    def check(self) -> None:
        super().check()
        for option in ("mem", "time", "partition", "account", "qos", "constraint"):
            value = getattr(self, option)
            if value is not None:
                check_word(value, f"--{option}", _WORD, "one word, such as SLURM takes there")
        for option in self.sbatch:
            check_word(option, "--sbatch", f"--{_WORD}", "--gres=gpu:8, one option of sbatch")
            if option.startswith("--array"):
                raise UsageError(
                    f"--sbatch {option}: each job of an array would train in the same --workdir; "
                    "submit each run by a launch of its own, with its own --name and --workdir."
                )
            if option.startswith(("--output", "--error")):
                raise UsageError(
                    f"--sbatch {option}: the output stays in the workdir, as slurm-JOB.out, by "
                    "which the script knows whether a process failed by itself."
                )
        for option in self.srun:
            if option == "--quiet":
                raise UsageError("--srun --quiet hides which process failed; leave it out.")
            check_word(option, "--srun", r"--[^\x00-\x1f]+", "--mpi=none, one option of srun")
        if self.process_per == "gpu" and not self.gpus_per_node:
            raise UsageError("--process-per gpu needs --gpus-per-node.")

    @property
    def asks_for_cores(self) -> bool:
        options = ("--cpus-per-task", "--cpus-per-gpu", "--exclusive")
        return self.cpus_per_task is not None or any(o.startswith(options) for o in self.sbatch)

    @property
    def may_have_other_packages(self) -> bool:
        """Whether --setup, --prolog or a container may give the run other packages than those of
        this Python, which are unknown here."""
        scripts = self.setup is not None or self.prolog is not None
        return scripts or any(option.startswith("--container") for option in self.srun)

    @property
    def gpu_option(self) -> str | None:
        """The option that requests GPUs; None if there is none."""
        if self.gpus_per_node:
            return f"--gpus-per-node {self.gpus_per_node}"
        others = (o for o in self.sbatch if re.match(r"--(gpus|gres=.*gpu)", o))
        return next((f"--sbatch {option}" for option in others), None)

    def shared_workdir(self) -> str:
        """The working directory as an absolute path for #SBATCH lines, where quotes are impossible.

        Raises:
          UsageError: the path is in a bucket, or has characters that need quotes.
        """
        if self.workdir.startswith("gs:"):
            raise UsageError(
                f"--workdir {self.workdir} is in a bucket, and SLURM's own output and the code "
                "go there too: name a directory that all nodes share."
            )
        path = os.path.abspath(self.workdir)
        return check_word(path, "--workdir", r"/[\w./@+=-]*", "/shared/runs/run-1")

    @property
    def scripts(self) -> dict[str, Path]:
        return super().scripts | ({} if self.prolog is None else {PROLOG: self.prolog})


def script(options: SlurmOptions, job: Job) -> str:
    """The batch script of a job. Relative paths of the run begin in the current directory."""
    copy = _copy_of_code(job)
    sbatch = {
        "job-name": job.name,
        "nodes": options.nodes,
        "ntasks-per-node": options.gpus_per_node if options.process_per == "gpu" else 1,
        "gpus-per-node": options.gpus_per_node or None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "time": options.time,
        "output": f"{job.workdir}/slurm-%j.out",
        "open-mode": "append",  # a requeued job goes on with the file
        "signal": f"TERM@{_SAVING_S}",
        "export": "ALL",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in sbatch.items() if value is not None]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in options.sbatch)]
    # When a process fails or ends, the others have 300 s to save.
    srun = shlex.join(["srun", "--kill-on-bad-exit=0", "--wait=300", *options.srun])
    train = shlex.join([sys.executable, *job.python_arguments(copy)])
    prolog = "# no --prolog"
    if options.prolog is not None:
        prolog = f". {shlex.quote(f'{copy}/{PROLOG}')}"
    setup = "# no --setup"
    if options.setup is not None:
        path = shlex.quote(f"{copy}/{SETUP}")
        setup = f"srun --ntasks={options.nodes} --ntasks-per-node=1 bash {path} || exit"
    output = shlex.quote(f"{job.workdir}/slurm-") + '"$SLURM_JOB_ID.out"'
    newline = "\n"
    return f"""\
#!/usr/bin/env bash
{newline.join(lines)}
cd {shlex.quote(os.getcwd())} || exit
{prolog}
set -uo pipefail
# srun does not inherit this option of the job.
[[ -z ${{SLURM_CPUS_PER_TASK:-}} ]] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export PYTHONPATH={shlex.quote(f"{copy}/{_PACKAGE}")}${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONUNBUFFERED=1
{setup}

# srun's own code is the highest of all processes', and JAX aborts those (134) that lose one which
# failed by itself. But srun also says how each ended. The file has all starts of the job, so what
# counts is whether this one adds a line.
own_errors() {{ cat {output} 2>/dev/null | grep -cE 'xited with exit code (1|2|78)$'; }}
before=$(own_errors)
code=0
# The others may still be saving when the first ends.
{srun} {train} || code=$?

{STARTS_AGAIN}
# A job that was cancelled no longer runs, `maxmars launch slurm stop` takes Requeue from a job, and
# one that SLURM preempted is queued again by SLURM.
if [[ $(own_errors) != "$before" ]]; then
  echo "maxmars: a process failed by an error of its own, so the job is not queued again"
elif starts_again "$code" &&
  ((${{SLURM_RESTART_COUNT:-0}} < {options.max_restarts})) &&
  [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING*Requeue=1* ]]; then
  echo "maxmars: exit code $code; queueing the job again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def launch(options: SlurmOptions, job: Job) -> None:
    """Write the code and the batch script, and submit the script.

    Raises:
      ValueError: sbatch refuses the script.
    """
    copy = _copy_of_code(job)
    if not copy.exists():  # complete, as it is renamed at the end
        part = copy.with_name(f"{copy.name}.part{os.getpid()}")
        job.code.write(part)
        _unpack(part / _PACKAGE, job, origin=copy / wheel.NAME)
        part.rename(copy)
    path = Path(job.workdir) / f"{job.name}.sbatch"
    path.write_text(script(options, job))
    # Where SLURM knows several clusters, --parsable prints JOB;CLUSTER.
    number = run_or_fail(["sbatch", "--parsable", str(path)]).strip().split(";")[0]
    log(f"submitted job {number}: {path}")
    log(f"its output goes to {job.workdir}/slurm-{number}.out")
    log(f"see `maxmars launch slurm status|stop --name {job.name}`")


def _copy_of_code(job: Job) -> Path:
    # By digest, as a job that waits or runs keeps its code when another one is launched.
    return Path(job.workdir) / f"source-{job.code.digest}"


def _unpack(folder: Path, job: Job, origin: Path) -> None:
    """Unpack the wheel, with the direct_url.json that pip would write (PEP 610)."""
    with zipfile.ZipFile(folder.parent / wheel.NAME) as archive:
        archive.extractall(folder)
    (info,) = folder.glob("*.dist-info")
    hashed = {"hash": f"sha256={job.code.wheel_sha256}"}
    note = {"url": origin.as_uri(), "archive_info": hashed}
    (info / "direct_url.json").write_text(json.dumps(note))
