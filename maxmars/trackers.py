"""TensorBoard and Weights & Biases: what `metrics.jsonl` holds, also there.

A thread feeds each of them from a queue, and what goes wrong there is said once: they can neither
end a run nor make it wait. Both packages are extras, and are loaded only where they are wanted.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import queue
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from maxmars import distributed
from maxmars.config import LogConfig, TrainConfig, to_dict
from maxmars.metrics import read_json, write_json
from maxmars.workdir import Workdir, is_remote, make_directory, write_bytes

_MAX_LINES = 10_000  # that wait to be taken
_SYNC_S = 5.0
_CLOSE_S = 20.0
_UPLOAD_EVERY_S = 30.0
_RUN_FILE = "wandb.json"


def check_trackers(log: LogConfig, workdir: Workdir) -> None:
    """Check that the trackers of a config can be used, before a workdir is begun.

    Raises:
      ImportError: a package is not installed.
      ValueError: W&B does not know who you are, or would write its files into a bucket.
    """
    if log.tensorboard:
        _require("tensorboardX", "log.tensorboard=True", "tensorboard")
    mode = _wandb_mode(log)
    if mode is None:
        return
    _require("wandb", f"log.wandb={log.wandb}", "wandb")
    if mode == "offline" and is_remote(workdir):
        raise ValueError(
            f"log.wandb=offline keeps files in the workdir, which is a bucket, {workdir}; use "
            "log.wandb=online, or a --workdir on a disk."
        )
    if mode == "online" and distributed.is_primary() and not _is_logged_in():
        raise ValueError(
            "log.wandb=online needs an account: run `wandb login`, set WANDB_API_KEY, or take "
            "log.wandb=offline and upload later with `wandb sync`."
        )


def open_trackers(
    config: TrainConfig,
    workdir: Workdir,
    resume_step: int,
    *,
    say: Callable[[str], None],
    may_write: Callable[[], None] = lambda: None,
) -> list[Tracker]:
    """Start the trackers of a run that continues after `resume_step` steps; none elsewhere than in
    the primary process.

    Args:
      config: of the run; see `check_trackers`.
      workdir: of the run. TensorBoard's files go to `tensorboard/`, and W&B's to `wandb/`.
      resume_step: 0 of a run that begins.
      say: is told once what does not work.
      may_write: see `workdir.open_lines`.
    """
    if not distributed.is_primary():
        return []
    trackers = []
    if config.log.tensorboard:
        directory = workdir / "tensorboard"
        trackers.append(
            Tracker("TensorBoard", lambda: _TensorBoard(directory, resume_step, may_write), say)
        )
    mode = _wandb_mode(config.log)
    if mode is not None:
        run_id = _wandb_id(workdir, resume_step)
        trackers.append(
            Tracker(
                "W&B",
                lambda: _WeightsAndBiases(config, workdir, run_id, mode),
                say,
                give_up=_end_wandb_process,
            )
        )
    return trackers


@runtime_checkable
class _Sink(Protocol):
    """What a tracker's thread writes to; anything may be raised."""

    note: str | None
    """What users should know from the beginning."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """A thread that opens, feeds and closes one sink; it never raises, and never waits for long."""

    def __init__(
        self,
        name: str,
        make: Callable[[], _Sink],
        say: Callable[[str], None],
        *,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it.

        Args:
          name: for people.
          make: opens the sink, in the thread.
          say: is told what fails, by the methods and so in the caller's thread.
          give_up: is called if the sink does not close in time, lest the process hang at its end.
        """
        self._name, self._make, self._say, self._give_up = name, make, say, give_up
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_LINES)
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = self._behind = self._full = False
        self._thread = threading.Thread(target=self._feed, daemon=True, name=name)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand on a line of metrics."""
        self._tell()
        if self._ended:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            if not self._full:
                self._say(f"{self._name} takes no more lines: it will lack some of this run.")
            self._full = self._behind = True

    def sync(self) -> None:
        """Have all lines where a kill does not reach them, if that takes no more than seconds."""
        self._tell()
        done = threading.Event()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(done)
            if not self._ended and not self._behind:
                self._behind = not done.wait(_SYNC_S)  # who was late is not waited for again

    def close(self) -> None:
        """Hand on what is left; `write` must not be called after it."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._say(f"{self._name} does not answer: it will lack the end of this run.")
            self._give_up()
        self._tell()

    def _tell(self) -> None:
        while not self._news.empty():
            self._say(self._news.get())

    def _feed(self) -> None:
        try:
            sink = self._make()
            if sink.note is not None:
                self._news.put(sink.note)
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    sink.sync()
                    item.set()
                else:
                    sink.write(*item)
            sink.close()
        # Libraries and servers fail in any way; none is worth a run.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            self._news.put(
                f"{self._name} failed, and the run goes on without it "
                f"({type(error).__name__}: {reason})."
            )
        finally:
            self._ended = True


class _TensorBoard:
    """An event file for each part of a run; TensorBoard joins those of a directory.

    Into a bucket the file is uploaded as a whole, now and then.
    """

    note = None

    def __init__(self, directory: Workdir, resume_step: int, may_write: Callable[[], None]) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        # Whose classes type checkers do not see.
        events: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        summaries: Any = importlib.import_module("tensorboardX.proto.summary_pb2")
        self._event, self._summary = events.Event, summaries.Summary
        self._directory, self._may_write = directory, may_write
        self._remote, self._uploaded = is_remote(directory), time.monotonic()
        local = Path(tempfile.mkdtemp(prefix="maxmars-")) if self._remote else Path(directory)
        make_directory(local)
        # The same second may see two parts of a run, and a file of the same name is replaced.
        self._file = EventsWriter(str(local / "events"), f".{resume_step:09d}")
        self._path = Path(self._file._file_name)
        # TensorBoard then forgets later steps of earlier parts, which come again.
        start = events.SessionLog(status=events.SessionLog.START)
        again = resume_step + 1 if resume_step else 0
        self._write(self._event(wall_time=time.time(), step=again, session_log=start))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in metrics.items()
        ]
        summary = self._summary(value=values)
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))
        if self._remote and time.monotonic() > self._uploaded + _UPLOAD_EVERY_S:
            self.sync()

    def sync(self) -> None:
        if self._remote:
            self._may_write()
            write_bytes(self._directory / self._path.name, self._path.read_bytes())
            self._uploaded = time.monotonic()

    def close(self) -> None:
        self._file.close()
        self.sync()
        if self._remote:
            self._path.unlink()
            self._path.parent.rmdir()

    def _write(self, event: Any) -> None:
        self._file.write_event(event)
        self._file.flush()


class _WeightsAndBiases:
    """A run of W&B, the same for all parts of ours; it ignores steps that it has had before."""

    def __init__(self, config: TrainConfig, workdir: Workdir, run_id: str, mode: str) -> None:
        import wandb

        directory = tempfile.mkdtemp(prefix="maxmars-") if is_remote(workdir) else str(workdir)

        def begin(mode: Any) -> Any:
            return wandb.init(
                project=config.log.wandb_project,
                name=config.name,
                id=run_id,
                resume="allow",
                mode=mode,
                dir=directory,
                config=to_dict(config),
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, disable_code=True
                ),
            )

        self.note = None
        try:
            self._run = begin(mode)
        except Exception as error:
            if mode != "online":
                raise
            self._run = begin("offline")
            reason = str(error).partition("\n")[0]
            self.note = (
                f"W&B cannot be reached ({reason}); this part of the run is kept in "
                f"{Path(self._run.dir).parent}: upload it with `wandb sync`."
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def sync(self) -> None:
        pass  # it has a process of its own

    def close(self) -> None:
        self._run.finish()


def _require(package: str, wanted: str, extra: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name, as W&B leaves them, is none
        raise ImportError(
            f"{wanted} needs the package {package}: pip install 'maxmars[{extra}]', or leave it "
            "out."
        )


def _wandb_mode(log: LogConfig) -> str | None:
    """W&B's own variable WANDB_MODE overrides the config's mode, if W&B is wanted at all."""
    return None if log.wandb is None else os.environ.get("WANDB_MODE") or log.wandb


def _is_logged_in() -> bool:
    import wandb

    return wandb.login(prompt=False, verify=False)


def _end_wandb_process() -> None:
    """End W&B's own process, a child of this one, for whose answer this one would wait for ever."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if name == "wandb-core" and int(rest.split()[1]) == os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _wandb_id(workdir: Workdir, resume_step: int) -> str:
    """W&B's name of the run, kept in its directory; a run that begins anew gets a new one."""
    stored = read_json(workdir / _RUN_FILE) if resume_step else None
    if isinstance(stored, dict) and isinstance(stored.get("id"), str):
        return stored["id"]
    run_id = secrets.token_hex(4)
    write_json(workdir / _RUN_FILE, {"id": run_id})
    return run_id
