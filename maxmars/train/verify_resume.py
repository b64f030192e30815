"""Prove on this hardware that a killed and continued run equals an undisturbed one.

Three short runs of one config, each in a process of its own: an undisturbed run, the same again as
a control, and a run that is killed with SIGKILL after a checkpoint and then continued. Losses,
gradient norms and the digests of the last state must agree to the last bit. If the control already
differs, the hardware or its libraries are not reproducible, and nothing is said about the resume.
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

from maxmars.checkpoint import list_steps, read
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, to_dict
from maxmars.distributed.files import is_remote, read_json, write_json
from maxmars.distributed.progress import Progress
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
    control: str | None
    """First difference between the two undisturbed runs; None if there is none."""
    resume: str | None
    """First difference between the continued and the undisturbed run; None if there is none."""
    state_digests: dict[str, str]
    """Digest of each array of the undisturbed run's last state."""

    @property
    def text(self) -> str:
        """The result in a sentence."""
        results = {
            "identical": "identical to the undisturbed run in every loss, every gradient norm and "
            f"all {len(self.state_digests)} arrays of the last state.",
            "different": f"DIFFERENT from the undisturbed run; first difference: {self.resume}.",
            "not reproducible": "not reproducible here: two undisturbed runs differ, so nothing "
            "can be said about the resume. On GPUs set XLA_FLAGS='--xla_gpu_deterministic_ops=true "
            f"--xla_gpu_autotune_level=0'. First difference: {self.control}.",
        }
        return (
            f"{self.steps} steps, killed after step {self.killed_after_step}, continued from step "
            f"{self.resumed_from_step}: {results[self.verdict]}"
        )


def verify_resume(
    config: TrainConfig, out: str | Path, *, steps: int, checkpoint_step: int
) -> ResumeCheck:
    """Make the three runs in `out`, and write `receipt.json` and `receipt.txt` there.

    Args:
      config: what to train, on its own schedule and without evaluations.
      out: directory to make.
      steps: steps of each run.
      checkpoint_step: the third run is killed once the checkpoint of this step is complete.

    Raises:
      ValueError: `checkpoint_step` is not before `steps`, a run failed, or the third run ended
        before it was killed.
      FileExistsError: `out` exists.
    """
    if not 0 < checkpoint_step < steps:
        raise ValueError(f"checkpoint_step={checkpoint_step} must lie between 0 and steps={steps}.")
    if is_remote(out):
        raise ValueError(f"--out {out} must be on a disk of this machine, whose hardware is tried.")
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another --out.")
    short = dataclasses.replace(
        config,
        num_steps=steps,
        schedule=fixed_schedule(config),
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=checkpoint_step),
        log=LogConfig(every=1),
    )
    write_json(out / "config.json", to_dict(short))
    undisturbed, again, resumed = out / "undisturbed", out / "control", out / "resumed"
    with Progress(stderr=True) as progress:
        _train(short, undisturbed, "1/4 undisturbed run", progress)
        _train(short, again, "2/4 control run", progress)
        killed_after = _train(short, resumed, "3/4 run to kill", progress, kill_at=checkpoint_step)
        resumed_from = max(list_steps(resumed / "checkpoints"))
        if resumed_from == steps:
            raise ValueError(
                f"the run to kill had saved all {steps} steps before it was killed, so that there "
                "is nothing to continue; give more --steps."
            )
        _train(short, resumed, "4/4 continued run", progress)
    control, resume = (first_difference(undisturbed, other) for other in (again, resumed))
    check = ResumeCheck(
        verdict="not reproducible" if control else "different" if resume else "identical",
        steps=steps,
        killed_after_step=killed_after,
        resumed_from_step=resumed_from,
        control=control,
        resume=resume,
        state_digests=read(undisturbed / "checkpoints").digests,
    )
    environment = read_json(resumed / "environment.json")
    fields = dataclasses.asdict(check) | {"environment": environment, "config": to_dict(config)}
    write_json(out / "receipt.json", fields)
    (out / "receipt.txt").write_text(check.text + "\n")
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
        return max((step for step, _ in series(workdir)), default=0)

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
            while process.poll() is None and kill_at not in list_steps(workdir / "checkpoints"):
                progress.update(f"{title}: step {last_step()}")
                time.sleep(_POLL_S)
            code = process.poll()
        finally:
            process.kill()
    progress.message(f"{title}: {last_step()} steps in {time.monotonic() - started:.0f} s")
    if kill_at is not None and code is not None:
        raise ValueError(
            f"the {title} ended (exit code {code}) before it could be killed; see {log}, or give "
            "more --steps."
        )
    if code:
        raise ValueError(f"the {title} failed with exit code {code}; see the end of {log}.")
    return last_step()


def series(workdir: Path) -> dict[tuple[int, str], float | str]:
    """The losses and gradient norms of a run, by step and name."""
    return {
        (line["step"], key): line[key]
        for line in read_metrics(workdir)
        for key in ("train/loss", "train/grad_norm")
        if key in line
    }


def first_difference(one: Path, other: Path) -> str | None:
    """The first difference between two runs, in words; None if there is none."""
    ours, theirs = series(one), series(other)
    for step, key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get((step, key)), theirs.get((step, key))
        if a != b:
            return f"{key} of step {step} is {a} in {one.name} and {b} in {other.name}"
    ours, theirs = (read(run / "checkpoints").digests for run in (one, other))
    wrong = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if wrong:
        return f"{len(wrong)} arrays of the last state, such as {min(wrong)}"
    return None
