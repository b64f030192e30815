"""`maxmars export`: a model as a Hugging Face directory.

`eval/trained_model.py` writes the weights, `train/card.py` the model card. Nothing is uploaded: the
last line that the command prints is the `hf upload` for it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from maxmars.cli.parse import parse_options
from maxmars.config.checks import CheckedConfig


@dataclass(frozen=True, kw_only=True)
class ExportArguments(CheckedConfig):
    """Write a model as a directory for transformers.GPT2LMHeadModel.from_pretrained, or for the
    class that the method `export` of your own module names.

    README.md in the directory is a model card with data, optimizer, losses, scores, devices and
    digests of the run. Read the card before you publish it. The last line that this command prints
    is the command that uploads the directory to the Hugging Face hub.

    The weights go to model.safetensors, above 5 GB to several files; the weights of one file are
    in memory at once.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "maxmars export runs/quickstart hf/quickstart",
        "maxmars export runs/quickstart hf/quickstart --report scores.json",
    )

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Model: the working directory of a run, a checkpoint such as runs/quickstart/checkpoints/500,
    a Hugging Face directory, or hf:OWNER/NAME[@REVISION] on the hub."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """New directory for the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the written weights; float32 keeps every bit."""
    report: Annotated[str | None, tyro.conf.arg(metavar="FILE.json,...")] = None
    """Files of `maxmars eval TARGET --output FILE.json` whose scores go into the card."""


def run(argv: list[str]) -> int:
    """Run `maxmars export`."""
    arguments = parse_options(ExportArguments, argv, prog="maxmars export")
    from maxmars.distributed.progress import loading_jax

    with loading_jax():
        from maxmars.eval.trained_model import Exported, export_model
        from maxmars.train.card import CARD, read_report, write_card

    out = arguments.out
    # Read before the model, as a wrong file should be refused at once.
    reports = [read_report(path) for path in (arguments.report or "").split(",") if path]

    # Called before the directory gets its name, so that no export is without its card.
    def add_card(directory: Path, exported: Exported) -> None:
        write_card(directory, exported, name=Path(out).name, reports=reports)

    exported = export_model(arguments.target, out, dtype=arguments.dtype, add_files=add_card)
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    size = f"{exported.num_bytes / 1e9:.3g} GB of {arguments.dtype} weights in {files}"
    print(f"{out}: {exported.name}, {size}")
    for note in exported.notes:
        print(note)
    if not reports:
        again = shlex.join(["maxmars", "eval", arguments.target, "--output", "scores.json"])
        print(f"for scores in its card: `{again}`, and export with --report scores.json")
    print(f"{CARD} in it is the model card; read it, and choose a license there")
    print(f'load it by transformers.{exported.architecture}.from_pretrained("{out}")')
    print(f"next: hf upload OWNER/NAME {shlex.quote(out)}")
    return 0
