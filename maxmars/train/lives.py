"""Stops a run that is started again and again and gets no further.

Launchers start a run again whose machine was taken away or whose processes lost each other. Each
start is a life. Process 0 counts in `<workdir>/lives.json` those in a row that saved fewer than
`_FEWEST_STEPS` steps, however they ended, and refuses to begin another one after `_MOST_LIVES`. The
refusal ends a launcher's restarts; the same command, given again by a person, begins to count anew.

A process of several that fails by an error of its own, which would come back, leaves it in
`<workdir>/failed.json`. The others, who lose it, then end as it did: with 1.

Both files name their job, and no other job believes them. A start in a workdir that another one
owns writes neither.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxmars.checkpoint import list_steps
from maxmars.checkpoint.lock import InUseError, is_owned
from maxmars.config.errors import in_words
from maxmars.distributed import processes
from maxmars.distributed.files import (
    Workdir,
    is_remote,
    make_directory,
    read_json,
    reporting,
    write_json,
)
from maxmars.distributed.workdir import CHECKPOINTS, FAILED, LIVES, LOGS

_SLURM_JOB = "SLURM_JOB_ID"
_MOST_LIVES = 10
_FEWEST_STEPS = 10
_LONGEST_PAUSE_S = 60.0  # shorter than the other processes wait for this one
_PATIENCE_S = 2.0  # a process that is being killed keeps its lock for a moment


@dataclass(kw_only=True)
class _Record:
    """The contents of `lives.json`."""

    job: str | None
    """The job of SLURM, which is the same when it is queued again; None elsewhere."""
    step: int = 0
    """Of the newest checkpoint when the last life began."""
    lives: int = 0
    """How many in a row, with that one, came to nothing so far."""
    stopped: bool = False
    """Whether that one ended on request."""


class Life(contextlib.AbstractContextManager["Life"]):
    """One start of `maxmars train`, by which later ones judge whether the run gets on.

    Every process has one. Process 0, where it knows its number before the processes meet, calls
    `begin` then; all call `met` once they have met.
    """

    def __init__(self, workdir: Workdir, pause_s: float = 5.0) -> None:
        """A start waits for `pause_s` after two without progress, and twice as long after each
        more."""
        self._workdir, self._pause_s = workdir, pause_s
        self._record: _Record | None = None  # of this life; None before it and after
        self._before = _Record(job=None)  # what it was before this life
        # In the name of which processes leave and believe an error; None while another run may own
        # the workdir.
        self._job: str | None = None
        self._lock = threading.RLock()  # SIGTERM ends a life from another thread
        self._made: list[Path] = []

    def begin(self, log: Any = print) -> None:
        """Count this life, and wait before it where those before got no further.

        Raises:
          ValueError: too many lives in a row came to nothing.
          OSError, ImportError: the working directory cannot be read.
        """
        if self._record is not None or is_owned(self._workdir / CHECKPOINTS, _PATIENCE_S):
            return
        self._job = os.environ.get(_SLURM_JOB) or uuid.uuid4().hex
        newest = max(list_steps(self._workdir / CHECKPOINTS), default=0)
        record = _read(self._workdir / LIVES)
        if newest >= record.step + _FEWEST_STEPS:
            record.lives = 0
        record.step = newest
        if record.lives > _MOST_LIVES:  # the last start would have refused, but nobody came
            self._refuse(record)
        if record.lives >= 2 and not record.stopped:
            pause_s = min(self._pause_s * 2 ** (record.lives - 2), _LONGEST_PAUSE_S)
            log(f"{record.lives} starts in a row got no further; waiting {pause_s:.0f} s")
            time.sleep(pause_s)
        self._before = record
        record = dataclasses.replace(record, lives=record.lives + 1, stopped=False)
        if not is_remote(self._workdir):
            directory = Path(self._workdir)
            self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        self._remove(FAILED)
        with self._lock:
            self._record = record
            self._write(record)

    def met(self) -> None:
        """All processes of the run are there; every one calls.

        Raises:
          ValueError: see `begin`; every process raises.
        """
        if jax.distributed.is_initialized():
            self._job = processes.text_from_primary(self._meet)
        else:
            self._meet()

    def _meet(self) -> str | None:
        self.begin()
        with self._lock:
            if self._record is not None and self._record.lives > _MOST_LIVES:
                self._refuse(self._record)
        return self._job

    def _refuse(self, record: _Record) -> None:
        """Forget the lives, so that the next start is the first again, and end this one."""
        self._record = None
        self._write(dataclasses.replace(record, lives=0))
        error = ValueError(
            f"{self._workdir}: {_MOST_LIVES} starts in a row crashed, hung, lost a machine or were "
            f"stopped before they had saved {_FEWEST_STEPS} steps each, the last one after step "
            f"{record.step}, so this start ends as well. Look at what they printed, and in "
            f"{self._workdir / LOGS}; the same command, given again, tries anew."
        )
        self._leave_error(error)  # the other processes may never meet this one
        raise error

    def lost(self) -> str | None:
        """This life ends as another process is lost; that one's own error, if it left one."""
        own_error = self.own_error()  # at once: JAX may be about to abort this process
        if own_error is not None:
            self.leave()
        return own_error

    def stopped(self) -> None:
        """This life ends on request; it counts if it saved few steps."""
        with self._lock:
            record, self._record = self._record, None
            if record is not None:
                self._write(dataclasses.replace(record, stopped=True))

    def finished(self) -> None:
        """All steps of the run are done."""
        self._before = _Record(job=self._job)
        self.leave()

    def leave(self) -> None:
        """This life ends, and does not count: an error of its own ends the restarts anyway."""
        with self._lock:
            record, self._record = self._record, None
            if record is None:
                return
            if self._before.lives:
                self._write(self._before)
            else:
                self._remove(LIVES)
            if self._made:  # nothing is to be left of a run that was refused
                self._remove(FAILED)
            with contextlib.suppress(OSError):  # another process may write its error meanwhile
                for path in self._made:
                    path.rmdir()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InUseError):  # the files are those of the start that was faster
            self._record = self._job = None
        if isinstance(error, Exception | SystemExit) and jax.distributed.is_initialized():
            self._leave_error(error)
        if error is not None:
            self.leave()

    def _leave_error(self, error: Exception | SystemExit) -> None:
        """Tell the other processes, and SLURM's batch script, that this one fails by itself."""
        if self._job is None:
            return
        text = next(iter(in_words(error).splitlines()), type(error).__name__)
        told = {"job": self._job, "host": os.uname().nodename, "error": text}
        with contextlib.suppress(OSError), reporting(self._workdir):
            if self._workdir.exists():
                (self._workdir / FAILED).write_text(json.dumps(told))

    def own_error(self) -> str | None:
        """The error of its own that a process of this life left, if one did."""
        with contextlib.suppress(OSError, ValueError):
            told = read_json(self._workdir / FAILED)
            if self._job is not None and isinstance(told, dict) and told.get("job") == self._job:
                return f"{told['host']} says: {told['error']}"
        return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError), reporting(self._workdir):
            (self._workdir / name).unlink(missing_ok=True)

    def _write(self, record: _Record) -> None:
        with contextlib.suppress(OSError):  # bookkeeping never stops a run
            make_directory(self._workdir)
            write_json(self._workdir / LIVES, dataclasses.asdict(record))


def _read(path: Workdir) -> _Record:
    """The record; an empty one if there is none of this job, or none that can be read."""
    job = os.environ.get(_SLURM_JOB)
    with contextlib.suppress(OSError, TypeError, ValueError):
        record = _Record(**read_json(path))
        if record.job == job:
            return record
    return _Record(job=job)
