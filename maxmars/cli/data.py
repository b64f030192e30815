"""`maxmars data`: prepare text for training."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg


def prepare(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[Path, Positional, arg(metavar="OUT")],
    tokenizer: Literal["byte", "gpt2"] = "byte",
    validation_fraction: float = 0.05,
) -> None:
    """Turn text into token shards, which a config reads as TokenShardsConfig(path=OUT).

    Args:
      source: `python` for the sources of Python's standard library, or text files: 'books/*.txt'.
      out: Directory to write.
      tokenizer: `byte` has one token a byte, `gpt2` is GPT-2's BPE of 50257 tokens.
      validation_fraction: Fraction of the documents to keep for validation.
    """
    from maxmars.data import prepare as shards  # here, so that --help need not load NumPy
    from maxmars.data.tokenizer import load_tokenizer

    options = ["--tokenizer", tokenizer, "--validation-fraction", str(validation_fraction)]
    documents = shards.python_documents() if source == "python" else shards.text_documents([source])
    metadata = shards.prepare(
        documents,
        out,
        tokenizer=load_tokenizer(tokenizer),
        source=source,
        validation_fraction=validation_fraction,
        command=shlex.join(["maxmars", "data", "prepare", source, str(out), *options]),
    )
    counts = ", ".join(f"{s.num_tokens:,} tokens ({n})" for n, s in metadata.splits.items())
    print(f"wrote {counts} to {out}")


def run(argv: list[str]) -> int:
    """Run `maxmars data`."""
    app = tyro.extras.SubcommandApp()
    app.command(prepare)
    app.cli(args=argv, prog="maxmars data", description="Prepare text for training.")
    return 0
