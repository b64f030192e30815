"""Text to token shards: tokenise documents, split off validation, write a directory atomically."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import os
import platform
import shutil
import sysconfig
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from maxmars.data.sources import (
    VERSION,
    LateStatus,
    Metadata,
    Shard,
    Split,
    write_metadata,
)
from maxmars.data.streams import TokenShards
from maxmars.data.tokenizer import ByteTokenizer, Tokenizer

MIN_DOCUMENTS_TO_HASH = 100
"""With fewer documents, validation takes the end of each rather than whole ones."""

_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def prepare(
    documents: Iterable[tuple[str, str]],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    source: str,
    validation_fraction: float = 0.1,
    shard_tokens: int = 100_000_000,
    command: str | None = None,
) -> Metadata:
    """Tokenise documents into a directory of token shards.

    Every document is followed by the end-of-text token; empty ones are left out. With
    `MIN_DOCUMENTS_TO_HASH` documents or more, a hash of a document's id says whether it is for
    validation; with fewer, the last `validation_fraction` of the tokens of each is. The directory
    appears under its name when it is complete; whatever happens, no part of one does.

    Args:
      documents: pairs (id, text). An id decides the split, and need not be unique.
      out: the directory to make.
      tokenizer: turns texts into tokens.
      source: where the text is from, in words; recorded.
      validation_fraction: part of the documents, or of each, for validation, in [0, 1).
      shard_tokens: tokens a file, but for the last of a split.
      command: the command line, recorded.

    Returns:
      What was written.

    Raises:
      FileExistsError: `out` exists, already or when the tokens are ready.
      ValueError: an argument lies outside its range, or a split has come out empty.
    """
    out = Path(out)
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie in [0, 1).")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be greater than zero.")
    if out.exists():
        raise FileExistsError(_exists(out))
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir(parents=True)
    try:
        tokens = _tokens_of(documents, tokenizer)
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        pieces = _split(tokens, validation_fraction, temporary, dtype)
        metadata = Metadata(
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            dtype=dtype,
            splits=_write_splits(pieces, temporary, dtype, shard_tokens, tokenizer.eot),
            source=source,
            command=command,
        )
        _check_splits(metadata, source, validation_fraction)
        write_metadata(temporary, metadata)
        _publish(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return metadata


def _exists(out: Path) -> str:
    return f"{out} exists; delete it or choose another name to prepare tokens into."


def _publish(temporary: Path, out: Path) -> None:
    try:
        temporary.rename(out)  # atomic: of several that prepare one target, the first wins
    except OSError as error:
        if out.exists():
            raise FileExistsError(_exists(out)) from error
        raise


def _tokens_of(
    documents: Iterable[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[str, np.ndarray]]:
    """Ids and tokens of the documents that are not empty, with a progress line."""
    num_bytes = 0
    with LateStatus() as status:
        for count, (name, text) in enumerate(documents, 1):
            tokens = tokenizer.encode(text)
            num_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
            megabytes, elapsed_s = num_bytes / 1e6, max(status.elapsed_s, 1e-9)
            status.update(
                f"tokenised {megabytes:,.0f} MB, {count:,} documents, "
                f"{megabytes / elapsed_s:.1f} MB/s"
            )
            if len(tokens):
                yield name, tokens


def _split(
    documents: Iterator[tuple[str, np.ndarray]], fraction: float, directory: Path, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Pairs (split, tokens) of the pieces of all documents; the rule is `prepare`'s.

    Which rule holds is known only when the iterator has ended or reached its hundredth document.
    Those before wait in a file, not in memory: they may be large.
    """
    with tempfile.TemporaryFile(dir=directory) as waiting:
        first = []
        for name, tokens in itertools.islice(documents, MIN_DOCUMENTS_TO_HASH):
            waiting.write(tokens.astype(dtype, copy=False).tobytes())
            first.append((name, len(tokens)))
        waiting.seek(0)
        by_hash = len(first) == MIN_DOCUMENTS_TO_HASH
        for name, length in first:
            tokens = np.frombuffer(waiting.read(length * np.dtype(dtype).itemsize), dtype)
            if by_hash:
                yield _split_of(name, fraction), tokens
            else:
                cut = length - int(length * fraction)
                yield "train", tokens[:cut]
                yield "val", tokens[cut:]
    for name, tokens in documents:
        yield _split_of(name, fraction), tokens


def _split_of(name: str, validation_fraction: float) -> str:
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()
    is_validation = int.from_bytes(digest[:8], "big") < validation_fraction * 2**64
    return "val" if is_validation else "train"


def _write_splits(
    pieces: Iterator[tuple[str, np.ndarray]],
    directory: Path,
    dtype: str,
    shard_tokens: int,
    eot: int,
) -> dict[str, Split]:
    with contextlib.ExitStack() as stack:
        writers = {}
        for split in ("train", "val"):
            writers[split] = _SplitWriter(directory, split, dtype, shard_tokens)
            stack.callback(writers[split].close)
        for split, tokens in pieces:
            if len(tokens):
                writers[split].write(np.append(tokens, np.array(eot, dtype)))
        splits = {split: writer.finish() for split, writer in writers.items()}
    return {name: split for name, split in splits.items() if split.num_tokens}


def _check_splits(metadata: Metadata, source: str, validation_fraction: float) -> None:
    wanted = ["train", "val"] if validation_fraction else ["train"]
    for name in wanted:
        if name not in metadata.splits:
            raise ValueError(
                f"no text of {source} has come into split {name!r} with "
                f"validation_fraction={validation_fraction}; give more text or another fraction."
            )


class _SplitWriter:
    """Writes one split, a new file every `shard_tokens` tokens."""

    def __init__(self, directory: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self._directory, self._split = directory, split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._sha = hashlib.sha256()
        self._in_shard = 0
        self._shards: list[Shard] = []
        self._num_documents = 0

    def write(self, document: np.ndarray) -> None:
        """Append one document; it may continue in the next file."""
        self._num_documents += 1
        tokens = document.astype(self._dtype, copy=False)
        while len(tokens):
            if self._file is None:
                self._file = (self._directory / self._name()).open("xb")
            part = tokens[: self._shard_tokens - self._in_shard].tobytes()
            self._file.write(part)
            self._sha.update(part)
            count = len(part) // self._dtype.itemsize
            self._in_shard += count
            tokens = tokens[count:]
            if self._in_shard == self._shard_tokens:
                self._close_shard()

    def _name(self) -> str:
        return f"{self._split}_{len(self._shards):05d}.bin"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())  # a name that survives a power cut must not lack its bytes
        self._shards.append(
            Shard(file=self._name(), num_tokens=self._in_shard, sha256=self._sha.hexdigest())
        )
        self._file, self._sha, self._in_shard = None, hashlib.sha256(), 0

    def close(self) -> None:
        """Close the file of a shard that is not complete, if there is one."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> Split:
        """Complete the last shard; the description of all."""
        self._close_shard()
        num_tokens = sum(shard.num_tokens for shard in self._shards)
        return Split(
            num_tokens=num_tokens, num_documents=self._num_documents, shards=tuple(self._shards)
        )


def text_documents(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Local text files, one document each: pairs (path, text), sorted by path.

    Args:
      patterns: paths or globs (`~` and `**` work). The path as it was matched is the document's id.

    Raises:
      FileNotFoundError: a pattern matches no file; before the first document.
      ValueError: a file is not UTF-8.
    """
    paths: set[str] = set()
    for pattern in map(os.path.expanduser, patterns):
        matches = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        files = [match for match in matches if Path(match).is_file()]
        if not files:
            raise FileNotFoundError(f"no file matches {pattern!r}; check the path or the pattern.")
        paths.update(files)
    return ((path, _read_text(Path(path))) for path in sorted(paths))


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, for example with iconv."
        ) from error


def python_documents() -> Iterator[tuple[str, str]]:
    """The standard library of the running interpreter: pairs (relative path, text), sorted.

    Leaves out installed packages, tests, and files that are not UTF-8.
    """
    root = _python_root()
    for name in _python_names(root):
        try:
            yield name, (root / name).read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue


def _python_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _python_names(root: Path) -> list[str]:
    names = []
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = [d for d in subdirectories if d not in _NOT_SOURCES]
        relative = Path(directory).relative_to(root)
        names += [
            (relative / f).as_posix()
            for f in files
            if f.endswith(".py") and Path(directory, f).is_file()
        ]
    return sorted(names)


def prepare_python_sources() -> Path:
    """Directory with the standard library's text as bytes; made in the cache if it is not there.

    The cache is the directory MAXMARS_CACHE, by default ~/.cache/maxmars. Several processes may
    call this at once.

    Raises:
      ValueError: what is in the cache is damaged.
    """
    path = _cache() / f"python-{platform.python_version()}-byte-{_python_digest()}"
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            prepare(
                python_documents(),
                path,
                tokenizer=ByteTokenizer(),
                source=f"standard library of Python {platform.python_version()}",
            )
    for split in ("train", "val"):
        TokenShards(path, split)
    return path


def _cache() -> Path:
    return Path(os.environ.get("MAXMARS_CACHE") or "~/.cache/maxmars").expanduser()


def _python_digest() -> str:
    """Eight hex digits over names and sizes of the sources; cheaper than over their text."""
    root = _python_root()
    listing = [f"{name} {(root / name).stat().st_size}" for name in _python_names(root)]
    text = "\n".join([f"maxmars-tokens {VERSION}", *listing])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
