"""Joining the parts that several machines prepared of one corpus."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from maxmars.data.partial_directory import PartialDirectory
from maxmars.data.prepare import publish
from maxmars.data.shard_writer import SplitWriter, WriterState
from maxmars.data.sources import LateStatus, Metadata, Split, read_metadata
from maxmars.data.split_rule import SPLITS
from maxmars.data.tokenizer import JsonTokenizer

_CHUNK_BYTES = 1 << 24
_SAME = ("source", "tokenizer", "tokenizer_digest", "vocab_size", "dtype", "eot_token")


def merge(
    parts: Sequence[str | Path],
    out: str | Path,
    *,
    record_tokens: int | None = None,
    command: str | None = None,
) -> Metadata:
    """Join all parts of a corpus, in any order, into one directory.

    The stream of each split is that of part 0, then part 1, and so on. Where the parts are runs of
    whole files and the corpus has documents enough to split by hash, that is the stream, and those
    are the shards, that `prepare` without parts makes.

    Args:
      parts: directories made by `prepare(..., part=(i, n))`, every i of one n.
      out: the directory to make.
      record_tokens: make a TFDS dataset; see `prepare`.
      command: the command line, recorded.

    Returns:
      What was written.

    Raises:
      FileExistsError: `out` exists, or another process is making it.
      ValueError: the parts do not belong together, one is missing or damaged, a split is empty, or
        the disk is too small.
    """
    out = Path(out)
    described = _in_order([Path(part) for part in parts])
    directories, metadata = list(described), next(iter(described.values()))
    assert metadata.part is not None
    names = [name for name in SPLITS if any(name in m.splits for m in described.values())]
    if "train" not in names:
        raise ValueError(f"none of the {len(directories)} parts has tokens for training.")
    _check_disk(described, out)
    with PartialDirectory(out) as partial:
        # Copying is quick beside tokenising: what a merge left that was cut short is made again.
        shutil.rmtree(partial.content)
        partial.content.mkdir()
        splits = {}
        with LateStatus() as status:
            for name in names:
                writer = SplitWriter(
                    partial.content,
                    name,
                    dtype=metadata.dtype,
                    shard_tokens=metadata.part.shard_tokens,
                    state=WriterState(),
                )
                with contextlib.closing(writer):
                    for directory, described_part in described.items():
                        status.update(f"merging {name} of {directory}")
                        if name in described_part.splits:
                            _copy(directory, described_part, described_part.splits[name], writer)
                    splits[name] = writer.finish()
        file = directories[0] / JsonTokenizer.name if metadata.eot_token is not None else None
        merged = replace(metadata, splits=splits, part=None, command=command)
        return publish(partial, merged, tokenizer_file=file, record_tokens=record_tokens)


def _in_order(parts: Sequence[Path]) -> dict[Path, Metadata]:
    """What describes each part, in order of their numbers."""
    described = {part: read_metadata(part) for part in parts}
    for path, metadata in described.items():
        if metadata.part is None:
            raise ValueError(
                f"{path} is no part of a corpus; only what `maxmars data prepare --part i/n` made "
                "can be merged. To train on several corpora, name them as a mixture."
            )
    first_path, first = next(iter(described.items()))
    assert first.part is not None
    for path, metadata in described.items():
        assert metadata.part is not None
        for name in _SAME:
            if getattr(metadata, name) != getattr(first, name):
                raise ValueError(
                    f"{path} and {first_path} are not of one corpus: {name} is "
                    f"{getattr(metadata, name)!r} and {getattr(first, name)!r}."
                )
        if replace(metadata.part, index=0) != replace(first.part, index=0):
            raise ValueError(
                f"{path} is part {metadata.part.index} of {metadata.part.count} with shards of "
                f"{metadata.part.shard_tokens} tokens, but {first_path} is one of "
                f"{first.part.count} with {first.part.shard_tokens}; prepare both with one n."
            )
    by_index = {m.part.index: path for path, m in described.items() if m.part is not None}
    missing = [str(i) for i in range(first.part.count) if i not in by_index]
    if missing or len(parts) != first.part.count:
        what = f"part {', '.join(missing)} is missing" if missing else "one is given twice"
        raise ValueError(f"all {first.part.count} parts are needed, each once: {what}.")
    return {by_index[i]: described[by_index[i]] for i in sorted(by_index)}


def _check_disk(described: dict[Path, Metadata], out: Path) -> None:
    needed = sum(
        split.num_tokens * np.dtype(metadata.dtype).itemsize
        for metadata in described.values()
        for split in metadata.splits.values()
    )
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"the merged tokens need {needed / 1e9:,.1f} GB in {place}, which has "
            f"{free / 1e9:,.1f} GB free; make room or choose another disk."
        )


def _copy(directory: Path, metadata: Metadata, split: Split, writer: SplitWriter) -> None:
    """Append a part's split to the merged one, checking its files."""
    starts = np.empty(0, np.int64)
    if split.documents is not None:
        file, sha256 = split.documents.file, split.documents.sha256
        data = b"".join(_checked_blocks(directory / file, sha256))
        starts = np.frombuffer(data, "<u8").astype(np.int64)
    position, dtype = 0, np.dtype(metadata.dtype).newbyteorder("<")
    for shard in split.shards:
        for block in _checked_blocks(directory / shard.file, shard.sha256):
            tokens = np.frombuffer(block, dtype)
            end = position + len(tokens)
            low, high = np.searchsorted(starts, [position, end])
            writer.append(tokens, starts[low:high] - position)
            position = end


def _checked_blocks(path: Path, sha256: str) -> Iterator[bytes]:
    """The contents of a file; raises at its end if they are not those of the checksum."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK_BYTES):
                sha.update(block)
                yield block
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is missing; copy or prepare this part again.") from error
    if sha.hexdigest() != sha256:
        raise ValueError(
            f"{path} does not match the checksum in its meta.json; copy or prepare this part again."
        )
