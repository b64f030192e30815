"""`maxmars import`: make a Hugging Face model a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Make a directory with a checkpoint of a Hugging Face GPT-2, as a run has it.

    What takes a Hugging Face directory reads it as it is; import it to keep it with digests.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
    """Directory with config.json, model.safetensors (or several such files and their index), and
    tokenizer files."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to make."""


def run(argv: list[str]) -> int:
    """Run `maxmars import`."""
    arguments = tyro.cli(ImportArguments, args=argv, prog="maxmars import")
    from maxmars.convert import import_model  # loads JAX
    from maxmars.model import num_parameters

    config = import_model(arguments.source, arguments.out)
    print(f"{arguments.out}: {num_parameters(config) / 1e6:.2f}M parameters as checkpoint 0")
    return 0
