"""Tokens in a bucket (`gs://`): ranges of objects, and the metadata of objects.

A training step needs thousands of short ranges, so all of a batch are requested at the same time.
gcsfs sends about a hundred requests at once and retries each for a while; `read_ranges` retries the
ranges that still fail, and only those, until its timeout.
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


def read_ranges(ranges: Sequence[Range], *, timeout_s: float = 300.0) -> list[bytes]:
    """The bytes of ranges of objects, all read at the same time.

    A range that fails with a transient error (see `is_transient`) is retried for `timeout_s`.

    Raises:
      FileNotFoundError: an object is missing.
      ValueError: an object ends before its range does.
      OSError, ImportError: the bucket refuses or times out; see `require_access`.
    """
    for path, _, _ in ranges[:1]:  # all ranges are of one bucket
        require_access(path)
    deadline = time.monotonic() + timeout_s
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
    """Metadata of each object in a directory, by name: `size`, `crc32c`, `generation`.

    Raises:
      OSError, ImportError: see `require_access`.
    """
    require_access(directory)
    with reporting(directory):
        objects = _file_system().ls(os.fspath(directory), detail=True)
    return {fields["name"].rpartition("/")[2]: fields for fields in objects}  # names are full paths


@functools.cache
def _file_system() -> Any:
    """The file system, one object for all threads: fsspec's own thread sends the requests."""
    import fsspec  # comes with gcsfs

    return fsspec.filesystem("gcs")
