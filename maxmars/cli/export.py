"""`maxmars export`: write a trained model as Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a model as a directory that transformers.GPT2LMHeadModel.from_pretrained loads.

    Weights are in model.safetensors, above 5 GB in several files. One parameter at a time is in
    memory.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Working directory of a run, one checkpoint of it such as runs/quickstart/checkpoints/500, or
    a Hugging Face directory."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to make."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in it; float32 keeps every bit."""


def run(argv: list[str]) -> int:
    """Run `maxmars export`."""
    arguments = tyro.cli(ExportArguments, args=argv, prog="maxmars export")
    from maxmars.convert import export_model  # loads JAX

    exported = export_model(arguments.target, arguments.out, dtype=arguments.dtype)
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    print(
        f"{arguments.out}: {exported.name}, {exported.num_bytes / 1e9:.3g} GB of {arguments.dtype} "
        f"weights in {files}"
    )
    for note in exported.notes:
        print(note)
    return 0
