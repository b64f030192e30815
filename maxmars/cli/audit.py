"""`maxmars audit`: whether states and data of a run agree with its journal.

The work is in `train/audit.py`. Exit code 1 is a negative verdict, so that scripts may rely on it.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from maxmars.cli.output import why_no_output
from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig, Positive, UsageError


@dataclass(frozen=True, kw_only=True)
class AuditArguments(CheckedConfig):
    """Check that a run is one trajectory: compare its states and data with its journal.

    The exit code is 1 where they differ, and the text says at which step. A line of its own says
    whether metrics.jsonl is unchanged.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars audit runs/quickstart",
        "maxmars audit runs/quickstart --replay 250",
    )

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Working directory of a run, such as runs/quickstart."""
    replay: Annotated[Positive[int] | None, tyro.conf.arg(metavar="K")] = None
    """Number of steps to compute again, from an existing checkpoint or from the seed to a later
    saved step; then compare the digests. Other hardware or another mesh may round differently."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """File for the result as JSON."""


def run(argv: list[str]) -> int:
    """Run `maxmars audit`; the exit code is 1 if the run is broken, else 0."""
    arguments = parse_options(AuditArguments, argv, prog="maxmars audit")
    if problem := why_no_output(arguments.output):
        raise UsageError(problem)
    from maxmars.distributed.files import write_json
    from maxmars.distributed.progress import Progress

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    # Quiet, as `log` prints the lines; on a terminal a row shows that the audit goes on.
    with Progress(stderr=True, quiet=True) as progress, progress.waiting("auditing"):
        from maxmars.train.audit import audit  # loads JAX

        result = audit(arguments.run, replay=arguments.replay, log=log)
    if arguments.output is not None:
        # A property, which `asdict` leaves out.
        fields = {"verdict": result.verdict, **dataclasses.asdict(result)}
        write_json(arguments.output, fields)
    print(result.text)
    return 1 if result.problems else 0
