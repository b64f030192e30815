"""`maxmars train`: train as a config file says, or continue a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from maxmars.cli.config_file import ConfigArguments, parse_arguments

_USAGE = """\
usage: maxmars train CONFIG [--workdir DIR] [--FIELD VALUE ...]

Train a model as a config file says. Run the same command again to continue.
SIGTERM and Ctrl-C finish the step, save and exit with code 75; a second Ctrl-C leaves at once.
Several processes exit with 75 as well where one of them is killed, fails or hangs.

CONFIG is a Python file, with its choices if it has any:
  maxmars train configs/quickstart.py
  maxmars train configs/gpt2.py:size=small,optimizer=mars

Any field of the config can be changed on the command line:
  maxmars train configs/quickstart.py --num-steps 100 --optimizer.learning-rate 3e-3

`maxmars train CONFIG --help` lists the fields of that config and their values."""


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ConfigArguments):
    """Train a model as a config file says. Run the same command again to continue."""

    workdir: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME)")
    ] = None
    """Directory of the run's metrics and checkpoints."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, where several processes train together; goes with the next two."""
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes of the run."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""


def run(argv: list[str]) -> int:
    """Run `maxmars train`."""
    arguments = parse_arguments(TrainArguments, argv, prog="maxmars train", usage=_USAGE)
    # Imported late: both load JAX, which --help and wrong arguments need not wait for.
    from maxmars import distributed
    from maxmars.preemption import EXIT_CODE
    from maxmars.train import train

    distributed.initialize(arguments.coordinator, arguments.num_processes, arguments.process_id)
    done = train(arguments.config, arguments.workdir or Path("runs") / arguments.config.name)
    return 0 if done else EXIT_CODE
