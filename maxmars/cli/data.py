"""`maxmars data`: prepare text for training, join parts of it, and look at the result."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg

_RECORD_TOKENS = 1024


def prepare(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[Path, Positional, arg(metavar="OUT")],
    tokenizer: Annotated[str, arg(metavar="byte|gpt2|FILE.json")] = "byte",
    validation_fraction: float | None = None,
    text_field: str | None = None,
    data_dir: str | None = None,
    eot_token: str = "<|endoftext|>",
    workers: int | None = None,
    part: Annotated[str | None, arg(metavar="I/N")] = None,
    format: Literal["shards", "tfds"] = "shards",
    shard_tokens: int = 100_000_000,
    record_tokens: int = _RECORD_TOKENS,
) -> None:
    """Turn text into tokens, which a config reads as TokenShardsConfig(path=OUT).

    SOURCE is one of

      'books/*.txt'                   local files: .txt (each is one document), .jsonl, .jsonl.gz,
                                      .jsonl.zst, .parquet (each line or row is one); quote globs
      tfds:NAME[:split]               a TFDS dataset prepared as array_record; needs no TensorFlow
      hf:REPO[:config][:split]        a Hugging Face dataset, streamed, or a local directory of one
      openwebtext | fineweb-edu | c4 | wikitext-103
                                      these datasets of the Hugging Face hub (tested only against a
                                      local imitation of the hub)
      python                          the sources of Python's standard library

    A hash of its name decides whether a document is held out for validation; of fewer than 100
    documents, the end of each is.

    Run again after an interruption, the same command continues; the result is the same.

    With --part, several machines share a corpus, and `maxmars data merge` joins what they made. A
    part is a run of whole files or, where there are fewer files than parts, every N-th document.

    Args:
      source: See above.
      out: Directory to write.
      tokenizer: `byte`, `gpt2` (BPE of 50257 tokens), or the path of a Hugging Face tokenizer.json.
      validation_fraction: Part to hold out; by default 0.1, of the large datasets above less.
      text_field: Where the text is in a line or row; by default `text`, or what the preset says.
      data_dir: Where TFDS keeps its datasets, for tfds:NAME.
      eot_token: The token of a tokenizer.json that ends a document.
      workers: Processes that tokenise, by default as many as there are cores; 0 starts none.
      part: Prepare only part I of N, from 0; see above.
      format: `shards` are plain files of numbers, `tfds` is a dataset for tfds.data_source.
      shard_tokens: Tokens a file.
      record_tokens: Tokens a record with --format tfds.
    """
    from maxmars.data.open_corpus import PRESETS, open_corpus  # here: --help need not load NumPy
    from maxmars.data.prepare import prepare as prepare_tokens
    from maxmars.data.tokenizer import load_tokenizer

    if validation_fraction is None:
        validation_fraction = PRESETS[source].validation_fraction if source in PRESETS else 0.1
    options = {
        "--tokenizer": tokenizer,
        "--validation-fraction": validation_fraction,
        "--text-field": text_field,
        "--data-dir": data_dir,
        "--eot-token": eot_token if tokenizer.endswith(".json") else None,
        "--part": part,
        "--format": format,
    }
    given = [word for k, v in options.items() if v is not None for word in (k, str(v))]
    metadata = prepare_tokens(
        open_corpus(source, text_field=text_field, data_dir=data_dir),
        out,
        tokenizer=load_tokenizer(tokenizer, eot_token=eot_token),
        source=source,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        workers=(os.cpu_count() or 1) if workers is None else workers,
        part=None if part is None else _parse_part(part),
        record_tokens=record_tokens if format == "tfds" else None,
        command=shlex.join(["maxmars", "data", "prepare", source, str(out), *given]),
    )
    _print_written(metadata, out)


def merge(
    parts: Annotated[tuple[Path, ...], Positional, arg(metavar="PART...")],
    out: Annotated[Path, arg(metavar="DIR")],
    format: Literal["shards", "tfds"] = "shards",
    record_tokens: int = _RECORD_TOKENS,
) -> None:
    """Join the parts that `prepare --part` made, in any order, after checking them.

    Args:
      parts: Directories of all parts.
      out: Directory to write.
      format: `shards` are plain files of numbers, `tfds` is a dataset for tfds.data_source.
      record_tokens: Tokens a record with --format tfds.
    """
    from maxmars.data.merge import merge as merge_parts

    if not parts:
        raise ValueError(
            "maxmars data merge needs the directories of the parts: PART... --out DIR."
        )
    metadata = merge_parts(
        parts,
        out,
        record_tokens=record_tokens if format == "tfds" else None,
        command=shlex.join(["maxmars", "data", "merge", *map(str, parts), "--out", str(out)]),
    )
    _print_written(metadata, out)


def inspect(
    directory: Annotated[Path, Positional, arg(metavar="DIR")],
    compare: Annotated[Path | None, arg(metavar="DIR")] = None,
    verify: bool = True,
) -> int:
    """Show what prepared tokens hold, and compare every file with its checksum.

    Args:
      directory: A directory that `prepare` or `merge` made.
      compare: Say whether this directory holds the same stream of tokens; exit with 1 if not.
      verify: Compare the files with their checksums, which reads all of them.
    """
    from maxmars.cli.data_tables import print_summary
    from maxmars.data import inspect as tokens

    directories = {directory: tokens.read_any_metadata(directory)}
    if compare is not None:
        directories[compare] = tokens.read_any_metadata(compare)
    if verify:
        for path, described in directories.items():
            tokens.verify(path, described)
            print(f"{path}: every file matches its checksum")
    print_summary(directory, directories[directory])
    if compare is None:
        return 0
    found = tokens.differences(directory, compare)
    if not found:
        print(f"{directory} and {compare} hold the same tokens")
        return 0
    print(f"{directory} and {compare} differ:", *found, sep="\n  ")
    return 1


def _parse_part(part: str) -> tuple[int, int]:
    index, slash, count = part.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise ValueError(f"--part {part} must be I/N with 0 <= I < N, such as 0/4.")
    return int(index), int(count)


def _print_written(metadata: object, out: Path) -> None:
    from maxmars.data.sources import Metadata

    assert isinstance(metadata, Metadata)
    counts = ", ".join(f"{s.num_tokens:,} tokens ({n})" for n, s in metadata.splits.items())
    print(f"wrote {counts or 'no tokens'} to {out}")


def run(argv: list[str]) -> int:
    """Run `maxmars data`."""
    app = tyro.extras.SubcommandApp()
    app.command(prepare)
    app.command(merge)
    app.command(inspect)
    code = app.cli(args=argv, prog="maxmars data", description="Prepare text for training.")
    return code or 0
