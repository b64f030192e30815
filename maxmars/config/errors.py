"""Errors that a user's input, files, network or environment cause, and how they are told.

They are raised where they happen, by us or by a library, and printed as one line at one place
(`maxmars.cli`). A handler on the way only adds what the error is about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# What shows a stack trace instead is what no user can cause: TypeError, AssertionError and others.
EXTERNAL_ERRORS = (OSError, ValueError, ImportError, KeyError)


@contextlib.contextmanager
def about(what: object) -> Iterator[None]:
    """Add a note to every error raised within: the path, file or field that was being read.

    A library's "Expecting value: line 1 column 1" is then told as "out/meta.json: Expecting ...".
    """
    try:
        yield
    except Exception as error:
        error.add_note(str(what))
        raise


def in_words(error: BaseException) -> str:
    """What an error says, behind the notes of `about`, the outermost first."""
    if isinstance(error, OSError) and error.strerror:  # whose own text begins with [Errno 2]
        words = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, KeyError) and len(error.args) == 1:
        words = f"there is no {error.args[0]!r}"
    else:
        words = str(error) or type(error).__name__
    # JAX's own note, on the traceback that it shortened, has several lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return ": ".join([*reversed(notes), words])
