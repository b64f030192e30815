"""`maxmars rewind`: take a run back to an older checkpoint, or skip training examples.

The work is in `train/rewind.py`, which appends one line to the journal; so the next `maxmars train`
needs no further option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig, NotNegative


@dataclass(frozen=True, kw_only=True)
class RewindArguments(CheckedConfig):
    """Take a run back to an older checkpoint; the next `maxmars train` continues from there.

    Nothing is deleted: newer checkpoints are renamed to STEP.rewound. Give the command once, in one
    process, while nothing trains the run. The journal records it, and `maxmars audit` shows it.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars rewind runs/quickstart --to 500",
        "maxmars rewind runs/quickstart --to 500 --skip-examples 1024",
    )

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Working directory of a run, such as runs/quickstart, also on gs://."""
    to: Annotated[NotNegative[int], tyro.conf.arg(metavar="STEP")]
    """Step of the checkpoint to continue from, which may be the newest."""
    skip_examples: Annotated[NotNegative[int], tyro.conf.arg(metavar="N")] = 0
    """Number of training examples to skip after that step. A step has global_batch_size examples;
    the number of its first one is train/first_example in metrics.jsonl."""
    new_optimizer_state: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start with a new optimizer state, also for another optimizer (then add --resume-overrides
    optimizer to the train command). Parameters, step, schedule and data continue."""


def run(argv: list[str]) -> int:
    """Run `maxmars rewind`; the exit code is 0."""
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
