"""The directory of a run's checkpoints: which are in it, what dead runs left, what is set aside."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from etils import epath

from maxmars import workdir
from maxmars.workdir import is_remote

Directory = str | os.PathLike[str]

_COMMITTED = "commit_success.txt"  # Orbax writes it last where a rename is not atomic


def resolve(directory: Directory) -> Any:
    """An absolute `epath.Path`: Orbax rejects others only when a save is under way, in a thread."""
    return epath.Path(workdir.resolve(directory))


def list_steps(directory: Directory) -> list[int]:
    """Steps of the checkpoints in a directory, ascending, sound or not; empty if it is missing.

    Raises:
      ImportError, OSError: it is on `gs://`; see `workdir.require_access`.
    """
    path = _reachable(directory)
    with workdir.reporting(path):
        if not path.is_dir():
            return []
        return sorted(int(p.name) for p in path.iterdir() if _is_step(p) and _is_committed(p))


def find(path: Directory) -> tuple[Any, int | None] | None:
    """The directory of checkpoints that a path means, and the step if it means a single one.

    Args:
      path: a run's working directory, its directory of checkpoints, or one checkpoint in that.

    Returns:
      None if it is none of these.

    Raises:
      ValueError: it is a checkpoint, but one without a step for a name.
      ImportError, OSError: it is on `gs://`; see `workdir.require_access`.
    """
    root = _reachable(path)
    if (root / "meta" / "data.json").exists():
        if not root.name.isdecimal():
            raise ValueError(
                f"{root} is a checkpoint whose name is not its step: it is damaged, or was renamed "
                "by hand; name another one, or give it the name of its step again."
            )
        return root.parent, int(root.name)
    for directory in (root / "checkpoints", root):
        if list_steps(directory):
            return directory, None
    return None


def sweep(directory: Any) -> None:
    """Remove the unfinished checkpoints of runs that were killed; Orbax ignores but keeps them."""
    for path in directory.iterdir():
        if ".orbax-checkpoint-tmp" in path.name or (_is_step(path) and not _is_committed(path)):
            # What cannot be removed costs space and nothing else; the next start tries again.
            with contextlib.suppress(OSError), workdir.reporting(path):
                path.rmtree(missing_ok=True)


def set_aside(directory: Any, step: int) -> Any:
    """Rename a damaged checkpoint, so that it is none any more; returns its new path.

    On `gs://` this copies its files.
    """
    names = [f"{step}.damaged", *(f"{step}.damaged-{n}" for n in range(2, 1000))]
    target = next(path for path in (directory / name for name in names) if not path.exists())
    (directory / str(step)).rename(target)
    return target


def _reachable(directory: Directory) -> Any:
    path = resolve(directory)
    workdir.require_access(path)
    return path


def _is_step(path: Any) -> bool:
    return path.name.isdecimal() and path.is_dir()


def _is_committed(path: Any) -> bool:
    return not is_remote(path) or (path / _COMMITTED).exists()
