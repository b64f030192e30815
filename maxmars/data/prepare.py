"""Text to a directory of tokens: resumable, with many processes, the same bytes every time."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from maxmars.data.corpus import Corpus, PythonSources, Texts
from maxmars.data.partial_directory import PartialDirectory
from maxmars.data.sources import (
    VERSION,
    LateStatus,
    Metadata,
    Part,
    write_metadata,
)
from maxmars.data.split_rule import Splitter
from maxmars.data.streams import TokenShards
from maxmars.data.tfds_writer import to_tfds
from maxmars.data.tokenize import (
    BatchTokenizer,
    Position,
    TokenBatch,
    batches,
    pieces,
    tokenize,
)
from maxmars.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer

SHARD_TOKENS = 100_000_000
_SAVE_EVERY_S = 30.0
_BYTES_A_TOKEN = 4  # of English text under a vocabulary of tens of thousands; for estimates only
_TFDS_BYTES_A_TOKEN = 2.5


def prepare(
    documents: Corpus | Iterable[tuple[str, str]],
    out: str | Path,
    *,
    tokenizer: Tokenizer,
    source: str,
    validation_fraction: float = 0.1,
    shard_tokens: int = SHARD_TOKENS,
    workers: int = 0,
    part: tuple[int, int] | None = None,
    record_tokens: int | None = None,
    command: str | None = None,
    wait: bool = False,
) -> Metadata:
    """Tokenise documents into a directory of token shards.

    Every document is followed by the end-of-text token; empty ones are left out. With
    `split_rule.MIN_DOCUMENTS_TO_HASH` documents or more, a hash of a document's name says whether
    it is for validation; with fewer, the last `validation_fraction` of the tokens of each is.

    The directory is made as `OUT.partial` and appears under its name when it is complete. A run
    that was interrupted, however hard, is continued by the same call, and the result is the same,
    byte for byte, as if it had not been; `workers` does not change it either.

    Args:
      documents: a corpus, or pairs (name, text). A name decides the split, and need not be unique.
      out: the directory to make.
      tokenizer: turns texts into tokens.
      source: where the text is from, in words; recorded.
      validation_fraction: part of the documents, or of each, for validation, in [0, 1).
      shard_tokens: tokens a file, but for the last of a split.
      workers: processes that tokenise, started by `spawn`; 0 does so here.
      part: (i, n) prepares only the i-th of n parts, from 0: a run of the corpus's files or, where
        it has fewer than n, of each file the documents whose number leaves i when divided by n.
        `merge` joins the parts; they split by hash, however few documents they have.
      record_tokens: make a TFDS dataset with records of so many tokens; None makes token shards.
      command: the command line, recorded.
      wait: wait for another process that makes the same directory, rather than fail.

    Returns:
      What was written.

    Raises:
      FileExistsError: `out` exists, or another process is making it.
      ValueError: an argument lies outside its range, an unfinished preparation had other
        arguments, the disk is too small, or a split has come out empty.
      ChildProcessError: a worker has died.
    """
    out = Path(out)
    _check_arguments(validation_fraction, shard_tokens, workers, part, record_tokens)
    corpus = documents if isinstance(documents, Corpus) else Texts(documents)
    files, stride = _files_of(corpus, part)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    metadata = Metadata(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        splits={},
        source=source,
        command=command,
        eot_token=tokenizer.eot_token if isinstance(tokenizer, JsonTokenizer) else None,
        part=Part(index=part[0], count=part[1], shard_tokens=shard_tokens) if part else None,
    )
    job = _Job(
        corpus=corpus,
        files=files,
        stride=stride,
        tokenizer=tokenizer,
        dtype=dtype,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        workers=workers,
        always_by_hash=part is not None,
    )
    with PartialDirectory(out, wait=wait) as partial:
        partial.claim(
            {
                "version": VERSION,
                "source": source,
                "corpus": corpus.fingerprint,
                "tokenizer": tokenizer.name,
                "tokenizer_digest": metadata.tokenizer_digest,
                "validation_fraction": validation_fraction,
                "shard_tokens": shard_tokens,
                "part": None if part is None else list(part),
                "record_tokens": record_tokens,
            }
        )
        splitter = _open_splitter(job, partial)
        with contextlib.closing(splitter):
            _check_disk(job, splitter, out, tfds=record_tokens is not None)
            _write_tokens(job, splitter, partial)
            metadata = replace(metadata, splits=splitter.finish())
        try:
            _check_splits(metadata, source, validation_fraction)
        except ValueError:
            partial.discard()
            raise
        file = tokenizer.path if isinstance(tokenizer, JsonTokenizer) else None
        return publish(partial, metadata, tokenizer_file=file, record_tokens=record_tokens)


def publish(
    partial: PartialDirectory,
    metadata: Metadata,
    *,
    tokenizer_file: Path | None,
    record_tokens: int | None,
) -> Metadata:
    """Describe the shards in a partial directory, make them a TFDS dataset if asked, and publish.

    Args:
      partial: has the shards.
      metadata: describes them.
      tokenizer_file: a `tokenizer.json` to lie beside them.
      record_tokens: see `prepare`.

    Returns:
      What was published.
    """
    directory = partial.content
    write_metadata(directory, metadata)
    if record_tokens is not None:
        directory = partial.path / "tfds"
        metadata = to_tfds(partial.content, directory, record_tokens)
        write_metadata(directory, metadata)
    if tokenizer_file is not None:
        shutil.copyfile(tokenizer_file, directory / JsonTokenizer.name)
    partial.publish(directory)
    return metadata


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What to do."""

    corpus: Corpus
    files: Sequence[int]
    stride: tuple[int, int]
    tokenizer: Tokenizer
    dtype: str
    validation_fraction: float
    shard_tokens: int
    workers: int
    always_by_hash: bool


def _check_arguments(
    validation_fraction: float,
    shard_tokens: int,
    workers: int,
    part: tuple[int, int] | None,
    record_tokens: int | None,
) -> None:
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie in [0, 1).")
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be greater than zero.")
    if workers < 0:
        raise ValueError(f"workers={workers} must not be negative.")
    if record_tokens is not None and record_tokens < 1:
        raise ValueError(f"record_tokens={record_tokens} must be greater than zero.")
    if part is not None:
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"part={part[0]}/{part[1]} must be i/n with 0 <= i < n, from 0.")
        if record_tokens is not None:
            raise ValueError(
                "a part cannot be a TFDS dataset; prepare the parts as token shards and give the "
                "format to `maxmars data merge`."
            )


def _files_of(
    corpus: Corpus, part: tuple[int, int] | None
) -> tuple[Sequence[int], tuple[int, int]]:
    """Files of the part, and which documents of each (see `pieces`)."""
    count = len(corpus.files)
    if part is None:
        return range(count), (0, 1)
    index, parts = part
    if count < parts:
        return range(count), part
    return range(-(-index * count // parts), -(-(index + 1) * count // parts)), (0, 1)


def _open_splitter(job: _Job, partial: PartialDirectory) -> Splitter:
    state = partial.read("state.json")
    return Splitter(
        partial.content,
        partial.path / "waiting.bin",
        dtype=job.dtype,
        shard_tokens=job.shard_tokens,
        validation_fraction=job.validation_fraction,
        always_by_hash=job.always_by_hash,
        state=state and state["splitter"],
    )


def _write_tokens(job: _Job, splitter: Splitter, partial: PartialDirectory) -> None:
    """Tokenise from where an earlier run was, saving how far this one is."""
    state = partial.read("state.json") or {"position": {}, "num_bytes": 0}
    start = Position(**state["position"])
    progress = _Progress(job, start, num_bytes=state["num_bytes"])
    if start != Position():
        print(
            f"continuing {partial.path} after {progress.num_bytes / 1e6:,.1f} MB", file=sys.stderr
        )

    def save(position: Position) -> None:
        fields = {
            "position": asdict(position),
            "num_bytes": progress.num_bytes,
            "splitter": splitter.flush(),
        }
        partial.write("state.json", fields)

    work = BatchTokenizer(job.tokenizer, job.dtype, job.validation_fraction)
    read = pieces(job.corpus, job.files, job.tokenizer, start=start, stride=job.stride)
    shards, saved_at, position = splitter.num_shards, time.monotonic(), start
    with LateStatus() as status:
        for position, batch in tokenize(batches(read), work, workers=job.workers):
            must_save = splitter.add(batch)
            status.update(progress.after(batch, status.elapsed_s))
            finished = splitter.num_shards > shards
            if must_save or finished or time.monotonic() - saved_at > _SAVE_EVERY_S:
                save(position)
                shards, saved_at = splitter.num_shards, time.monotonic()
    save(Position(file=len(job.corpus.files)))


class _Progress:
    """Counts, rate and time left."""

    def __init__(self, job: _Job, start: Position, *, num_bytes: int) -> None:
        """Nothing is done yet but what an earlier run did."""
        self._corpus, self._files = job.corpus, job.files
        self.num_bytes = self._bytes_before = num_bytes
        self._num_documents = 0
        self._total = sum(job.corpus.weights[file] for file in job.files)
        self._fraction_before = self._fraction(start.file, 0.0)

    def _fraction(self, file: int, part: float) -> float:
        done = sum(self._corpus.weights[f] for f in self._files if f < file)
        if file < len(self._corpus.files):
            done += self._corpus.weights[file] * part
        return done / self._total if self._total else 1.0

    def after(self, batch: TokenBatch, elapsed_s: float) -> str:
        """The status line after one more batch."""
        self.num_bytes += batch.num_bytes
        self._num_documents += int(batch.last.sum())
        fraction = min(self._fraction(*self._corpus.progress), 1.0)
        rate = (self.num_bytes - self._bytes_before) / 1e6 / max(elapsed_s, 1e-9)
        text = (
            f"tokenised {fraction:.0%}, {self.num_bytes / 1e6:,.0f} MB, "
            f"{self._num_documents:,} documents, {rate:.1f} MB/s"
        )
        gained = fraction - self._fraction_before
        if gained > 0:
            left = datetime.timedelta(seconds=round(elapsed_s * (1 - fraction) / gained))
            text += f", {left} left"
        return text


def _check_disk(job: _Job, splitter: Splitter, out: Path, *, tfds: bool) -> None:
    if job.corpus.num_bytes is None:
        return
    total = sum(job.corpus.weights)
    share = sum(job.corpus.weights[file] for file in job.files) / total / job.stride[1]
    bytes_a_token = 1 if isinstance(job.tokenizer, ByteTokenizer) else _BYTES_A_TOKEN
    tokens = job.corpus.num_bytes * share / bytes_a_token
    itemsize = 2 if job.dtype == "uint16" else 4
    needed = tokens * (itemsize + (_TFDS_BYTES_A_TOKEN if tfds else 0)) - splitter.num_bytes
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise ValueError(
            f"the tokens of {share * job.corpus.num_bytes / 1e9:,.1f} GB of text need about "
            f"{needed / 1e9:,.1f} GB in {out.absolute().parent}, which has {free / 1e9:,.1f} GB "
            "free; make room, choose another disk, or prepare a --part of it."
        )


def _check_splits(metadata: Metadata, source: str, validation_fraction: float) -> None:
    if metadata.part is not None:
        return  # `merge` looks at the whole
    wanted = ["train", "val"] if validation_fraction else ["train"]
    for name in wanted:
        if name not in metadata.splits:
            raise ValueError(
                f"no text of {source} has come into split {name!r} with "
                f"validation_fraction={validation_fraction}; give more text or another fraction."
            )


def prepare_python_sources() -> Path:
    """Directory with the standard library's text as bytes; made in the cache if it is not there.

    The cache is the directory MAXMARS_CACHE, by default ~/.cache/maxmars. Several processes may
    call this at once: one prepares, the others wait.

    Raises:
      ValueError: what is in the cache is damaged.
    """
    corpus = PythonSources()
    digest = corpus.fingerprint[:8]
    path = _cache() / f"python-{platform.python_version()}-byte-v{VERSION}-{digest}"
    if not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            prepare(
                corpus,
                path,
                tokenizer=ByteTokenizer(),
                source=f"standard library of Python {platform.python_version()}",
                wait=True,
            )
    for split in ("train", "val"):
        TokenShards(path, split)
    return path


def _cache() -> Path:
    return Path(os.environ.get("MAXMARS_CACHE") or "~/.cache/maxmars").expanduser()
