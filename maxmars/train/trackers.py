"""TensorBoard and Weights & Biases: the lines of `metrics.jsonl`, also there.

Both packages are extras, and are imported only where a config asks for them. A tracker that fails
is dropped with one warning; training goes on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from maxmars.config import LogConfig, TrainConfig, to_dict
from maxmars.config.errors import pip_install
from maxmars.distributed import processes
from maxmars.distributed.files import Workdir, is_remote, read_json, write_json
from maxmars.distributed.workdir import WANDB


@runtime_checkable
class Tracker(Protocol):
    """One service that takes lines of metrics; every method may raise anything."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of one line, those of the given step."""

    def sync(self) -> None:
        """Have all lines where a kill does not reach them."""

    def close(self) -> None:
        """Hand over the rest of the lines; nothing is written afterwards."""


class Trackers:
    """Several trackers, by name; one that raises is dropped, and `log` is told."""

    def __init__(
        self, factories: Mapping[str, Callable[[], Tracker]], log: Callable[[str], None]
    ) -> None:
        self._log = log
        self._trackers: dict[str, Tracker] = {}
        for name, make in factories.items():
            tracker = self._try(name, make)
            if tracker is not None:
                self._trackers[name] = tracker

    def each(self, call: Callable[[Tracker], None]) -> None:
        """Call every tracker."""
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: call(tracker))

    def _try(self, name: str, call: Callable[[], Tracker | None]) -> Tracker | None:
        try:
            return call()
        except Exception as error:  # libraries and servers fail in any way
            self._trackers.pop(name, None)
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._log(f"{name} failed, and the run goes on without it ({reason}).")
            return None


def check_trackers(log: LogConfig, workdir: Workdir) -> None:
    """Check that the trackers of a config can be used, before a workdir is begun.

    Raises:
      ImportError: a package is not installed.
      ValueError: W&B does not know the user, or would write its files into a bucket.
    """
    mode = _wandb_mode(log)
    wanted = []
    if log.tensorboard:
        wanted.append(("tensorboardX", "log.tensorboard=True", "tensorboard"))
    if mode is not None:
        wanted.append(("wandb", f"log.wandb={log.wandb}", "wandb"))
    for package, option, extra in wanted:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # W&B leaves folders of its name
            raise ImportError(
                f"{option} needs the package {package}: {pip_install(extra)}, or leave it out."
            )
    if mode == "offline" and is_remote(workdir):
        raise ValueError(
            f"log.wandb=offline keeps files in the workdir, which is a bucket, {workdir}; use "
            "log.wandb=online, or a --workdir on a disk."
        )
    if mode == "online" and processes.is_primary():
        import wandb

        if not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "log.wandb=online needs an account: run `wandb login`, set WANDB_API_KEY, or take "
                "log.wandb=offline and upload later with `wandb sync`."
            )


def open_trackers(
    config: TrainConfig,
    workdir: Workdir,
    resume_step: int,
    *,
    log: Callable[[str], None],
) -> Trackers:
    """Open the trackers of a run that continues after `resume_step` steps, 0 of a new run.

    Only the primary process has any. TensorBoard's files go to `<workdir>/tensorboard`, W&B's to
    `<workdir>/wandb`.
    """
    factories: dict[str, Callable[[], Tracker]] = {}
    if config.log.tensorboard and processes.is_primary():
        factories["TensorBoard"] = lambda: _TensorBoard(workdir / "tensorboard", resume_step)
    mode = _wandb_mode(config.log)
    if mode is not None and processes.is_primary():
        again = resume_step > 0
        factories["W&B"] = lambda: _WeightsAndBiases(config, workdir, again, mode, log)
    return Trackers(factories, log)


class _TensorBoard:
    """An event file for each start of a run; TensorBoard joins the files of a directory."""

    def __init__(self, directory: Workdir, resume_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            os.fspath(directory),
            # TensorBoard then forgets the steps of earlier starts that are made again.
            purge_step=resume_step + 1 if resume_step else 0,
            # Two starts may fall into one second, by which the file is named.
            filename_suffix=f".{resume_step:09d}.{secrets.token_hex(2)}",
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of W&B, the same for all starts of ours until `maxmars rewind` sets its id aside.

    Its charts are drawn over the metric `step`. W&B's own count of rows only rises: a row of a step
    that is made again after a kill, or evaluated later, would otherwise be dropped.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: Workdir,
        again: bool,
        mode: str,
        log: Callable[[str], None],
    ) -> None:
        import wandb

        known = read_json(workdir / WANDB) if again else None
        run_id = secrets.token_hex(4) if known is None else known["id"]
        starts = 1 if known is None else known.get("starts", 1) + 1
        write_json(workdir / WANDB, {"id": run_id, "starts": starts})
        remote = is_remote(workdir)
        options: dict[str, Any] = {"mode": mode}  # WANDB_MODE may be more than its type allows
        self._run = wandb.init(
            project=config.log.wandb_project,
            name=config.name,
            id=run_id,
            resume="allow",
            dir=tempfile.mkdtemp(prefix="maxmars-") if remote else os.fspath(workdir),
            config=to_dict(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,  # they hold the whole command line
            ),
            **options,
        )
        self._run.define_metric("*", step_metric="step")
        # Offline W&B counts the rows of each start from 0, and `wandb sync` joins the starts.
        self._row: int | None = (starts - 1) * 1_000_000 if self._run.offline else None
        if self._run.offline:
            log(f"W&B: later, `wandb sync {Path(self._run.dir).parent}`")
        elif self._run.url:  # the run may be disabled by WANDB_MODE
            log(f"W&B: {self._run.url}")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics}, step=self._row, commit=True)
        self._row = None  # W&B counts on

    def sync(self) -> None:
        pass  # W&B's own process has the lines

    def close(self) -> None:
        self._run.finish()


def _wandb_mode(log: LogConfig) -> str | None:
    """W&B's own variable WANDB_MODE overrides the config's mode, if W&B is wanted at all."""
    return None if log.wandb is None else os.environ.get("WANDB_MODE") or log.wandb
