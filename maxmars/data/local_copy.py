"""Copies of token files on a host's own disk, made once a host from a slow place such as a bucket.

Training reads a few kilobytes at a time from random places, which a mounted bucket answers in tens
of milliseconds each; a copy on a local disk, or in memory under `/dev/shm`, does not have to wait.
So on a pod: `--data.path /mnt/bucket/tokens --data.cache_dir /local/cache` on every host, each of
which then copies for itself before the first step.

`data.cache_dir` names the directory. A data set becomes a directory there, named after where it is
from and what its files are (names, sizes, times), so that another version of the data is another
copy. The processes of one host share it: one copies, under a lock that ends with its process, the
others wait. A copy has its final name only when it is complete; one that was interrupted keeps its
finished files, each of which was compared with its checksum where `meta.json` has one, and goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from maxmars.data.formats import files_of
from maxmars.data.sources import LateStatus

_CHUNK_BYTES = 8 << 20
_KEEP_FREE_BYTES = 1 << 30  # on the local disk, beside the copy


def local_copy(source: Path, cache_dir: Path) -> Path:
    """Directory of the copy of a token directory, made first if it is not there.

    Args:
      source: a token directory in any format that can be read, for example in a mounted bucket.
      cache_dir: directory on a local disk; created if there is none.

    Raises:
      FileNotFoundError: there is nothing at `source` that can be read.
      ValueError: a file differs from its checksum, or has changed while it was copied.
      OSError: the local disk is too small.
    """
    checksums = files_of(source)
    copy = cache_dir / f"{source.resolve().name}-{_fingerprint(source, list(checksums))}"
    if copy.is_dir():
        return copy
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{copy.name}.lock"):
        if not copy.is_dir():
            _copy_all(source, checksums, copy)
    return copy


def _fingerprint(source: Path, names: list[str]) -> str:
    lines = [str(source.resolve())]
    for name in sorted(names):
        status = _status(source / name)
        lines.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the token file {path} is missing.") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock among the processes of this host; it ends with the process, however that does.

    The file stays: were it deleted, a process that waits for it and one that comes later would hold
    different locks.
    """
    with path.open("a") as file, LateStatus() as status:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                status.update(f"waiting for another process to make {path.name[1:-5]}")
                time.sleep(0.1)
        yield


def _copy_all(source: Path, checksums: dict[str, str | None], copy: Path) -> None:
    partial = copy.with_name(f".{copy.name}.partial")
    partial.mkdir(exist_ok=True)
    sizes = {name: (source / name).stat().st_size for name in checksums}
    missing = [name for name in sizes if not (partial / name).is_file()]
    _check_space(partial, sum(sizes[name] for name in missing), source)
    with LateStatus() as status:
        progress = _Progress(status, f"copying {source} to {copy.parent}", sum(sizes.values()))
        for name in sizes:
            if name not in missing:
                progress.add(sizes[name], copied=False)
                continue
            _copy_file(source / name, partial / name, sizes[name], checksums[name], progress)
    partial.rename(copy)
    _sync_directory(copy.parent)


def _check_space(directory: Path, num_bytes: int, source: Path) -> None:
    free = shutil.disk_usage(directory).free
    if num_bytes + _KEEP_FREE_BYTES > free:
        raise OSError(
            f"{directory.parent} has {free / 1e9:.1f} GB free, too little for the "
            f"{num_bytes / 1e9:.1f} GB of {source} and {_KEEP_FREE_BYTES / 1e9:.1f} GB beside it; "
            "set data.cache_dir to a larger disk, or leave it out to read the files where they are."
        )


class _Progress:
    """Shows bytes done, rate and time left."""

    def __init__(self, status: LateStatus, what: str, num_bytes: int) -> None:
        self._status, self._what, self._num_bytes = status, what, num_bytes
        self._done = self._copied = 0

    def add(self, num_bytes: int, *, copied: bool = True) -> None:
        """So many bytes more are there, copied now or before."""
        self._done += num_bytes
        self._copied += num_bytes if copied else 0
        rate = self._copied / max(self._status.elapsed_s, 1e-9)
        left_s = (self._num_bytes - self._done) / max(rate, 1e-9)
        self._status.update(
            f"{self._what}: {self._done / 1e9:.2f} of {self._num_bytes / 1e9:.2f} GB, "
            f"{rate / 1e6:.0f} MB/s, {left_s:.0f} s left"
        )


def _copy_file(
    source: Path, target: Path, num_bytes: int, sha256: str | None, progress: _Progress
) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    sha, count = hashlib.sha256(), 0
    with source.open("rb") as reader, temporary.open("wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            sha.update(chunk)
            count += len(chunk)
            progress.add(len(chunk))
        writer.flush()
        os.fsync(writer.fileno())
    if count != num_bytes:
        raise ValueError(f"{source} changed from {num_bytes} to {count} bytes while it was copied.")
    if sha256 is not None and sha.hexdigest() != sha256:
        raise ValueError(
            f"the token shard {source} does not match its checksum: its SHA-256 is "
            f"{sha.hexdigest()}, but meta.json says {sha256}; upload or prepare it again."
        )
    temporary.rename(target)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
