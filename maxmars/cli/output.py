"""What a command writes: standard output and error, whose reader may go away, or whose disk may be
full, and the file of `--output`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any


class _Stream:
    """A text stream of the process, in which a write that fails is the last one.

    What is still buffered, and what libraries and child processes print, then goes to /dev/null.
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
        # Who closes a pipe knows it.
        if self._keep_going and self._name == "standard output" and not is_pipe:
            print(
                f"maxmars: warning: {self._name}: {error.strerror}; nothing more is printed there, "
                "and the command goes on",
                file=sys.stderr,
            )


@contextlib.contextmanager
def standard_streams(*, keep_going: bool) -> Generator[None]:
    """Within the block, `sys.stdout` and `sys.stderr` that may fail.

    A standard stream that was closed at the start (`>&-`) is /dev/null, so that no file of the
    command gets its number. Failures of standard error are never told.

    Args:
      keep_going: go on where standard output fails. Else this is exit code 141 where its reader has
        gone, and an OSError for another reason, such as a full disk.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # each opens the lowest number
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r"))
    out: Any = _Stream(sys.stdout, "standard output", keep_going=keep_going)
    err: Any = _Stream(sys.stderr, "standard error", keep_going=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def why_no_output(output: Path) -> str | None:
    """Why the file of `--output` could not be written after all the work; None if it can."""
    # Not above: a maxmars that was installed for its optimizers alone has none of this.
    from maxmars.config.errors import in_words
    from maxmars.distributed.files import check_writable, resolve

    try:
        check_writable(resolve(output))
    except (OSError, ValueError) as error:
        return f"--output {output} cannot be written ({in_words(error)}); name a file to write."
    return None
