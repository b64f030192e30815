"""`maxmars train`: train as a config file says, or continue a run.

The work is in `maxmars.train`. `RunProcess` comes first: it handles signals, joins the processes of
the run, and decides the exit code. `maxmars launch` parses the command line of `train` by
`TrainArguments` before it rents anything.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config.checks import NotNegative, Positive, UsageError
from maxmars.distributed.run_process import RunProcess


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ConfigArguments):
    """Train a model as a config says; the same command again continues the run.

    After SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU or Ctrl-C the run finishes its step, saves and
    exits with code 75; a second Ctrl-C ends it at once. If one of several processes fails, it exits
    with 78 and the others with 75; if one is killed or hangs, the others exit with 75, too.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars train quickstart",
        "maxmars train gpt2:size=small,optimizer=mars --data.path DIR --workdir runs/1",
    )
    FIRST: ClassVar[tuple[str, ...]] = (
        "workdir",
        "data.path",
        "num-steps",
        "global-batch-size",
        "optimizer.learning-rate",
        "schedule.warmup-steps",
        "eval.every",
        "checkpoint.every",
        "init-from",
        "log.wandb",
    )

    workdir: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="default: runs/NAME")
    ] = None
    """Working directory of the run, for metrics and checkpoints; may be on gs:// (extra `gcs`)."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Weights to start a new run from: a run, for its newest intact checkpoint, a checkpoint such
    as runs/NAME/checkpoints/STEP, both also on gs://, a Hugging Face GPT-2 in a directory, or
    hf:OWNER/NAME[@REVISION] on the hub. Step, data, schedule and optimizer state start anew, and
    the optimizer may be another one."""
    init_optimizer_state: bool = False
    """With --init-from, also take the optimizer state; the optimizer must be of the same kind."""
    resume_overrides: Annotated[str | None, tyro.conf.arg(metavar="FIELD,...")] = None
    """Fields or groups of fields, such as optimizer.learning_rate,schedule, that change on purpose
    when a run continues. Other changes of fields that define the run are refused."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Steps to trace, such as 20:24. The trace goes to the folder `profile` of the working
    directory, for `xprof --logdir` (pip install xprof) and Perfetto."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, if several processes train together; needs --num-processes and
    --process-id. None of the three is needed on TPU pods, under srun and with `maxmars launch`."""
    num_processes: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes of the run; 1, without the other two, ignores the cluster."""
    process_id: Annotated[NotNegative[int] | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""
    start_timeout_s: Annotated[Positive[float], tyro.conf.arg(metavar="SECONDS")] = 300.0
    """Longest wait, in seconds, for all processes to join; then the start fails."""


def run(argv: list[str]) -> int:
    """Run `maxmars train`; the exit code is 75 if the run was stopped and can continue, else 0."""
    command = shlex.join(["maxmars", "train", *argv])
    with RunProcess(command) as process:
        arguments = parse_arguments(TrainArguments, argv, prog="maxmars train", example="gpt2")
        try:
            return _train(arguments, process)
        except ValueError as error:
            # The error advises another --workdir, and the user may not know the default.
            if arguments.workdir is None and "--workdir" in str(error):
                raise ValueError(
                    f"{error} No --workdir was given: {_default_workdir(arguments)} is the "
                    "default, after the config's name."
                ) from error
            raise


def _train(arguments: TrainArguments, process: RunProcess) -> int:
    profile = _parse_steps(arguments.profile)
    if arguments.init_optimizer_state and arguments.init_from is None:
        raise UsageError("--init-optimizer-state needs --init-from PATH: whose state?")
    # Imported late, so that --help and wrong arguments answer at once.
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.checkpoint import list_steps
        from maxmars.checkpoint.lock import is_owned
        from maxmars.distributed.files import naming, resolve
        from maxmars.distributed.workdir import CHECKPOINTS
        from maxmars.train import InitFrom, train

    init_from = None
    if arguments.init_from is not None:
        init_from = InitFrom(
            path=arguments.init_from, optimizer_state=arguments.init_optimizer_state
        )
    # Users write fields as the options are called, such as optimizer.learning-rate.
    overrides = (arguments.resume_overrides or "").replace("-", "_").split(",")
    requested = arguments.workdir
    workdir = resolve(_default_workdir(arguments) if requested is None else requested)
    checkpoints = workdir / CHECKPOINTS

    def newest_step() -> int | None:
        # None where another process has the lock; one that is being killed has it for a moment.
        is_locked = is_owned(checkpoints, timeout_s=2.0)
        return None if is_locked else max(list_steps(checkpoints), default=0)

    with naming(workdir):
        process.join(
            workdir,
            newest_step,
            coordinator=arguments.coordinator,
            num_processes=arguments.num_processes,
            process_id=arguments.process_id,
            timeout_s=arguments.start_timeout_s,
        )
        result = train(
            arguments.config,
            workdir,
            init_from=init_from,
            resume_overrides=[name.strip() for name in overrides if name.strip()],
            profile=profile,
            process=process,
        )
    return process.end(done=result.done)


def _default_workdir(arguments: TrainArguments) -> str:
    return f"runs/{arguments.config.name}"


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not first.isdecimal() or not last.isdecimal():
        raise UsageError(f"--profile {text} must be the first and the last step, such as 20:24.")
    return int(first), int(last)
