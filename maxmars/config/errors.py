"""Errors that a user's input, files, network or environment cause, and how they are told.

They are raised where they happen, by us or by a library, and printed as one line at one place
(`maxmars.cli`). A handler on the way only adds what the error is about.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What shows a stack trace instead is what no user can cause: TypeError, AssertionError and others.
EXTERNAL_ERRORS = (OSError, ValueError, ImportError, KeyError)

_PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


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
    """What an error says, behind the notes of `about`, the outermost first, and the place in the
    user's own file that it comes from."""
    # JAX's own note, on the traceback that it shortened, has several lines.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    own = filter(None, [place_in_own_file(error)])
    words = [*own, *reversed(notes), str(error) or type(error).__name__]
    if isinstance(error, OSError) and error.strerror:  # whose own text begins with [Errno 2]
        words[-1:] = [str(error.filename)] * bool(error.filename) + [error.strerror]
        if error.errno == errno.EMFILE:
            words[-1] += "; raise this limit of the shell: ulimit -n"
    elif isinstance(error, KeyError) and len(error.args) == 1:
        words[-1] = f"there is no {error.args[0]!r}"
    return ": ".join(dict.fromkeys(words))


def place_in_own_file(error: BaseException) -> str | None:
    """`FILE.py:LINE` of the user's where an error was raised; None where it was in a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        # The folders of libraries have these names in every environment.
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        is_library = is_installed or not {_PACKAGE, _STANDARD_LIBRARY}.isdisjoint(path.parents)
        if path.is_file() and not is_library:
            return f"{path.name}:{frame.lineno}"
    return None


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Say in an ImportError which extra of maxmars installs the library that is imported within."""
    with about(f"this needs the extra {extra}: {pip_install(extra)}"):
        yield


def pip_install(extra: str) -> str:
    """The command, in backquotes, that adds an extra to the maxmars that is installed, and leaves
    it what it is: an editable checkout, a copy, or of an address or an index (PEP 610)."""
    try:
        recorded = distribution("maxmars").read_text("direct_url.json")
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return f"`pip install -e '{_PACKAGE.parent}[{extra}]'`"
    origin = json.loads(recorded or "{}")
    url = origin.get("url", "")
    if url.startswith("file:"):
        option = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"`pip install {option}'{unquote(urlsplit(url).path)}[{extra}]'`"
    if commit := origin.get("vcs_info"):
        url = f"{commit['vcs']}+{url}@{commit['commit_id']}"
    return f"`pip install 'maxmars[{extra}]{f' @ {url}' if url else ''}'`"
