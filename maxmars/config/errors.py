"""Errors that a user's input, files, network or environment cause, as messages of one line.

Such errors are raised where they happen, by maxmars or by a library, and printed at one place,
`maxmars.cli`. Handlers on the way only add a note with the path, file or field (`about`), which
`in_words` puts in front: "out/meta.json: Expecting value: line 1 column 1".
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

# All others, such as TypeError and AssertionError, are bugs and show a stack trace.
EXTERNAL_ERRORS = (OSError, ValueError, ImportError, KeyError)

_PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


@contextlib.contextmanager
def about(what: object) -> Iterator[None]:
    """Add a note to every error raised within the block: the path, file or field of the work."""
    try:
        yield
    except Exception as error:
        error.add_note(str(what))
        raise


def in_words(error: BaseException) -> str:
    """The message of an error in one line: the line of the user's file that raised it, if one did,
    the notes of `about` from the outermost in, and the error's own text."""
    # JAX adds a note of several lines about its shortened traceback.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    line = filter(None, [line_in_user_file(error)])
    parts = [*line, *reversed(notes), str(error) or type(error).__name__]
    if isinstance(error, OSError) and error.strerror:  # its str() begins with [Errno 2]
        parts[-1:] = [str(error.filename)] * bool(error.filename) + [error.strerror]
        if error.errno == errno.EMFILE:
            parts[-1] += "; raise this limit of the shell: ulimit -n"
    elif isinstance(error, KeyError) and len(error.args) == 1:  # its str() is the key alone
        parts[-1] = f"there is no {error.args[0]!r}"
    return ": ".join(dict.fromkeys(parts))  # a note may repeat the path that OSError names


def line_in_user_file(error: BaseException) -> str | None:
    """`FILE.py:LINE`, the innermost line of a user's own file in the traceback, or None."""
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
    """Add to every error within the block the extra of maxmars that has the missing package."""
    with about(f"this needs the extra {extra}: {pip_install(extra)}"):
        yield


def pip_install(extra: str) -> str:
    """The command, in backquotes, that adds an extra to this installation of maxmars without
    changing its kind (PEP 610): an editable checkout, a folder, an address or an index."""
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
