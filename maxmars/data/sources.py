"""Token shards on disk: their description, reading them, and the windows a model trains on.

A directory of token shards holds `train_00000.bin`, ..., `val_00000.bin`, ...: raw little-endian
token ids, uint16 or uint32; and `meta.json`, which describes them (see `Metadata`). The shards of a
split, one after the other, are one stream of tokens. `train_documents.bin` and `val_documents.bin`
say where in the stream each document starts: raw little-endian uint64. A `tokenizer.json` that the
text was prepared with lies beside them.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from rich.console import Console
from rich.status import Status

FORMAT = "maxmars-tokens"
TFDS_FORMAT = "maxmars-tfds-tokens"
VERSION = 2
_PREPARE = "run `maxmars data prepare SOURCE DIRECTORY` to make one"
_AGAIN = "delete the directory and prepare it again"


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
        raise ValueError(f"{path} is no description of token shards; {_AGAIN}.") from error
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
        raise ValueError(f"{path} is damaged ({error}); {_AGAIN}.") from error


def _split_from(fields: dict[str, Any]) -> Split:
    shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
    starts = DocumentStarts(**fields.pop("documents")) if "documents" in fields else None
    return Split(**fields, shards=shards, documents=starts)


class TokenShards:
    """The tokens of one split as one stream, over all its shards.

    Files are mapped when they are first read, so that an object travels to another process as its
    path. Construction compares the sizes of the files with `meta.json`; `verify` reads them.

    Attributes:
      directory: where the shards are.
      split: `train` or `val`.
      metadata: what `meta.json` says.

    Raises:
      FileNotFoundError: the directory, its `meta.json` or one of the shards is missing.
      ValueError: `meta.json` is damaged, has no such split, or a shard has the wrong size.
    """

    def __init__(self, directory: str | Path, split: str) -> None:
        """Check the files of a split; map none."""
        self.directory = Path(directory)
        self.split = split
        self.metadata = read_metadata(directory)
        if split not in self.metadata.splits:
            raise ValueError(
                f"the token directory {directory} has no split {split!r}, only "
                f"{', '.join(self.metadata.splits) or 'none'}; prepare it again with a "
                "validation fraction greater than 0."
            )
        self._dtype = np.dtype(self.metadata.dtype).newbyteorder("<")
        self._shards = self.metadata.splits[split].shards
        self._starts = np.cumsum([0, *(s.num_tokens for s in self._shards)])
        self._maps: dict[int, np.ndarray] = {}
        for shard in self._shards:
            self._check_size(shard)

    def _check_size(self, shard: Shard) -> None:
        path, expected = self.directory / shard.file, shard.num_tokens * self._dtype.itemsize
        if not path.is_file():
            raise FileNotFoundError(f"the token shard {path} is missing; {_AGAIN}.")
        if path.stat().st_size != expected:
            raise ValueError(
                f"the token shard {path} has {path.stat().st_size} bytes, but meta.json says "
                f"{expected}: it was cut short or written over; {_AGAIN}."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped files."""
        return {**self.__dict__, "_maps": {}}

    def __repr__(self) -> str:
        """Directory and split, for messages."""
        return f"TokenShards({str(self.directory)!r}, {self.split!r})"

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return int(self._starts[-1])

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.metadata.vocab_size

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer."""
        return self.metadata.tokenizer

    def read(self, start: int, length: int) -> Int32[np.ndarray, " length"]:
        """The tokens [start, start + length) of the stream, across the borders of shards.

        Raises:
          ValueError: some of them lie outside the stream.
        """
        if start < 0 or length < 0 or start + length > self.num_tokens:
            raise ValueError(
                f"tokens [{start}, {start + length}) lie outside the {self.num_tokens} tokens "
                f"of split {self.split!r} in {self.directory}."
            )
        tokens = np.empty(length, np.int32)
        done, shard = 0, int(np.searchsorted(self._starts, start, "right")) - 1
        while done < length:
            offset = start + done - int(self._starts[shard])
            part = self._map(shard)[offset : offset + length - done]
            tokens[done : done + len(part)] = part
            done += len(part)
            shard += 1
        return tokens

    def _map(self, shard: int) -> np.ndarray:
        tokens = self._maps.get(shard)
        if tokens is None:
            # A plain array on the map: slicing np.memmap itself costs several microseconds.
            mapped = np.memmap(self.directory / self._shards[shard].file, self._dtype, "r")
            tokens = self._maps[shard] = mapped.view(np.ndarray)
        return tokens

    def verify(self) -> None:
        """Compare every shard of the split with its checksum.

        Raises:
          ValueError: a shard differs; the message names it.
        """
        with LateStatus() as status:
            for i, shard in enumerate(self._shards):
                status.update(f"verifying {self.split} shard {i + 1} of {len(self._shards)}")
                path = self.directory / shard.file
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                if found != shard.sha256:
                    raise ValueError(
                        f"the token shard {path} does not match its checksum: its SHA-256 is "
                        f"{found}, but meta.json says {shard.sha256}; {_AGAIN}."
                    )


class TokenWindows:
    """The non-overlapping windows of a stream, by index.

    Window i is the `length` tokens from `i * length` on and the one after them: inputs are
    `window[:-1]`, targets `window[1:]`, so each token but the first is predicted once.

    Raises:
      ValueError: the stream is too short for one window.
    """

    def __init__(self, shards: TokenShards, length: int) -> None:
        """Windows of `length` + 1 tokens over `shards`."""
        self._shards = shards
        self._length = length
        if len(self) < 1:
            raise ValueError(
                f"split {shards.split!r} of {shards.directory} has {shards.num_tokens} tokens, too "
                f"few for one window of {length} + 1; prepare more text or lower model.max_seq_len."
            )

    def __len__(self) -> int:
        """Number of windows."""
        return (self._shards.num_tokens - 1) // self._length

    def __getitem__(self, index: int) -> Int32[np.ndarray, " window"]:
        """Window `index`, which must lie in [0, len)."""
        return self._shards.read(index * self._length, self._length + 1)


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
