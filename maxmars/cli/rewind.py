"""`maxmars rewind`: take a run back to an older checkpoint, or past training examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig, NotNegative


@dataclass(frozen=True, kw_only=True)
class RewindArguments(CheckedConfig):
    """Take a run back to an older checkpoint; its `maxmars train` command goes on from there.

    Nothing is deleted: the newer checkpoints are set aside as STEP.rewound. Run it once, by one
    process, while nothing trains the run. The journal records it, and `maxmars audit` tells it.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars rewind runs/quickstart --to 500",
        "maxmars rewind runs/quickstart --to 500 --skip-examples 1024",
    )

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The working directory of a run, such as runs/quickstart, also on gs://."""
    to: Annotated[NotNegative[int], tyro.conf.arg(metavar="STEP")]
    """Step of the checkpoint to go on from; it may be the newest."""
    skip_examples: Annotated[NotNegative[int], tyro.conf.arg(metavar="N")] = 0
    """Leave out this number of training examples from there on. A step has global_batch_size of
    them, and its line of metrics.jsonl the first as train/first_example."""
    new_optimizer_state: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Make the optimizer's state anew, which may then be another optimizer's (give the train
    command --resume-overrides optimizer); parameters, step, schedule and data go on."""


def run(argv: list[str]) -> int:
    """Run `maxmars rewind`; 0."""
    arguments = parse_options(RewindArguments, argv, prog="maxmars rewind")
    from maxmars.distributed.progress import Progress

    with Progress(stderr=True) as progress, progress.waiting("rewinding"):
        from maxmars.train.rewind import rewind  # loads JAX

        command = rewind(
            arguments.run,
            arguments.to,
            skip_examples=arguments.skip_examples,
            new_optimizer_state=arguments.new_optimizer_state,
            log=progress.message,
        )
    print(f"next: {command or 'the call of `train` that trained it'}")
    return 0
