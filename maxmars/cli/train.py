"""`maxmars train`: train as a config file says, or continue a run."""

from __future__ import annotations

from maxmars import cpu_settings
from maxmars.cli.config_file import UsageError, parse_arguments
from maxmars.cli.train_arguments import USAGE, TrainArguments


def run(argv: list[str]) -> int:
    """Run `maxmars train`."""
    arguments = parse_arguments(TrainArguments, argv, prog="maxmars train", usage=USAGE)
    cpu_settings.prepare(arguments.config)
    # Imported late: both load JAX, which --help and wrong arguments need not wait for.
    from maxmars import distributed
    from maxmars.init_from import InitFrom
    from maxmars.preemption import EXIT_CODE
    from maxmars.train import train

    init_from = None
    if arguments.init_from is not None:
        init_from = InitFrom(
            path=arguments.init_from, optimizer_state=arguments.init_optimizer_state
        )
    elif arguments.init_optimizer_state:
        raise UsageError("--init-optimizer-state needs --init-from PATH: whose state?")
    profile = _parse_steps(arguments.profile)
    distributed.initialize(
        arguments.coordinator,
        arguments.num_processes,
        arguments.process_id,
        timeout_s=arguments.start_timeout_s,
    )
    workdir = arguments.workdir or f"runs/{arguments.config.name}"
    overrides = (arguments.resume_overrides or "").replace("-", "_").split(",")
    done = train(
        arguments.config,
        workdir,
        init_from=init_from,
        resume_overrides=[name.strip() for name in overrides if name.strip()],
        profile=profile,
    )
    return 0 if done else EXIT_CODE


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not first.isdecimal() or not last.isdecimal():
        raise UsageError(f"--profile {text} must be the first and the last step, such as 20:24.")
    return int(first), int(last)
