"""Output of a command: the standard streams, and the check of the file of `--output`.

The reader of a pipe may go away, and the disk of a redirected stream may be full. Most commands
then end. A run of days does not: `train` goes on without the stream, as its metrics are in files.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any


class _Stream:
    """A standard stream that is replaced by /dev/null after the first failed write.

    The replacement is of the file descriptor, so that buffered text, libraries and child processes
    write to /dev/null, too.
    """

    def __init__(self, stream: Any, name: str, *, keep_going: bool) -> None:
        self._stream, self._name, self._keep_going = stream, name, keep_going
        self._error: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Any) -> None:
        if self._error is None:
            try:
                call()
            except OSError as error:
                self._lose(error)
        if self._error is not None and not self._keep_going:
            raise self._error

    def _lose(self, error: OSError) -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        is_pipe = isinstance(error, BrokenPipeError)
        self._error = SystemExit(141) if is_pipe else OSError(*error.args[:2], self._name)
        # Whoever closed a pipe knows it.
        if self._keep_going and self._name == "standard output" and not is_pipe:
            print(
                f"maxmars: warning: {self._name}: {error.strerror}; nothing more is printed there, "
                "and the command goes on",
                file=sys.stderr,
            )


@contextlib.contextmanager
def standard_streams(*, keep_going: bool) -> Generator[None]:
    """Handle failures of `sys.stdout` and `sys.stderr` within the block.

    A standard stream that is closed at the start (`>&-`) becomes /dev/null, as a file of the
    command would else get its descriptor. Failures of standard error are ignored.

    Args:
      keep_going: whether to go on without standard output when it fails. Else the command ends,
        with exit code 141 if the reader has gone, or an OSError, such as for a full disk.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # each opens the lowest number
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r"))
    out: Any = _Stream(sys.stdout, "standard output", keep_going=keep_going)
    err: Any = _Stream(sys.stderr, "standard error", keep_going=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def why_no_output(output: Path | None) -> str | None:
    """The reason why the file of `--output` cannot be written, to know it before all the work; None
    if it can, or there is none."""
    if output is None:
        return None
    # Imported here: an installation for maxmars.optim alone lacks what these modules import.
    from maxmars.config.errors import in_words
    from maxmars.distributed.files import check_writable, resolve

    try:
        check_writable(resolve(output))
    except (OSError, ValueError) as error:
        return f"--output {output} cannot be written ({in_words(error)}); name a file to write."
    return None
