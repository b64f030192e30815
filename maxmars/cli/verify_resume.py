"""`maxmars verify-resume`: prove that a killed and continued run equals an undisturbed one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from maxmars.cli.config_file import ConfigArguments, parse_arguments

_USAGE = """\
usage: maxmars verify-resume CONFIG [--steps N] [--out DIR] [--FIELD VALUE ...]

Train a config for a few steps four times over: undisturbed, the same as a control, and once killed
with SIGKILL and continued. Says whether all losses and the last state agree bit by bit, writes
receipt.json and receipt.txt, and exits with 1 if they do not.

  maxmars verify-resume configs/quickstart.py
  maxmars verify-resume configs/gpt2.py:size=small,optimizer=mars --steps 40"""


@dataclass(frozen=True, kw_only=True)
class VerifyResumeArguments(ConfigArguments):
    """Prove on this hardware that a killed and continued run equals an undisturbed one."""

    steps: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Steps of each run."""
    checkpoint_step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Step whose checkpoint the killed run is continued from; None takes half of the steps."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for the runs and the receipt; None is runs/NAME-verify-resume."""


def run(argv: list[str]) -> int:
    """Run `maxmars verify-resume`."""
    arguments = parse_arguments(
        VerifyResumeArguments, argv, prog="maxmars verify-resume", usage=_USAGE
    )
    from maxmars.verify_resume import verify_resume  # loads JAX

    out = arguments.out or f"runs/{arguments.config.name}-verify-resume"
    checkpoint_step = arguments.checkpoint_step
    receipt = verify_resume(
        arguments.config,
        out,
        steps=arguments.steps,
        checkpoint_step=arguments.steps // 2 if checkpoint_step is None else checkpoint_step,
    )
    print(f"{receipt.text}\nreceipt: {Path(out) / 'receipt.json'}")
    return 0 if receipt.verdict == "identical" else 1
