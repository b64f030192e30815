"""Tokens in a bucket (`gs://`): ranges of its objects, and what it says of each object.

gcsfs sends the requests, about a hundred at a time, and repeats those that fail for a while.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from maxmars.distributed.files import is_transient, reporting, require_access

_PAUSE_S = 5.0

Range = tuple[epath.Path, int, int]
"""An object, the first byte, and the byte after the last."""


def read_ranges(ranges: Sequence[Range], *, patience_s: float = 300.0) -> list[bytes]:
    """The bytes of ranges of objects, all read at the same time.

    A range that fails for a reason that may pass (the store is busy, the network is away) is read
    again until `patience_s` have passed.

    Raises:
      FileNotFoundError: an object is missing.
      ValueError: an object ends before its range does.
      OSError, ImportError: the bucket refuses, or does not answer for too long; see
        `require_access`.
    """
    for path, _, _ in ranges[:1]:
        require_access(path)
    deadline = time.monotonic() + patience_s
    contents: list[bytes] = [b""] * len(ranges)
    waiting = list(range(len(ranges)))
    while waiting:
        paths, starts, ends = zip(*(ranges[i] for i in waiting), strict=True)
        answers = _file_system().cat_ranges(
            list(map(os.fspath, paths)), list(starts), list(ends), on_error="return"
        )
        failed = []
        for i, content in zip(waiting, answers, strict=True):
            path, start, end = ranges[i]
            if isinstance(content, bytes):
                if len(content) != end - start:
                    raise ValueError(
                        f"the token shard {path} ends at byte {start + len(content)}, but "
                        f"meta.json says that it has {end} or more: it was cut short; upload "
                        "it again."
                    )
                contents[i] = content
            elif is_transient(content, path) and time.monotonic() < deadline:
                failed.append(i)
            elif isinstance(content, FileNotFoundError):
                raise FileNotFoundError(
                    f"the token shard {path} is missing; upload it again."
                ) from content
            else:
                with reporting(path):
                    raise content
        waiting = failed
        if waiting:
            time.sleep(_PAUSE_S)
    return contents


def list_objects(directory: epath.Path) -> dict[str, dict[str, Any]]:
    """What a bucket says of each object in a directory, by name: `size`, `crc32c`, `generation`.

    Raises:
      OSError, ImportError: see `require_access`.
    """
    require_access(directory)
    with reporting(directory):
        objects = _file_system().ls(os.fspath(directory), detail=True)
    return {fields["name"].rpartition("/")[2]: fields for fields in objects}


@functools.cache
def _file_system() -> Any:
    """One object for all threads: fsspec sends its requests from its own thread."""
    import fsspec  # comes with gcsfs

    return fsspec.filesystem("gcs")
