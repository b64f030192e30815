"""Sinks of a run's metrics: `metrics.jsonl`, the terminal, TensorBoard, Weights & Biases.

A run writes each line once, to `Sinks`, which hands it to all. `metrics.jsonl` comes first: a run
continues by it, and an error there ends the run. TensorBoard and W&B are extras, imported only
where a config asks for them; their first error is logged, and the run goes on (`Foreign`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from maxmars.checkpoint.journal import PrefixHash
from maxmars.config import LogConfig, TrainConfig, to_dict
from maxmars.config.errors import pip_install
from maxmars.config.numbers import short
from maxmars.distributed import processes
from maxmars.distributed.files import (
    LineFile,
    is_remote,
    json_number,
    read_json,
    write_json,
    write_text,
)
from maxmars.distributed.progress import Progress
from maxmars.distributed.workdir import METRICS, WANDB
from maxmars.train.metrics import read_metrics


class Sink:
    """Base class of sinks."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a line of metrics of a step; values are numbers or arrays of one element."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make all lines so far safe from a kill of the process."""

    def close(self) -> None:
        """Write the rest; no `write` follows."""


class Sinks(contextlib.AbstractContextManager["Sinks"]):
    """All sinks of a run; each gets every line.

    Args:
      file: the sink by which a run continues; it is written first.
      others: further sinks.
      tokens: function from a step to the tokens trained on up to it, the metric `tokens` of each
        line.
    """

    def __init__(
        self, file: MetricsFile, others: Sequence[Sink], tokens: Callable[[int], int]
    ) -> None:
        self.file, self.tokens, self._all = file, tokens, [file, *others]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for sink in self._all:
            sink.write(step, {"tokens": self.tokens(step), **metrics})

    def sync(self) -> None:
        for sink in self._all:
            sink.sync()

    def __exit__(self, *_: object) -> None:
        for sink in self._all:
            sink.close()


class MetricsFile(Sink):
    """The file `<workdir>/metrics.jsonl`: one JSON object a line, with `step` and metrics.

    Non-finite values are the strings "NaN", "Infinity" and "-Infinity": valid JSON, which `float()`
    parses. Only the primary process writes.
    """

    def __init__(
        self,
        workdir: epath.Path,
        resume_step: int | None = None,
        *,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file of a run that continues after `resume_step` steps; None for a new run.

        Lines of later steps are removed, as the run makes these steps again. A new run removes all
        lines, from a start that saved nothing. For `may_write` see `files.LineFile`.
        """
        self._lines: LineFile | None = None
        self.previous_lines: list[dict[str, Any]] = []
        """Lines of earlier sessions; like the next two, only in the primary process."""
        self.latest: dict[str, tuple[int, Any]] = {}
        """Step and value of the newest line with each key."""
        self.prefix = PrefixHash()
        """Number and hash of all lines."""
        if processes.is_primary():
            path = workdir / METRICS
            lines = [] if resume_step is None else read_metrics(workdir)
            self.previous_lines = [line for line in lines if line["step"] <= (resume_step or 0)]
            if path.exists():  # also drops an incomplete last line, which a kill may leave
                write_text(path, "".join(json.dumps(line) + "\n" for line in self.previous_lines))
            for line in self.previous_lines:
                self._add(line)
            self._lines = LineFile(path, may_write)

    def _add(self, line: Mapping[str, Any]) -> None:
        self.prefix = self.prefix.after(line)
        self.latest |= {key: (line["step"], value) for key, value in line.items()}

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._lines is not None:
            line = {"step": step} | {key: json_number(value) for key, value in metrics.items()}
            self._lines.write(json.dumps(line, allow_nan=False))
            self._add(line)

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class Terminal(Sink):
    """The live line of the terminal. Some lines stay, and all go to the log of this host."""

    def __init__(self, progress: Progress, num_steps: int, every: int) -> None:
        """`every`: the steps from one line of the run to the next."""
        self._progress, self._num_steps, self._every = progress, num_steps, every

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        if "perf/time_to_first_step" in metrics:
            seconds = metrics["perf/time_to_first_step"]
            self._progress.message(f"first step after {seconds:.1f} s")
        if "train/loss" not in metrics:
            return
        num_steps = self._num_steps
        line = f"step {step:>{len(str(num_steps))}}/{num_steps}  loss {metrics['train/loss']:.4f}"
        if "perf/tokens_per_sec" in metrics:
            line += f"  {short(metrics['perf/tokens_per_sec'])} tok/s"
        if "perf/mfu" in metrics:
            line += f"  MFU {metrics['perf/mfu']:.1%}"
        # About 100 lines of a run stay on the terminal, more at its start.
        stride = self._every * math.ceil(num_steps / (100 * self._every))
        keep = step % stride == 0 or step == num_steps or str(step).rstrip("0") in ("1", "2", "5")
        self._progress.update(line, step, num_steps, keep=keep)


class Foreign(Sink):
    """Wrapper of a sink of a library or service, which may fail in any way: the first failure is
    logged, and drops the sink."""

    def __init__(self, name: str, make: Callable[[], Sink], log: Callable[[str], None]) -> None:
        self._name, self._log = name, log
        self._sink: Sink | None = None  # `_try` sets it too
        self._sink = self._try(make)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        if (sink := self._sink) is not None:
            self._try(lambda: sink.write(step, metrics))

    def sync(self) -> None:
        if self._sink is not None:
            self._try(self._sink.sync)

    def close(self) -> None:
        if self._sink is not None:
            self._try(self._sink.close)

    def _try(self, call: Callable[[], Sink | None]) -> Sink | None:
        try:
            return call()
        except Exception as error:  # libraries and servers fail in any way
            self._sink = None
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._log(f"{self._name} failed, and the run goes on without it ({reason}).")
            return None


def check_trackers(log: LogConfig, workdir: epath.Path) -> None:
    """Check packages and login of TensorBoard and W&B, before anything is written.

    Raises:
      ImportError: a package is not installed.
      ValueError: W&B has no login, or would write files into a bucket.
    """
    mode = _wandb_mode(log)
    wanted = []
    if log.tensorboard:
        wanted.append(("tensorboardX", "log.tensorboard=True", "tensorboard"))
    if mode is not None:
        wanted.append(("wandb", f"log.wandb={log.wandb}", "wandb"))
    for package, option, extra in wanted:
        spec = importlib.util.find_spec(package)
        # W&B leaves folders named `wandb`, which Python takes for packages without an origin.
        if spec is None or spec.origin is None:
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


def open_sinks(
    config: TrainConfig,
    workdir: epath.Path,
    resume_step: int | None,
    *,
    tokens: Callable[[int], int],
    progress: Progress,
    may_write: Callable[[], None] = lambda: None,
) -> Sinks:
    """Open the sinks of a run that continues after `resume_step` steps; None for a new run.

    TensorBoard writes to `<workdir>/tensorboard`, W&B to `<workdir>/wandb`. For the other arguments
    see `Sinks`, `Terminal` and `MetricsFile`.
    """
    log, mode = progress.message, _wandb_mode(config.log)
    file = MetricsFile(workdir, resume_step, may_write=may_write)
    sinks: list[Sink] = [Terminal(progress, config.num_steps, config.log.every)]
    if config.log.tensorboard and processes.is_primary():
        directory = workdir / "tensorboard"
        sinks.append(Foreign("TensorBoard", lambda: _TensorBoard(directory, resume_step), log))
    if mode is not None and processes.is_primary():
        resumes = resume_step is not None
        sinks.append(
            Foreign("W&B", lambda: _WeightsAndBiases(config, workdir, resumes, mode, log), log)
        )
    return Sinks(file, sinks, tokens)


class _TensorBoard(Sink):
    """Event files of TensorBoard, one for each start of a run; TensorBoard joins them."""

    def __init__(self, directory: epath.Path, resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(
            os.fspath(directory),
            # TensorBoard then hides these steps of earlier starts, which the run makes again.
            purge_step=0 if resume_step is None else resume_step + 1,
            # The file's name has the time in seconds, and two starts may be within one.
            filename_suffix=f".{resume_step or 0:09d}.{secrets.token_hex(2)}",
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases(Sink):
    """A run of W&B: one for all starts of our run, until `maxmars rewind` sets its id aside.

    Charts are over the metric `step`, not over W&B's own step, which must not fall: W&B would drop
    rows of steps that are repeated after a kill, or evaluated later.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: epath.Path,
        resumes: bool,
        mode: str,
        log: Callable[[str], None],
    ) -> None:
        import wandb

        record = read_json(workdir / WANDB) if resumes else None
        run_id = secrets.token_hex(4) if record is None else record["id"]
        starts = 1 if record is None else record.get("starts", 1) + 1
        write_json(workdir / WANDB, {"id": run_id, "starts": starts})
        remote = is_remote(workdir)
        options: dict[str, Any] = {"mode": mode}  # WANDB_MODE has values that the type lacks
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
                x_disable_meta=True,  # metadata have the whole command line
            ),
            **options,
        )
        self._run.define_metric("*", step_metric="step")
        # Offline W&B counts the rows of each start from 0, and `wandb sync` joins the starts: each
        # start gets a range of its own.
        self._row: int | None = (starts - 1) * 1_000_000 if self._run.offline else None
        if self._run.offline:
            log(f"W&B: later, `wandb sync {Path(self._run.dir).parent}`")
        elif self._run.url:  # the run may be disabled by WANDB_MODE
            log(f"W&B: {self._run.url}")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **metrics}, step=self._row, commit=True)
        self._row = None  # from the second row on W&B counts itself

    def close(self) -> None:
        self._run.finish()


def _wandb_mode(log: LogConfig) -> str | None:
    """The mode of W&B, None without W&B; the variable WANDB_MODE overrides the config's."""
    return None if log.wandb is None else os.environ.get("WANDB_MODE") or log.wandb
