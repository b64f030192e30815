"""`maxmars generate`: continue a prompt with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """Continue a prompt with the newest checkpoint of a run."""

    workdir: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="WORKDIR")]
    """Working directory of the run, such as runs/quickstart."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """Text to continue."""
    max_new_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 200
    """Number of tokens to add."""
    temperature: float = 0.8
    """Below 1 takes likely tokens more often, 0 always the likeliest."""
    top_k: int | None = 40
    """Sample among this many likeliest tokens only; None takes them all."""
    seed: int = 0
    """Seed of the sampling."""


def run(argv: list[str]) -> int:
    """Run `maxmars generate`."""
    arguments = tyro.cli(GenerateArguments, args=argv, prog="maxmars generate")
    from maxmars.generate import generate_text  # loads JAX

    continuation = generate_text(
        arguments.workdir,
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    print(arguments.prompt + continuation)
    return 0
