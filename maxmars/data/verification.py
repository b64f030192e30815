"""Comparing the files of a run's data with their checksums.

Token ids that are all zero, or those of another shard, train without an error. So each file on a
disk is hashed once per working directory, in a thread while the run trains, and again when its
size, mtime or ctime has changed (no program can set a ctime). Processes that see the same disk
divide its files; processes with disks of their own hash their own copies. Evaluations and `audit
--replay` hash the files of the split that they read. Files in a bucket are not hashed: the bucket's
own checksums are compared before the first step (`formats.check_files`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from maxmars.data.metadata import AGAIN
from maxmars.data.token_files import TokenFile
from maxmars.distributed import processes
from maxmars.distributed.files import LineFile, is_remote, read_json_lines, sha256_of
from maxmars.distributed.workdir import VERIFIED

_LOGGER = logging.getLogger(__name__)


def verify_split(
    files: Sequence[TokenFile], split: str, first_read: Mapping[str, str] | None = None
) -> None:
    """Compare the files of a split with their checksums, now; all processes must call.

    Args:
      files: those of any split; files in buckets are left out.
      split: name of the split.
      first_read: for files without a recorded checksum, the SHA-256 that a run computed when it
        first read them, by path; see `hashed_by`.

    Raises:
      ValueError: a file does not match, or cannot be read; every process raises.
    """
    expected = {str(f.path): f.sha256 for f in files if f.sha256}
    expected = {**(first_read or {}), **expected}  # a recorded checksum wins
    damage = ""
    for file in own_share([f for f in files if f.split == split and str(f.path) in expected]):
        try:
            sha256 = sha256_of(file.path)
        except OSError as error:
            damage = f"the file of tokens {file.path} cannot be read: {error}."
            continue
        if sha256 != (before := expected[str(file.path)]):
            says = "it was prepared with" if file.sha256 else "the run read it with"
            damage = f"{_mismatch(file, sha256, f'{says} {before}')}; {AGAIN}."
    for text in processes.texts_of_all(damage):  # each process has hashed only its share
        if text:
            raise ValueError(text)


def hashed_by(workdir: epath.Path) -> dict[str, str]:
    """SHA-256 of each file that the processes of a run have hashed, by path."""
    directory = workdir / VERIFIED
    records = sorted(directory.iterdir()) if directory.is_dir() else []
    lines = [line for record in records for line in read_json_lines(record, "file", "sha256")]
    return {str(line["file"]): str(line["sha256"]) for line in lines}


def own_share(files: Sequence[TokenFile]) -> list[TokenFile]:
    """The files on disks that this process is to hash, each once; all processes must call.

    Two processes share a disk if the first file has the same mtime and ctime in both: a copy has
    another ctime. Such processes divide the files.
    """
    on_disk = list({file.path: file for file in files if not is_remote(file.path)}.values())
    times = ""
    if on_disk:
        with contextlib.suppress(OSError):  # raised again where the file is hashed
            status = os.stat(on_disk[0].path)
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    peers = [i for i, theirs in enumerate(processes.texts_of_all(times)) if theirs == times]
    return on_disk[peers.index(jax.process_index()) :: len(peers)]


class Verification(contextlib.AbstractContextManager["Verification"]):
    """A thread that hashes files; see `start` and `check`."""

    def __init__(
        self,
        files: Sequence[TokenFile],
        record: epath.Path,
        *,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the thread; read no file.

        Args:
          files: those to hash, on disks; see `own_share`.
          record: this process's file of JSON lines in the working directory: each hashed file with
            size, times and SHA-256.
          may_write: raises ValueError once another run owns the working directory.
        """
        self._files = files
        self._record, self._may_write = record, may_write
        self._thread = threading.Thread(target=self._run, name="maxmars-verify", daemon=True)
        self._closing = threading.Event()
        self._on_damage: Callable[[], None] = lambda: None
        self._damage = ""

    def start(self, on_damage: Callable[[], None]) -> None:
        """Start the thread, which calls `on_damage` when it finds a damaged file."""
        if self._files:
            self._on_damage = on_damage
            self._thread.start()

    def check(self, timeout_s: float = 0.0) -> None:
        """Stop the run if a file was found damaged so far; all processes must call.

        Args:
          timeout_s: seconds to wait for files that are not hashed yet.

        Raises:
          ValueError: a process found a damaged file; every process raises.
        """
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        for damage in processes.texts_of_all(self._damage):
            if damage:
                raise ValueError(damage)

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            lines = read_json_lines(self._record, "file", "sha256")
            known = {str(line["file"]): line for line in lines}
            with contextlib.closing(LineFile(self._record, self._may_write)) as record:
                for file in self._files:
                    before = known.get(str(file.path))
                    line = self._verify(file, before)
                    if line is None:
                        return
                    if line != before:
                        record.write(json.dumps(line))
        except OSError as error:  # the record cannot be written: the next start hashes again
            _LOGGER.warning("the files that were verified cannot be recorded: %s", error)
        except ValueError as error:
            self._damage = str(error)
            self._on_damage()

    def _verify(self, file: TokenFile, known: dict[str, Any] | None) -> dict[str, Any] | None:
        """The line of the record for a file; None if the run ends before the file is read.

        Raises:
          ValueError: the file is damaged, or cannot be read.
        """

        def pause(num_bytes: int) -> None:
            if self._closing.is_set():  # a file of gigabytes must not delay the end of the run
                raise InterruptedError

        expected, says = file.sha256, "it was prepared with"
        if expected is None and known is not None:
            expected, says = known["sha256"], "when this run first read it, it was"
        try:
            status = os.stat(file.path)
            line = {"file": str(file.path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            line["ctime_ns"] = status.st_ctime_ns
            if known == {**line, "sha256": expected}:
                return known
            sha256 = sha256_of(file.path, pause)
        except InterruptedError:
            return None
        except OSError as error:
            raise ValueError(f"the file of tokens {file.path} cannot be read: {error}.") from error
        if expected is not None and sha256 != expected:
            raise ValueError(
                f"{_mismatch(file, sha256, f'{says} {expected}')}. Training has stopped, and the "
                "checkpoints stay as they are: copy the file anew or prepare the text again, then "
                "start the run again."
            )
        return {**line, "sha256": sha256}


def _mismatch(file: TokenFile, sha256: str, expected: str) -> str:
    return (
        f"the file of tokens {file.path} does not match its checksum: its SHA-256 is {sha256}, but "
        f"{expected}"
    )
