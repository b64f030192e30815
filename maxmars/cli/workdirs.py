"""An error of a working directory names the option that chose it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from maxmars.distributed.files import naming


@contextlib.contextmanager
def naming_workdir(workdir: str | os.PathLike[str]) -> Generator[None]:
    """Name `--workdir` where the directory cannot be written; the system names some file in it.

    Raises:
      OSError: it cannot be written.
    """
    try:
        with naming(workdir):  # where a library wrote, and the system does not know what
            yield
    except OSError as error:
        if _is_refused(error, os.fspath(workdir)):
            raise OSError(
                f"--workdir {workdir} cannot be written ({error.strerror}); name another directory"
            ) from error
        raise


def _is_refused(error: OSError, workdir: str) -> bool:
    if not error.filename or "://" in workdir or os.access(workdir, os.W_OK | os.X_OK):
        return False
    path, place = Path(os.path.abspath(error.filename)), Path(os.path.abspath(workdir))
    return path.is_relative_to(place) or place.is_relative_to(path)
