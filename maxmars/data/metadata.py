"""Directories of tokens: their description.

A directory of token shards holds `train_00000.bin`, ..., `val_00000.bin`, ...: raw little-endian
token ids, uint16 or uint32; and `meta.json`, which describes them (see `Metadata`). The shards of a
split, in the order of `meta.json`, are one stream of tokens. `train_documents.bin` and
`val_documents.bin` say where in the stream each document starts: raw little-endian uint64.
`tokenizer.json` and `tokenizer_config.json` are the tokenizer (`data/tokenizer.py`). `meta.json` is
written last: a directory without it is unfinished, and has `plan.json`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from etils import epath

from maxmars.config.checks import CheckedConfig, NotNegative, from_json
from maxmars.config.errors import about, in_words
from maxmars.data.rows import Skipped
from maxmars.data.tokenizer import Loss
from maxmars.distributed.files import parse_json, read_text, reporting, resolve, write_text

FORMAT = "maxmars-tokens"
VERSION = 3
METADATA, PLAN = "meta.json", "plan.json"
PREPARE = (
    "run `maxmars data prepare SOURCE DIRECTORY` to make one, with `--tokenizer gpt2` for GPT-2"
)
AGAIN = "delete the directory and prepare it again"


class NoSuchSplitError(ValueError):
    """A directory of tokens has no split of this name."""


@dataclass(frozen=True, kw_only=True)
class Shard(CheckedConfig):
    """One file of tokens."""

    file: str
    num_tokens: NotNegative[int]
    sha256: str
    crc32c: str | None = None
    """The checksum that buckets keep: base64 of the big-endian CRC32C. None where the text was
    prepared without the extra `gcs`."""


@dataclass(frozen=True, kw_only=True)
class DocumentStarts(CheckedConfig):
    """The file with the first token of each document of a split, in order: little-endian uint64."""

    file: str
    count: NotNegative[int]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Split(CheckedConfig):
    """The shards of one split; `num_documents` counts the end-of-text tokens in them."""

    num_tokens: NotNegative[int]
    num_documents: NotNegative[int]
    shards: tuple[Shard, ...]
    documents: DocumentStarts | None = None


@dataclass(frozen=True, kw_only=True)
class Metadata(CheckedConfig):
    """Contents of a directory of token shards. A split without tokens is not listed."""

    tokenizer: str
    tokenizer_digest: str
    vocab_size: NotNegative[int]
    dtype: Literal["uint16", "uint32"]
    splits: dict[str, Split]
    source: str
    command: str | None = None
    loss: Loss | None = None
    """Characters of a sample that the tokenizer loses; None where it loses none."""
    skipped: Skipped | None = None
    """Lines and rows that were left out; None where none."""
    repeated: int | None = None
    """Documents of `val` that are in `train` too, token for token; None where none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, split in self.splits.items():
            if split.num_tokens != sum(s.num_tokens for s in split.shards):
                raise ValueError(f"the shards of {name} do not add up to its num_tokens.")
            for shard in (*split.shards, *filter(None, [split.documents])):
                if Path(shard.file).name != shard.file:  # ../name would read any file
                    raise ValueError(f"the shard {shard.file!r} is outside the directory.")


def write_metadata(directory: epath.Path, metadata: Metadata) -> None:
    """Write `meta.json` into a directory, atomically; fields that are None are left out."""
    fields = asdict(metadata, dict_factory=lambda items: {k: v for k, v in items if v is not None})
    fields = {"format": FORMAT, "version": VERSION, **fields}
    write_text(directory / METADATA, json.dumps(fields, indent=2) + "\n")


def check_finished(directory: epath.Path) -> None:
    """Refuse a directory of tokens whose preparation is unfinished.

    Raises:
      FileNotFoundError: the directory has a `plan.json`, but no `meta.json` yet.
    """
    with reporting(directory):
        unfinished = (directory / PLAN).exists() and not (directory / METADATA).exists()
    if unfinished:
        raise FileNotFoundError(
            f"the preparation of {directory} is unfinished; run its `maxmars data prepare` command "
            "again to continue it."
        )


def read_metadata(directory: str | os.PathLike[str]) -> Metadata:
    """The contents of the `meta.json` of a directory of token shards.

    Raises:
      FileNotFoundError: there is no such directory or no `meta.json` in it.
      ValueError: `meta.json` is damaged, or of another format or version.
      OSError: `meta.json` cannot be read.
    """
    path = resolve(directory) / METADATA
    text = read_text(path)
    if text is None:
        check_finished(path.parent)
        what = "is no directory" if path.parent.exists() else "does not exist"
        what = "has no meta.json" if path.parent.is_dir() else what
        raise FileNotFoundError(f"the token directory {directory} {what}; {PREPARE}.")
    return parse_metadata(text, path)


def parse_metadata(text: str, path: epath.Path) -> Metadata:
    """The metadata in the text of the `meta.json` at `path`; see `read_metadata`.

    Raises:
      ValueError: the text is damaged, or of another format or version.
    """
    with about(path):
        try:
            fields = from_json(dict[str, Any], parse_json(text))
            format_, version = fields.pop("format", None), fields.pop("version", None)
            if format_ != FORMAT or version != VERSION:
                raise ValueError(
                    f"it is of format {format_!r} version {version!r}, but this maxmars reads "
                    f"{FORMAT!r} version {VERSION}"
                )
            return from_json(Metadata, fields)
        except ValueError as error:
            raise ValueError(f"{in_words(error).removesuffix('.')}; {AGAIN}.") from None
