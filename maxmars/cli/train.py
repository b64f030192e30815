"""`maxmars train`: train as a config file says, or continue a run.

`maxmars launch` checks the command line of `train` by `TrainArguments` before it rents anything.
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

    SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU and Ctrl-C finish the step, save and exit with code
    75; a second Ctrl-C leaves at once. Of several processes one that fails exits with 78, and the
    others with 75, as where one of them is killed or hangs.
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
    """Directory of the run's metrics and checkpoints; may be on gs:// (extra `gcs`)."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """Start a new run from these weights: a run, a checkpoint or a Hugging Face GPT-2. Of a run's
    directory its newest sound checkpoint is taken, of runs/NAME/checkpoints/STEP that one, also on
    gs://; hf:OWNER/NAME[@REVISION] is a model on the hub. Step, data, schedule and optimizer start
    anew, and the optimizer may be another one."""
    init_optimizer_state: bool = False
    """With --init-from, also take the optimizer state, whose optimizer must be of the same kind."""
    resume_overrides: Annotated[str | None, tyro.conf.arg(metavar="FIELD,...")] = None
    """Fields or groups of fields, such as optimizer.learning_rate,schedule, that change on purpose
    when a run continues; without it, fields that define the run are refused."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Trace these steps, such as 20:24, into the run's directory `profile`, which
    `xprof --logdir` (pip install xprof) and Perfetto show."""
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Address of process 0, where several processes train together; goes with the next two. On TPU
    pods, under srun and in the JobSets of `maxmars launch` none of the three is needed."""
    num_processes: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes of the run; 1 alone ignores the cluster."""
    process_id: Annotated[NotNegative[int] | None, tyro.conf.arg(metavar="I")] = None
    """Number of this process, from 0."""
    start_timeout_s: Annotated[Positive[float], tyro.conf.arg(metavar="SECONDS")] = 300.0
    """How long to wait for all processes to come before the start fails."""


def run(argv: list[str]) -> int:
    """Run `maxmars train`; 75 if a signal stopped it, else 0."""
    command = shlex.join(["maxmars", "train", *argv])
    with RunProcess(command) as process:
        arguments = parse_arguments(TrainArguments, argv, prog="maxmars train", example="gpt2")
        try:
            return _train(arguments, process)
        except ValueError as error:
            # It advises another --workdir, and the user may not know of the one that was taken.
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
    # Imported late, as --help and wrong arguments need not wait for them.
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
    overrides = (arguments.resume_overrides or "").replace("-", "_").split(",")
    named = arguments.workdir
    workdir = resolve(_default_workdir(arguments) if named is None else named)
    checkpoints = workdir / CHECKPOINTS

    def newest_step() -> int | None:
        # A process that is being killed keeps its lock for a moment.
        is_taken = is_owned(checkpoints, timeout_s=2.0)
        return None if is_taken else max(list_steps(checkpoints), default=0)

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
