"""`maxmars export` and `maxmars import`: models to and from Hugging Face directories."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from maxmars.config.command_line import parse_options


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Write a model as a directory that transformers.GPT2LMHeadModel.from_pretrained loads.

    The weights go to model.safetensors, above 5 GB to several files; the weights of one file are
    in memory at once.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Working directory of a run, one checkpoint of it such as runs/quickstart/checkpoints/500, or
    a Hugging Face directory."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to make."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in it; float32 keeps every bit."""


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Write a Hugging Face GPT-2 as a checkpoint, with digests, in a new directory.

    Commands that take a run also take a Hugging Face directory as it is; import it where later
    damage must be noticed, or the model must be in a bucket.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HF_DIR")]
    """Directory with config.json, model.safetensors (or several such files and their index), and
    tokenizer files."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Directory to make."""


def run_export(argv: list[str]) -> int:
    """Run `maxmars export`."""
    arguments = parse_options(ExportArguments, argv, prog="maxmars export")
    from maxmars.eval.trained_model import export_model  # loads JAX

    exported = export_model(arguments.target, arguments.out, dtype=arguments.dtype)
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    print(
        f"{arguments.out}: {exported.name}, {exported.num_bytes / 1e9:.3g} GB of {arguments.dtype} "
        f"weights in {files}"
    )
    for note in exported.notes:
        print(note)
    print(f'load it by transformers.GPT2LMHeadModel.from_pretrained("{arguments.out}")')
    return 0


def run_import(argv: list[str]) -> int:
    """Run `maxmars import`."""
    arguments = parse_options(ImportArguments, argv, prog="maxmars import")
    from maxmars.eval.trained_model import import_model  # loads JAX
    from maxmars.model.language_model import num_parameters

    config = import_model(arguments.source, arguments.out)
    print(f"{arguments.out}: {num_parameters(config) / 1e6:.2f}M parameters as checkpoint 0")
    print(f"next: {shlex.join(['maxmars', 'eval', arguments.out])}")
    return 0
