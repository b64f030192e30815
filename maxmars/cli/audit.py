"""`maxmars audit`: whether a run is one trajectory, as its journal says."""

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
    """Check that a run is one trajectory: states and data against its journal.

    Exits with 1 where it is not, and says where it breaks. Whether metrics.jsonl is as recorded
    stands in a line of its own.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars audit runs/quickstart",
        "maxmars audit runs/quickstart --replay 250",
    )

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The working directory of a run, such as runs/quickstart."""
    replay: Annotated[Positive[int] | None, tyro.conf.arg(metavar="K")] = None
    """Compute K steps again, from a checkpoint that is still there, or from the seed, to a later
    saved step, and compare the digests. On other hardware or another mesh, rounding may differ."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """Write the result here."""


def run(argv: list[str]) -> int:
    """Run `maxmars audit`; 1 if the run is broken, else 0."""
    arguments = parse_options(AuditArguments, argv, prog="maxmars audit")
    if arguments.output is not None and (problem := why_no_output(arguments.output)):
        raise UsageError(problem)
    from maxmars.distributed.files import write_json
    from maxmars.distributed.progress import Progress

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    with Progress(stderr=True, quiet=True) as progress, progress.waiting("auditing"):
        from maxmars.train.audit import audit  # loads JAX

        result = audit(arguments.run, replay=arguments.replay, log=log)
    if arguments.output is not None:
        fields = {"verdict": result.verdict, **dataclasses.asdict(result)}
        write_json(arguments.output, fields)
    print(result.text)
    return 1 if result.problems else 0
