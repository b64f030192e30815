"""The command line of `maxmars train`, which `maxmars launch` checks before it rents anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from maxmars.cli.config_file import ConfigArguments

USAGE = """\
usage: maxmars train CONFIG [--workdir DIR] [--FIELD VALUE ...]

Train a model as a config file says. Run the same command again to continue.
SIGTERM and Ctrl-C finish the step, save and exit with code 75; a second Ctrl-C leaves at once.
Several processes exit with 75 as well where one of them is killed, fails or hangs.

CONFIG is a Python file, with its choices if it has any:
  maxmars train configs/quickstart.py
  maxmars train configs/gpt2.py:size=small,optimizer=mars

Any field of the config can be changed on the command line:
  maxmars train configs/quickstart.py --num-steps 100 --optimizer.learning-rate 3e-3

Start a new run from the weights of another, or from a Hugging Face GPT-2:
  maxmars train configs/quickstart.py --init-from runs/quickstart --workdir runs/more

`maxmars train CONFIG --help` lists the fields of that config and their values."""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ConfigArguments):
    """Train a model as a config file says. Run the same command again to continue."""

    workdir: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME)")
    ] = None
    """Directory of the run's metrics and checkpoints, also on gs:// (extra `gcs`)."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Start a new run from these weights: a run's directory (its newest sound checkpoint), one of
    its checkpoints/STEP, also on gs://, or a directory with a Hugging Face GPT-2. Step, data,
    schedule and optimizer start anew, and the optimizer may be another one."""
    init_optimizer_state: bool = False
    """With --init-from, also take the optimizer state, whose optimizer must be of the same kind."""
    resume_overrides: Annotated[str | None, tyro.conf.arg(metavar="FIELD,...")] = None
    """Fields or groups of fields, such as optimizer.learning_rate,schedule, that change on purpose
    when a run continues; without it, fields that define the run are refused."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace these steps, such as 20:24, into the run's directory `profile`, for TensorBoard's xprof
    and Perfetto, and print which operations took the time."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, where several processes train together; goes with the next two. On TPU
    pods, under srun and in the JobSets of `maxmars launch` none of the three is needed."""
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes of the run; 1 alone ignores the cluster."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""
    start_timeout_s: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0
    """How long to wait for all processes to come before the start fails."""
