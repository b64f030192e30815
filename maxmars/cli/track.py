"""`maxmars track verify` and `maxmars track board`: results that anybody can repeat."""

from __future__ import annotations

import os
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from maxmars.cli.parse import HELP, parse_options
from maxmars.config.checks import CheckedConfig, Positive, UsageError


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(CheckedConfig):
    """Compute runs of a receipt again, and compare digests and losses.

    `maxmars compare` writes a receipt for each contender. On the machine and with the versions of
    the receipt (and as many CPU cores) all losses are equal bit by bit, elsewhere up to rounding.
    Exits with 1 where the receipt is refused.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars track verify runs/which/receipt-mars.json",
        "maxmars track verify receipt-mars.json --cells 3 --steps 100",
    )

    receipt: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECEIPT")]
    """A receipt-*.json."""
    cells: Annotated[Positive[int], tyro.conf.arg(metavar="K")] = 1
    """Number of its runs, one a seed, to compute again."""
    steps: Annotated[Positive[int] | None, tyro.conf.arg(metavar="N")] = None
    """Compute only the first N steps of each; None computes all of them, and the final loss."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of the tokens here, if it is not the one in the receipt."""
    code: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for Python files that the receipt carries and that do not come with maxmars. The
    first time they are written there, for you to read; the same command again runs them."""


@dataclass(frozen=True, kw_only=True)
class BoardArguments(CheckedConfig):
    """Rank the receipts below a directory, those on the same model, data and tokens together.

    Writes board.md, board.json and a picture of the losses of each division there.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars track board .github/results",
        "maxmars track board receipts --target 3.28",
    )

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Directory with receipt-*.json, at any depth."""
    target: Annotated[float | None, tyro.conf.arg(metavar="LOSS")] = None
    """Rank by the number of steps to this validation loss, which counts as reached if (LOSS - mean)
    times the root of the number of seeds is at least 0.004; None ranks by the mean loss."""


_USAGE = """\
usage: maxmars track verify RECEIPT [--cells K] [--steps N]
       maxmars track board DIR [--target LOSS]

Results that anybody can repeat: `maxmars compare` writes a receipt of each
contender, `verify` computes its runs again, and `board` ranks receipts.

  maxmars track verify runs/which/receipt-mars.json
  maxmars track board .github/results

`maxmars track verify --help` and `maxmars track board --help` explain the
options."""


def run(argv: list[str]) -> int:
    """Run `maxmars track`."""
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if name in HELP:
        print(_USAGE)
        return 0
    if name == "verify":
        return _verify(parse_options(VerifyArguments, rest, prog="maxmars track verify"))
    if name == "board":
        return _board(parse_options(BoardArguments, rest, prog="maxmars track board"))
    raise UsageError(
        f"maxmars track needs one of verify, board, not {name!r}. See `maxmars track --help`."
    )


def _verify(arguments: VerifyArguments) -> int:
    from maxmars.compare.receipt import read_receipt  # loads JAX
    from maxmars.compare.track import verify

    receipt = read_receipt(arguments.receipt)
    with tempfile.TemporaryDirectory(prefix="maxmars-track-") as scratch:
        found = verify(
            receipt,
            Path(scratch),
            num_cells=arguments.cells,
            steps=arguments.steps,
            data_path=arguments.data,
            code=None if arguments.code is None else Path(arguments.code),
            log=lambda text: print(text, flush=True),
        )
    if any(repeated.problem for repeated in found):
        print(f"{arguments.receipt}: REFUSED")
        return 1
    cells = f"{len(found)} of {len(receipt.cells)} cells"
    steps = found[0].steps
    if steps < receipt.config.num_steps:
        print(
            f"{arguments.receipt}: the first {steps:,} steps are confirmed of {cells}; the final "
            "losses were not computed again"
        )
    else:
        print(f"{arguments.receipt}: confirmed, {cells}")
    print(f"next: {shlex.join(['maxmars', 'track', 'board', os.fspath(arguments.receipt.parent)])}")
    return 0


def _board(arguments: BoardArguments) -> int:
    from maxmars.compare.receipt import read_receipt  # loads JAX
    from maxmars.compare.track import make_board, write_board

    paths = sorted(arguments.directory.rglob("receipt-*.json"))
    if not paths:
        raise ValueError(f"{arguments.directory} has no receipt-*.json; name another directory.")
    receipts = {os.fspath(p.relative_to(arguments.directory)): read_receipt(p) for p in paths}
    divisions = make_board(receipts, arguments.target)
    write_board(divisions, arguments.directory)
    for division in divisions:
        print(division.title)
        for place, entry in enumerate(division.entries, 1):
            reached = {None: "", True: "  reached", False: "  not reached"}[entry.reached]
            print(f"  {place}. {entry.receipt.name}  {entry.loss.mean:.4f}{reached}")
    print(f"board: {arguments.directory / 'board.md'}")
    return 0
