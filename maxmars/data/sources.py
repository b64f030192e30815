"""Token shards on disk: their description.

A directory of token shards holds `train_00000.bin`, ..., `val_00000.bin`, ...: raw little-endian
token ids, uint16 or uint32; and `meta.json`, which describes them (see `Metadata`). The shards of a
split, one after the other, are one stream of tokens. `train_documents.bin` and `val_documents.bin`
say where in the stream each document starts: raw little-endian uint64. A `tokenizer.json` that the
text was prepared with lies beside them.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

FORMAT = "maxmars-tokens"
TFDS_FORMAT = "maxmars-tfds-tokens"
VERSION = 2
_PREPARE = "run `maxmars data prepare SOURCE DIRECTORY` to make one"
AGAIN = "delete the directory and prepare it again"


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens."""

    file: str
    num_tokens: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DocumentStarts:
    """The file that says where each document of a split starts, in order: little-endian uint64."""

    file: str
    count: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of one split; `num_documents` counts the end-of-text tokens in them."""

    num_tokens: int
    num_documents: int
    shards: tuple[Shard, ...]
    documents: DocumentStarts | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a corpus a directory holds, if not all of it (see `maxmars data merge`)."""

    index: int
    count: int
    shard_tokens: int
    """Tokens a file when the parts are merged."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What is in a directory of token shards. A split without tokens is not listed."""

    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    dtype: str
    splits: dict[str, Split]
    source: str
    command: str | None = None
    eot_token: str | None = None
    """The token that ends a document, of a `tokenizer.json` that lies in the directory."""
    part: Part | None = None
    record_tokens: int | None = None
    """Tokens a record where the shards are ArrayRecord files of a TFDS dataset; else None."""

    def __post_init__(self) -> None:
        """Reject what no directory of ours says."""
        if self.dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype is {self.dtype!r}, not uint16 or uint32.")
        for name, split in self.splits.items():
            if split.num_tokens != sum(s.num_tokens for s in split.shards):
                raise ValueError(f"the shards of {name} do not add up to its num_tokens.")
            for shard in (*split.shards, *filter(None, [split.documents])):
                if Path(shard.file).name != shard.file:
                    raise ValueError(f"the shard {shard.file!r} is outside the directory.")


def write_metadata(directory: Path, metadata: Metadata) -> None:
    """Write `meta.json` into a directory; what is None is left out."""
    fields = asdict(metadata, dict_factory=lambda items: {k: v for k, v in items if v is not None})
    name = FORMAT if metadata.record_tokens is None else TFDS_FORMAT
    fields = {"format": name, "version": VERSION, **fields}
    (directory / "meta.json").write_text(json.dumps(fields, indent=2) + "\n")


def read_metadata(directory: str | Path, *, format: str = FORMAT) -> Metadata:
    """What `meta.json` says of a directory of token shards, or of a TFDS dataset (`TFDS_FORMAT`).

    Raises:
      FileNotFoundError: there is no such directory or no `meta.json` in it.
      ValueError: `meta.json` is damaged, or of another format or version.
    """
    path = Path(directory) / "meta.json"
    if not path.is_file():
        what = "has no meta.json" if path.parent.is_dir() else "does not exist"
        raise FileNotFoundError(f"the token directory {directory} {what}; {_PREPARE}.")
    try:
        fields = json.loads(path.read_text())
        found = fields.pop("format"), fields.pop("version")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no description of token shards; {AGAIN}.") from error
    if found != (format, VERSION):
        raise ValueError(
            f"{path} is of format {found[0]!r} version {found[1]!r}, but this maxmars reads "
            f"{format!r} version {VERSION}; prepare the directory again with this version."
        )
    try:
        splits = {name: _split_from(split) for name, split in fields.pop("splits").items()}
        part = Part(**fields.pop("part")) if "part" in fields else None
        return Metadata(**fields, splits=splits, part=part)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); {AGAIN}.") from error


def _split_from(fields: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
    starts = DocumentStarts(**fields.pop("documents")) if "documents" in fields else None
    return Split(**fields, shards=shards, documents=starts)


class LateStatus:
    """A status line on stderr that appears only when a job has taken two seconds."""

    def __init__(self, delay_s: float = 2.0) -> None:
        """Appear after `delay_s` seconds."""
        self._delay_s = delay_s
        self._status: Status | None = None

    def __enter__(self) -> LateStatus:
        """Start the clock."""
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._status is not None:
            self._status.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def update(self, text: str) -> None:
        """Show this text, if it is time."""
        if self._status is not None:
            self._status.update(text)
        elif self.elapsed_s >= self._delay_s:
            self._status = Console(stderr=True).status(text)
            self._status.start()
