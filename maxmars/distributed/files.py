"""Files on a disk or in a bucket (`gs://`): what `epath.Path` lacks.

* Atomic replacement of a file: by a rename on a disk, by one request in a bucket.
* Files that grow by lines. An object in a bucket cannot grow: its lines stay in memory, and are
  uploaded as a whole before each checkpoint, at the end, and every `_UPLOAD_EVERY_S`. A kill loses
  the lines after the last upload.
* For buckets: errors in one line, timeouts, and generations of objects (`open_store`), by which
  a run has one writer.

A path becomes an `epath.Path` once, in `resolve`. Paths that are never in a bucket (caches,
exports, comparisons, a user's Python) are `pathlib.Path`s; the functions here take both. Three
methods of `epath.Path` (etils 1.15) are not used on a disk: `stat` fails for users without a name,
as in many containers, `rmdir` deletes files that came meanwhile, and `glob` takes brackets in a
directory's name for a pattern.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any

from etils import epath

from maxmars.config.checks import from_json
from maxmars.config.credentials import refuse_credentials
from maxmars.config.errors import about, in_words, needs_extra

_LOGGER = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_LARGEST_TEXT = 1 << 28  # bytes of a file that is read as a whole; files of lines may be larger
_UPLOAD_EVERY_S = 30.0
_PROBE_S = 30.0
_REQUEST_S = 60.0  # gcsfs has no timeout by default
_TRANSIENT = re.compile(  # TensorStore's errors have no types of their own
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): |Could not resolve|Couldn't resolve|"
    + "|".join(
        re.escape(os.strerror(code))
        for code in (
            *(errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN),
            *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        )
    )
)
_WAYS_OUT = (
    (
        r"\b40[13]\b|UNAUTHENTICATED|PERMISSION_DENIED|Forbidden|credential",
        "log in (`gcloud auth application-default login`), or give the machine's service account "
        "the roles Storage Object User and Storage Legacy Bucket Reader",
    ),
    (r"\b404\b|NOT_?FOUND|does not exist|Invalid GCS", "make the bucket, or check its name"),
    ("Project was not passed", "set GOOGLE_CLOUD_PROJECT"),
    ("", "check the network"),
)


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in an object store, like `gs://bucket/name`."""
    return "://" in os.fspath(path)


def resolve(path: epath.PathLike) -> epath.Path:
    """An absolute path; for a path in a bucket, after a check that the bucket answers.

    Raises:
      ValueError: the path is empty, in an object store other than `gs://`, without a bucket, or not
        UTF-8, which JAX, Orbax and JSON need.
      ImportError, OSError: see `require_access`.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path '' is empty, as where a variable is not set; name one.")
    if not is_remote(text) and not re.match(r"(gs|s3|az|hf):/", text):
        absolute = Path(path).expanduser().absolute()
        try:
            str(absolute).encode()
        except UnicodeEncodeError as error:  # its own text cannot be printed
            name = os.fsencode(absolute).decode(errors="backslashreplace")
            raise ValueError(f"{name} is not UTF-8; rename it, or choose another path.") from error
        is_scheme = re.match(r"/(gs|s3|az|hf)(/|$)", str(absolute))
        # epath 1.15 takes a mount /s3 for s3://, but not //s3, which is the same place.
        return epath.Path(f"/{absolute}" if is_scheme else absolute)
    refuse_credentials(text, "the path")  # which records will name
    if not re.match(r"gs://[^/]+(/|$)", text):
        raise ValueError(f"{text} must be a path on a disk, or gs://BUCKET/PATH; write it so.")
    require_access(text)
    return epath.Path(text)


def require_access(path: epath.PathLike) -> None:
    """Check at the first use of a bucket that it answers: libraries would retry for minutes.

    `resolve` does so; a process that gets a path by pickle calls this function.

    Raises:
      ImportError: the library for buckets (extra `gcs`) is not installed.
      OSError: the bucket does not answer, or refuses.
    """
    if is_remote(path):
        _require_bucket("gs://" + os.fspath(path).removeprefix("gs://").partition("/")[0])


@functools.cache
def _require_bucket(name: str) -> None:
    with about(name), needs_extra("gcs"):
        import aiohttp  # comes with gcsfs
        import gcsfs  # noqa: F401
    import fsspec

    options = fsspec.config.conf.setdefault("gcs", {})
    # No cache: TensorStore and the run's other processes change the bucket too.
    options.setdefault("use_listings_cache", False)
    options.setdefault("requests_timeout", aiohttp.ClientTimeout(total=_REQUEST_S))
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also raises every error that it logs
    with reporting(name):
        open_store(name, max_retries=3).read("maxmars").result(timeout=_PROBE_S)


def open_store(directory: epath.PathLike, max_retries: int = 4) -> Any:
    """The `tensorstore.KvStore` at a directory of a bucket; it gives up after a few seconds, and
    4 s later for each retry over 4."""
    import tensorstore  # comes with Orbax

    bucket, _, path = os.fspath(directory).removeprefix("gs://").partition("/")
    retries = {"max_retries": max_retries, "initial_delay": "500ms", "max_delay": "4s"}
    spec = {"driver": "gcs", "bucket": bucket, "path": f"{path}/" if path else ""}
    return tensorstore.KvStore.open(spec | {"context": {"gcs_request_retries": retries}}).result()


@contextlib.contextmanager
def reporting(path: epath.PathLike) -> Generator[None, None, None]:
    """Raise OSError, in one line, for errors of any type that libraries raise over a bucket.

    Errors over a path on a disk pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if not is_remote(path):
            raise
        text = next(iter(str(error).strip().splitlines()), "")
        reason = text.partition(" [")[0][:300]  # TensorStore's details follow
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {reason}"
        way_out = next(words for pattern, words in _WAYS_OUT if re.search(pattern, text, re.I))
        raise OSError(f"{path} cannot be used ({reason}); {way_out}.") from error


def is_transient(error: BaseException, path: epath.PathLike) -> bool:
    """Whether an error comes from the network or the store and not from the file at `path`, so that
    a retry may succeed."""
    if isinstance(error, TimeoutError | ConnectionError) or _TRANSIENT.search(str(error)):
        return True
    if not is_remote(path) or importlib.util.find_spec("gcsfs") is None:
        return False
    from gcsfs.retry import is_retriable

    return is_retriable(error)


@contextlib.contextmanager
def naming(path: epath.PathLike) -> Generator[None, None, None]:
    """Name the path in system errors without one: a failed write does not name its file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def make_directory(path: epath.PathLike) -> None:
    """Make a directory and its parents; a bucket has no directories."""
    if not is_remote(path):
        os.makedirs(path, exist_ok=True)


def write_bytes(path: epath.PathLike, content: bytes) -> None:
    """Write a file atomically, and its directory if there is none.

    Raises:
      OSError: the file cannot be written.
    """
    if is_remote(path):
        with reporting(path):
            epath.Path(path).write_bytes(content)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Generator[Path, None, None]:
    """A temporary path, which replaces the file `path` on a disk at the end of the block.

    An error in the block leaves `path` unchanged. The directory is made if there is none.
    """
    path = Path(path)
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave the name without the contents
        temporary.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, os.fspath(temporary)):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: epath.Path) -> None:
    """Check that a file can be written, before its contents are computed; makes its directory.

    Raises:
      OSError: the file cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not is_remote(path):
        make_directory(path.parent)
        tempfile.TemporaryFile(dir=path.parent).close()


def write_text(path: epath.PathLike, text: str) -> None:
    write_bytes(path, text.encode())


def read_text(path: epath.PathLike) -> str | None:
    """The text of a file; None if there is no file.

    Raises:
      OSError: the file cannot be read.
      UnicodeDecodeError: the file is not UTF-8.
    """
    content = _read_bytes(path, _LARGEST_TEXT)
    with about(path):
        return None if content is None else content.decode()


def _read_bytes(path: epath.PathLike, max_bytes: int | None = None) -> bytes | None:
    with reporting(path):
        try:
            require_file(path, max_bytes)
            return resolve(path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None


def require_file(path: epath.PathLike, max_bytes: int | None = _LARGEST_TEXT) -> None:
    """Check that a file on a disk can be read as a whole; a device or a pipe may be endless.

    Raises:
      ValueError: the path is neither a regular file nor a directory, or has over `max_bytes`.
      OSError: the path does not exist.
    """
    if is_remote(path):
        return
    status = os.stat(path)
    with about(path):
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ValueError("it is no regular file; put one there.")
        if max_bytes is not None and status.st_size > max_bytes:
            raise ValueError(
                f"it has {status.st_size:,} bytes; no such file has over {max_bytes:,}."
            )


def set_aside(path: epath.Path, why: str = "damaged") -> epath.Path:
    """Rename a file or directory to `NAME.damaged`, or `NAME.damaged-2` and so on.

    In a bucket this copies files.

    Returns:
      The new path.
    """
    names = [f"{path.name}.{why}", *(f"{path.name}.{why}-{n}" for n in range(2, 1000))]

    def is_taken(candidate: epath.Path) -> bool:
        return candidate.exists() or os.path.lexists(candidate)  # epath follows links

    target = next(p for p in map(path.with_name, names) if not is_taken(p))
    path.rename(target)
    return target


class LineFile:
    """A file to which lines are appended.

    On a disk each line is written at once, and survives a crash of the process. In a bucket a
    thread uploads the lines every `every_s` seconds; `sync` and `close` upload at once. A failed
    upload is a warning, once for each reason, as a run need not end for it.
    """

    def __init__(
        self,
        path: epath.PathLike,
        may_write: Callable[[], None] = lambda: None,
        every_s: float = _UPLOAD_EVERY_S,
    ) -> None:
        """Open the file; `may_write` raises ValueError once another run owns the directory.

        Raises:
          OSError: the file cannot be written.
        """
        self._path, self._may_write, self._every_s = resolve(path), may_write, every_s
        self._file: IO[bytes] | None = None
        if not is_remote(path):
            make_directory(self._path.parent)
            self._file = open(path, "ab+")  # noqa: SIM115
            if self._file.tell() and not _ends_with_newline(self._file):
                self.write("")  # ends the incomplete line that a kill left
            return
        self._lines = [(_read_bytes(path) or b"").decode(errors="replace")]
        self._uploaded, self._warned = 1, ""
        self._uploading = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_closed, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Append a line."""
        if self._file is not None:
            with naming(self._path):
                self._file.write(f"{line}\n".encode())
                self._file.flush()
        else:
            self._lines.append(f"{line}\n")

    def sync(self) -> None:
        """Upload all lines, if the file is in a bucket; a kill cannot lose them then."""
        if self._file is not None:
            return
        with self._uploading:
            count = len(self._lines)
            if count == self._uploaded:
                return
            try:
                self._may_write()
                write_text(self._path, "".join(self._lines[:count]))
                self._uploaded = count
            except (OSError, ValueError) as error:
                if str(error) != self._warned:
                    _LOGGER.warning("new lines of %s are not there yet: %s", self._path, error)
                self._warned = str(error)

    def close(self) -> None:
        """Close the file; no method may be called afterwards."""
        if self._file is not None:
            with naming(self._path):
                self._file.close()
            return
        self._closing.set()
        self._thread.join()
        self.sync()

    def _upload_until_closed(self) -> None:
        pause_s = self._every_s
        while not self._closing.wait(pause_s):
            started = time.monotonic()
            self.sync()
            # A file of many lines uploads slowly: at most a tenth of the time goes to uploads.
            pause_s = max(self._every_s, 10 * (time.monotonic() - started))


def _ends_with_newline(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def read_json_lines(
    path: epath.PathLike, *keys: str, parse: Callable[[dict[str, Any]], Any] = dict
) -> list[Any]:
    """Results of `parse` for the JSON objects with all of `keys` in a file of lines.

    The list is empty if there is no file. Other lines, and lines for which `parse` raises KeyError
    or TypeError, are skipped; a warning counts them, once per process. An incomplete last line, as
    a kill leaves it, is skipped silently.
    """
    *lines, _ = (_read_bytes(path) or b"").split(b"\n")
    values, damaged = [], []
    for number, line in enumerate(lines, 1):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            value = parse_json(line)  # bytes: JSON is UTF-8, anything else is a ValueError
            if isinstance(value, dict) and all(key in value for key in keys):
                values.append(parse(value))
                continue
        if line.strip():
            damaged.append(number)
    if damaged:
        _warn_of_damaged(os.fspath(path), len(damaged), damaged[0])
    return values


@functools.cache  # warns once: a comparison reads its rows many times
def _warn_of_damaged(path: str, count: int, first: int) -> None:
    _LOGGER.warning("%s: damaged lines skipped: %d, the first is line %d", path, count, first)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: the text is no JSON, or nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep to be read as JSON") from None


def read_json(path: epath.PathLike) -> Any:
    """The value in a JSON file; None if there is no file.

    Raises:
      ValueError: the file is no JSON.
    """
    with about(path):
        text = read_text(path)
        return None if text is None else parse_json(text)


def read_json_object(path: epath.PathLike) -> dict[str, Any]:
    """The fields of a JSON object in a user's file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds no JSON object.
    """
    with about(path):
        require_file(path)
        return from_json(dict[str, Any], parse_json(resolve(path).read_bytes()))


def write_json(path: epath.PathLike, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def json_number(value: Any) -> int | float | str:
    """A number for JSON; non-finite numbers, which JSON lacks, become strings."""
    number = value if isinstance(value, int) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def sha256_of(
    path: epath.PathLike, progress: Callable[[int], None] = lambda num_bytes: None
) -> str:
    """SHA-256 of a file, in hex; `progress` gets the number of bytes of each block."""
    sha = hashlib.sha256()
    with resolve(path).open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sha.update(block)
            progress(len(block))
    return sha.hexdigest()


def cache_directory() -> Path:
    """Directory of downloads and prepared data: MAXMARS_CACHE, by default `maxmars` in
    XDG_CACHE_HOME, which is by default ~/.cache.

    Raises:
      PermissionError: it cannot be made, as in a container whose user has no home.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = os.environ.get("MAXMARS_CACHE") or f"{caches}/maxmars"
    try:
        path = Path(name).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~" of a user without a home
        raise PermissionError(
            f"no cache for downloads and prepared data can be made at {name} "
            f"({in_words(error)}): set MAXMARS_CACHE to a directory for them."
        ) from error
    return path


def try_lock(file: IO[Any], path: epath.PathLike, timeout_s: float = 0.0) -> bool:
    """Take the kernel's advisory lock on an open file of a disk, which ends with the process.

    Returns whether the lock is taken within `timeout_s`; on a file system without locks True, with
    a warning.
    """
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _LOGGER.warning(
            "%s: this file system has no locks (%s): make sure yourself that nobody else writes "
            "there",
            os.path.dirname(path),
            error.strerror,
        )
    return True
