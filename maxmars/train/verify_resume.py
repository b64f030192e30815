"""Prove on this hardware that a killed and continued run equals an undisturbed one.

A short run in a process of its own is killed with SIGKILL after a checkpoint, and then continued.
`audit` computes all of its steps again, from the seed and undisturbed: the digests of the last
states must be equal. Where they are not, it computes them once more. If the two undisturbed ones
already differ, the hardware or its libraries are not reproducible, and nothing is said about the
resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from maxmars.checkpoint import list_steps
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, to_dict
from maxmars.distributed.files import is_remote, read_json, write_json
from maxmars.distributed.progress import Progress
from maxmars.distributed.workdir import CHECKPOINTS, CONFIG, ENVIRONMENT
from maxmars.train.audit import audit
from maxmars.train.metrics import read_metrics
from maxmars.train.resume import fixed_schedule

_TRAIN = """
import pickle, sys
from maxmars.train import train
train(pickle.load(sys.stdin.buffer), sys.argv[1])
"""
"""Program of a training process, which reads its config from a pipe: no file of ours has secrets.
Its argument is a workdir."""

_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ResumeCheck:
    """The result of `verify_resume`."""

    verdict: str
    """`identical`, `different` or `not reproducible`."""
    steps: int
    killed_after_step: int
    """Last step in the metrics of the killed process."""
    resumed_from_step: int
    audit: str
    """What the audit of the continued run said."""

    @property
    def text(self) -> str:
        """The result in a sentence."""
        results = {
            "identical": "identical to the undisturbed run in all arrays of the last state.",
            "different": f"DIFFERENT from the undisturbed run: {self.audit}",
            "not reproducible": "not reproducible here: two undisturbed runs differ, so nothing "
            "can be said about the resume. On GPUs set the environment variable "
            "XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true, and give "
            f"--model.scan-unroll 1. {self.audit}",
        }
        return (
            f"{self.steps} steps, killed after step {self.killed_after_step}, continued from step "
            f"{self.resumed_from_step}: {results[self.verdict]}"
        )


def verify_resume(
    config: TrainConfig, out: str | Path, *, steps: int, checkpoint_step: int
) -> ResumeCheck:
    """Train, kill, continue and compare in `out`; write `receipt.json` and `receipt.txt` there.

    Args:
      config: what to train, on its own schedule and without evaluations.
      out: directory to make.
      steps: steps of the run.
      checkpoint_step: the run is killed once the checkpoint of this step is complete.

    Raises:
      ValueError: `checkpoint_step` is not before `steps`, a process failed, or the run ended before
        it was killed.
      FileExistsError: `out` exists.
    """
    if not 0 < checkpoint_step < steps:
        raise ValueError(f"checkpoint_step={checkpoint_step} must lie between 0 and steps={steps}.")
    if is_remote(out):
        raise ValueError(f"--out {out} must be on a disk of this machine, whose hardware is tried.")
    run = Path(out) / "run"
    run.parent.mkdir(parents=True)
    short = dataclasses.replace(
        config,
        num_steps=steps,
        schedule=fixed_schedule(config),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=checkpoint_step),
        log=LogConfig(every=1),
    )
    write_json(Path(out) / CONFIG, to_dict(short))
    with Progress(stderr=True) as progress:
        killed_after = _train(short, run, "1/3 run to kill", progress, kill_at=checkpoint_step)
        resumed_from = max(list_steps(run / CHECKPOINTS))
        if resumed_from == steps:
            raise ValueError(
                f"the run to kill had saved all {steps} steps before it was killed, so that there "
                "is nothing to continue; give more --steps."
            )
        _train(short, run, "2/3 continued run", progress)
        progress.message("3/3 undisturbed run")
        first = last = audit(run, replay=steps, log=progress.message)
        if first.problems:
            last = audit(run, replay=steps, log=progress.message)
    verdict = "different" if first.problems else "identical"
    if first.problems != last.problems:
        verdict = "not reproducible"
    check = ResumeCheck(
        verdict=verdict,
        steps=steps,
        killed_after_step=killed_after,
        resumed_from_step=resumed_from,
        audit=last.text,
    )
    environment = read_json(run / ENVIRONMENT)
    fields = dataclasses.asdict(check) | {"environment": environment, "config": to_dict(config)}
    write_json(Path(out) / "receipt.json", fields)
    (Path(out) / "receipt.txt").write_text(check.text + "\n")
    return check


def _train(
    config: TrainConfig,
    workdir: Path,
    title: str,
    progress: Progress,
    *,
    kill_at: int | None = None,
) -> int:
    """Train in a process of its own; the last step it recorded.

    The process's output goes to `<workdir>.log`. With `kill_at` it is killed with SIGKILL once the
    checkpoint of this step is complete.

    Raises:
      ValueError: the process failed, or ended before it could be killed.
    """
    log, started = workdir.with_suffix(".log"), time.monotonic()

    def last_step() -> int:
        return max((row["step"] for row in read_metrics(workdir)), default=0)

    with (
        log.open("a") as file,
        subprocess.Popen(
            [sys.executable, "-c", _TRAIN, str(workdir)],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdin is not None  # it is a pipe
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # its log says why it ended
                pickle.dump(config, process.stdin)
            while process.poll() is None and kill_at not in list_steps(workdir / CHECKPOINTS):
                progress.update(f"{title}: step {last_step()}")
                time.sleep(_POLL_S)
            code = process.poll()
        finally:
            process.kill()
    progress.message(f"{title}: {last_step()} steps in {time.monotonic() - started:.0f} s")
    if code:
        raise ValueError(f"the {title} failed with exit code {code}; see the end of {log}.")
    if kill_at is not None and code is not None:
        raise ValueError(f"the {title} ended before it could be killed; give more --steps.")
    return last_step()
