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
    # JAX's own note, on the traceback that it shortened, has several lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    words = [*reversed(notes), str(error) or type(error).__name__]
    if isinstance(error, OSError) and error.strerror:  # whose own text begins with [Errno 2]
        words[-1:] = [str(error.filename)] * bool(error.filename) + [error.strerror]
    elif isinstance(error, KeyError) and len(error.args) == 1:
        words[-1] = f"there is no {error.args[0]!r}"
    return ": ".join(dict.fromkeys(words))


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say in an ImportError which extra of maxmars installs the library that is imported within."""
    with about(f"this needs `pip install 'maxmars[{extra}]'`"):
        yield
