"""What is in a directory of tokens, whether it is undamaged, and whether two hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxmars.data.formats import open_split
from maxmars.data.sources import (
    FORMAT,
    TFDS_FORMAT,
    DocumentStarts,
    LateStatus,
    Metadata,
    Shard,
    read_metadata,
)
from maxmars.data.streams import TokenStream
from maxmars.data.tokenizer import Tokenizer, tokenizer_in

_SAMPLE_TOKENS = 1 << 14
_BLOCK_BYTES = 1 << 22
_BLOCK_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """One split in numbers, and the start of its first document."""

    name: str
    num_tokens: int
    num_documents: int
    num_shards: int
    bytes_per_token: float | None
    """Of text, in a sample from the start; None where the tokenizer is not at hand."""
    sample: str | None


def read_any_metadata(directory: str | Path) -> Metadata:
    """What describes token shards or a TFDS dataset of tokens.

    Raises:
      FileNotFoundError, ValueError: see `sources.read_metadata`.
    """
    try:
        return read_metadata(directory)
    except ValueError as error:
        if TFDS_FORMAT not in str(error):
            raise
        return read_metadata(directory, format=TFDS_FORMAT)


def summarise(
    directory: Path, metadata: Metadata, tokenizer: Tokenizer | None
) -> list[SplitSummary]:
    """Counts and a sample of each split."""
    summaries = []
    for name, split in metadata.splits.items():
        tokens = open_split(directory, name).read(0, min(split.num_tokens, _SAMPLE_TOKENS))
        sample = ratio = None
        if tokenizer is not None:
            first = tokens[: int(np.argmax(np.append(tokens, tokenizer.eot) == tokenizer.eot))]
            sample = tokenizer.decode(first)
            text = tokens[tokens != tokenizer.eot]
            ratio = len(tokenizer.decode(text).encode()) / max(len(text), 1)
        summaries.append(
            SplitSummary(
                name=name,
                num_tokens=split.num_tokens,
                num_documents=split.num_documents,
                num_shards=len(split.shards),
                bytes_per_token=ratio,
                sample=sample,
            )
        )
    return summaries


def load_matching_tokenizer(directory: Path, metadata: Metadata) -> Tokenizer:
    """The tokenizer of a directory of tokens.

    Raises:
      ValueError: the one at hand has another digest.
      ImportError, FileNotFoundError: it cannot be loaded; see `load_tokenizer`.
    """
    tokenizer = tokenizer_in(directory, metadata.tokenizer, metadata.eot_token)
    if tokenizer.digest != metadata.tokenizer_digest:
        raise ValueError(
            f"the tokenizer {metadata.tokenizer!r} here has digest {tokenizer.digest}, but "
            f"{directory} was prepared with {metadata.tokenizer_digest}; its text would be garbled."
        )
    return tokenizer


def verify(directory: Path, metadata: Metadata) -> None:
    """Compare every file with its checksum.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file differs; the message names it.
    """
    files = list(_files(metadata))
    missing = [file.file for file in files if not (directory / file.file).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}; prepare it again.")
    total, done = sum((directory / file.file).stat().st_size for file in files), 0
    with LateStatus() as status:
        for file in files:
            sha = hashlib.sha256()
            with (directory / file.file).open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    sha.update(block)
                    done += len(block)
                    status.update(
                        f"verifying {file.file}: {done / total:.0%} of {total / 1e9:.1f} GB"
                    )
            if sha.hexdigest() != file.sha256:
                raise ValueError(
                    f"{directory / file.file} does not match its checksum: its SHA-256 is "
                    f"{sha.hexdigest()}, but meta.json says {file.sha256}; delete the directory "
                    "and prepare it again."
                )


def _files(metadata: Metadata) -> Iterator[Shard | DocumentStarts]:
    for split in metadata.splits.values():
        yield from split.shards
        if split.documents is not None:
            yield split.documents


def differences(one: Path, other: Path) -> list[str]:
    """How the streams of tokens in two directories differ; empty if they are the same.

    The number and format of the files do not matter. Files are compared by checksum where both
    directories cut the stream alike, else token by token.
    """
    a, b = read_any_metadata(one), read_any_metadata(other)
    found = [
        f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for name in ("tokenizer", "tokenizer_digest", "vocab_size")
        if getattr(a, name) != getattr(b, name)
    ]
    if a.splits.keys() != b.splits.keys():
        found.append(f"splits: {', '.join(a.splits)} and {', '.join(b.splits)}")
    for name in a.splits.keys() & b.splits.keys():
        counts = a.splits[name].num_tokens, b.splits[name].num_tokens
        if counts[0] != counts[1]:
            found.append(f"tokens of {name}: {counts[0]:,} and {counts[1]:,}")
        if a.dtype == b.dtype and a.splits[name].shards == b.splits[name].shards:
            continue
        where = _first_difference(open_split(one, name), open_split(other, name), name)
        if where is not None:
            found.append(f"{name} from token {where:,} on")
    return sorted(found)


def _first_difference(one: TokenStream, other: TokenStream, split: str) -> int | None:
    """The first place where two streams differ before the shorter one ends; None if nowhere."""
    length = min(one.num_tokens, other.num_tokens)
    with LateStatus() as status:
        for start in range(0, length, _BLOCK_TOKENS):
            status.update(f"comparing {split}: {start / length:.0%}")
            count = min(_BLOCK_TOKENS, length - start)
            unequal = one.read(start, count) != other.read(start, count)
            if unequal.any():
                return start + int(np.argmax(unequal))
    return None


def format_of(metadata: Metadata) -> str:
    """Name of the format, for people."""
    if metadata.record_tokens is None:
        return f"token shards ({FORMAT}, {metadata.dtype})"
    return f"TFDS dataset ({TFDS_FORMAT}, {metadata.dtype}, records of {metadata.record_tokens:,})"
