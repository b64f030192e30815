"""Files of a run's working directory, on a disk or in a bucket (`gs://`).

A file is written whole or not at all. On a disk that takes a rename, in a bucket one request; files
that grow by lines, which no object can, are kept in memory there and uploaded whole: before each
checkpoint, at the end, and meanwhile every `_EVERY_S`. A kill loses what came after that.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from etils import epath

_LOGGER = logging.getLogger(__name__)

Workdir = Path | epath.Path
"""`pathlib.Path` on a disk, `epath.Path` in a bucket."""

_EVERY_S = 30.0
_PROBE_S = 30.0
_REQUEST_S = 60.0  # gcsfs waits for ever
_MAX_REASON = 300
_ROLES = "Storage Object User and Storage Legacy Bucket Reader"
_WAYS_OUT = (
    (
        r"\b40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED|Forbidden|credential",
        "log in (`gcloud auth application-default login`), or give the machine's service account "
        f"the roles {_ROLES}",
    ),
    (r"\b404\b|NOT_?FOUND|does not exist|Invalid GCS", "make the bucket, or check its name"),
    ("Project was not passed", "set GOOGLE_CLOUD_PROJECT"),
    ("", "check the network"),
)


def is_remote(path: Any) -> bool:
    """Whether a path is an object store's, like `gs://bucket/name`."""
    return "://" in os.fspath(path)


def resolve(path: str | os.PathLike[str]) -> Workdir:
    """An absolute path.

    Raises:
      ValueError: it is in an object store other than `gs://`, or names no bucket.
    """
    text = os.fspath(path)
    if not re.match(r"(gs|s3|az|hf):/", text):
        return Path(path).expanduser().absolute()
    if not re.match(r"gs://[^/]+(/|$)", text):
        raise ValueError(f"{text} must be a path on a disk, or gs://BUCKET/PATH; write it so.")
    return epath.Path(text)


def require_access(path: Any) -> None:
    """Check at the first use of a bucket that it answers, before libraries retry for minutes.

    Raises:
      ImportError: the library for it (extra `gcs`) is not installed.
      OSError: it does not answer, or refuses.
    """
    if is_remote(path):
        _require_bucket(os.fspath(path).removeprefix("gs://").partition("/")[0])


@functools.cache
def _require_bucket(bucket: str) -> None:
    name = f"gs://{bucket}"
    if importlib.util.find_spec("gcsfs") is None:
        raise ImportError(f"{name} needs the library gcsfs: `pip install 'maxmars[gcs]'`.")
    import aiohttp  # comes with gcsfs
    import fsspec

    options = fsspec.config.conf.setdefault("gcs", {})
    # Others write here as well: TensorStore, and the run's other processes.
    options.setdefault("use_listings_cache", False)
    options.setdefault("requests_timeout", aiohttp.ClientTimeout(total=_REQUEST_S))
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # what it logs it also raises
    with reporting(name):
        open_store(name).read("maxmars").result(timeout=_PROBE_S)


def open_store(directory: Any) -> Any:
    """The `tensorstore.KvStore` at a directory of a bucket; it gives up after a few seconds."""
    import tensorstore  # comes with Orbax

    bucket, _, path = os.fspath(directory).removeprefix("gs://").partition("/")
    retries = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}
    spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
    return tensorstore.KvStore.open(spec | {"context": {"gcs_request_retries": retries}}).result()


@contextlib.contextmanager
def reporting(path: Any) -> Generator[None, None, None]:
    """Raise as OSError, in one line, what libraries raise over a bucket, which is of any type.

    Over a path on a disk nothing is changed.
    """
    try:
        yield
    except Exception as error:
        if not is_remote(path):
            raise
        text = next(iter(str(error).strip().splitlines()), "")
        reason = text.partition(" [")[0][:_MAX_REASON]  # TensorStore's details follow
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        way_out = next(words for pattern, words in _WAYS_OUT if re.search(pattern, text, re.I))
        raise OSError(f"{path} cannot be used ({reason}); {way_out}.") from error


def make_directory(path: Workdir) -> None:
    """Make a directory and its parents; in a bucket there are none."""
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Workdir, content: bytes) -> None:
    """Write a file, which no one sees in part, and its directory if there is none.

    Raises:
      OSError: it cannot be written.
    """
    if is_remote(path):
        with reporting(path):
            path.write_bytes(content)
        return
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_text(path: Workdir, text: str) -> None:
    """Write a file of text; see `write_bytes`."""
    write_bytes(path, text.encode())


def read_text(path: Workdir) -> str | None:
    """The text of a file; None if there is none.

    Raises:
      OSError: it cannot be read.
    """
    with reporting(path):
        try:
            return path.read_text()
        except FileNotFoundError:
            return None


def append_line(path: Workdir, line: str) -> None:
    """Add a line to a file, which is made if there is none.

    Raises:
      OSError: it cannot be written.
    """
    if is_remote(path):
        write_text(path, f"{read_text(path) or ''}{line}\n")
    else:
        with path.open("a") as file:
            file.write(f"{line}\n")


def open_lines(
    path: Workdir, may_write: Callable[[], None] = lambda: None
) -> DiskLines | BucketLines:
    """Open a file that grows by lines, after what is in it if there is one.

    Args:
      path: of the file.
      may_write: raises OSError when the directory belongs to another run by now.

    Raises:
      OSError: it cannot be written.
    """
    return BucketLines(path, may_write) if is_remote(path) else DiskLines(path)


class DiskLines:
    """Lines that survive a crash of the process at once."""

    def __init__(self, path: Workdir) -> None:
        """Open the file."""
        make_directory(path.parent)
        self._file = path.open("a")

    def write(self, line: str) -> None:
        """Append a line."""
        self._file.write(f"{line}\n")
        self._file.flush()

    def sync(self) -> None:
        """Do nothing: all lines are there."""

    def close(self) -> None:
        """Close the file; `write` must not be called after it."""
        self._file.close()


class BucketLines:
    """Lines that a thread uploads now and then."""

    def __init__(self, path: Workdir, may_write: Callable[[], None]) -> None:
        """Read the file, if there is one."""
        self._path, self._may_write = path, may_write
        self._lines = [read_text(path) or ""]
        self._uploaded = 1
        self._uploading = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_closed, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Append a line, in memory."""
        self._lines.append(f"{line}\n")

    def sync(self) -> None:
        """Upload what is new, and warn if that fails: a run need not end for it."""
        with self._uploading:
            count = len(self._lines)
            if count == self._uploaded:
                return
            try:
                self._may_write()
                write_text(self._path, "".join(self._lines[:count]))
                self._uploaded = count
            except OSError as error:
                _LOGGER.warning("new lines of %s are not there yet: %s", self._path, error)

    def close(self) -> None:
        """Upload what is new; `write` must not be called after it."""
        self._closing.set()
        self._thread.join()
        self.sync()

    def _upload_until_closed(self) -> None:
        pause_s = _EVERY_S
        while not self._closing.wait(pause_s):
            started = time.monotonic()
            self.sync()
            pause_s = max(_EVERY_S, 10 * (time.monotonic() - started))
