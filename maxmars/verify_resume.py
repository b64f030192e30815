"""Prove on this hardware that a run which is killed and continued equals one that is not.

Three short runs of a config, each in processes of its own: one undisturbed, the same again as a
control, and one that is killed with SIGKILL after a checkpoint and then continued. Losses, gradient
norms and the digests of the last state must agree to the last bit. Where the control already
differs, the hardware or its libraries are not reproducible and say nothing about the resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from maxmars.checkpoint import list_steps, load_digests
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, to_dict
from maxmars.metrics import write_json
from maxmars.workdir import is_remote

TRAIN_FROM_JSON = """
import json, pathlib, sys
from maxmars.config import from_dict
from maxmars.train import train
train(from_dict(json.loads(pathlib.Path(sys.argv[1]).read_text())), sys.argv[2])
"""
"""Program of a training process; its arguments are a config as JSON, and the workdir."""

_POLL_S = 0.02
_METRICS = ("train/loss", "train/grad_norm")
_NOT_REPRODUCIBLE = (
    "not reproducible here: two undisturbed runs differ, so nothing can be said about the resume. "
    "On GPUs set XLA_FLAGS='--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0'."
)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What `verify_resume` found."""

    verdict: str
    """`identical`, `different` or `not reproducible`."""
    steps: int
    killed_after_step: int
    """Last step that the killed process had reported."""
    resumed_from_step: int
    control: str | None
    """First difference of the two undisturbed runs."""
    resume: str | None
    """First difference of the continued run from the undisturbed one."""
    state_digests: dict[str, str]
    """Digest of each array of the undisturbed run's last state."""

    @property
    def text(self) -> str:
        """For people."""
        head = f"{self.steps} steps, killed after step {self.killed_after_step}, "
        head += f"continued from step {self.resumed_from_step}: "
        if self.verdict == "not reproducible":
            return f"{head}{_NOT_REPRODUCIBLE} First difference: {self.control}."
        if self.verdict == "different":
            return f"{head}DIFFERENT from the undisturbed run; first difference: {self.resume}."
        return (
            f"{head}identical to the undisturbed run in every loss, every gradient norm and all "
            f"{len(self.state_digests)} arrays of the last state."
        )


def verify_resume(
    config: TrainConfig, out: str | Path, *, steps: int, checkpoint_step: int
) -> Receipt:
    """Make the three runs in `out`, and write `receipt.json` and `receipt.txt` there.

    Args:
      config: what to train; its schedule keeps its horizon, its evaluations are left out.
      out: directory to make.
      steps: steps of each run.
      checkpoint_step: the run is killed once the checkpoint of this step is complete.

    Raises:
      ValueError: the numbers of steps do not fit, a run failed, or it was done before it was
        killed.
      FileExistsError: `out` exists.
    """
    if not 0 < checkpoint_step < steps:
        raise ValueError(f"checkpoint_step={checkpoint_step} must lie between 0 and steps={steps}.")
    if is_remote(out):
        raise ValueError(f"--out {out} must be on a disk of this machine, whose hardware is tried.")
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another --out.")
    write_json(out / "config.json", to_dict(_short(config, steps, checkpoint_step)))
    for number, name in ((1, "undisturbed"), (2, "control")):
        with _Child(out, name, f"{number}/4 {name} run") as child:
            child.finish()
    with _Child(out, "resumed", "3/4 run to kill") as child:
        killed_after = child.kill_after(checkpoint_step)
    with _Child(out, "resumed", "4/4 continued run") as child:
        resumed_from = max(list_steps(child.checkpoints))
        if resumed_from == steps:
            raise ValueError(
                f"the run to kill had saved all {steps} steps before it was killed, so that there "
                "is nothing to continue; give more --steps."
            )
        child.finish()
    digests = load_digests(out / "undisturbed" / "checkpoints")
    control = first_difference(out / "undisturbed", out / "control")
    resume = first_difference(out / "undisturbed", out / "resumed")
    verdict = "not reproducible" if control else "different" if resume else "identical"
    receipt = Receipt(
        verdict=verdict,
        steps=steps,
        killed_after_step=killed_after,
        resumed_from_step=resumed_from,
        control=control,
        resume=resume,
        state_digests=digests,
    )
    environment = json.loads((out / "resumed" / "environment.json").read_text())
    fields = dataclasses.asdict(receipt) | {"environment": environment, "config": to_dict(config)}
    write_json(out / "receipt.json", fields)
    (out / "receipt.txt").write_text(receipt.text + "\n")
    return receipt


def _short(config: TrainConfig, steps: int, checkpoint_step: int) -> TrainConfig:
    schedule = dataclasses.replace(config.schedule, decay_steps=config.decay_steps)
    return dataclasses.replace(
        config,
        num_steps=steps,
        schedule=schedule,
        eval=EvalConfig(every=None),
        checkpoint=CheckpointConfig(every=checkpoint_step),
        log=LogConfig(every=1),
    )


class _Child:
    """A training process whose output goes to `<out>/<name>.log`; ended with the `with` block."""

    def __init__(self, out: Path, name: str, title: str) -> None:
        self.workdir = out / name
        self.checkpoints = self.workdir / "checkpoints"
        self._config, self._log, self._title = out / "config.json", out / f"{name}.log", title

    def __enter__(self) -> _Child:
        self._file = self._log.open("a")
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAIN_FROM_JSON, str(self._config), str(self.workdir)],
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._file.close()
        seconds = time.monotonic() - self._started
        self._console.print(f"{self._title}: {self._last_step()} steps in {seconds:.0f} s")

    def finish(self) -> None:
        """Wait for the end."""
        self._wait_until(lambda: False)
        if self._process.returncode:
            raise ValueError(
                f"the {self._title} failed with exit code {self._process.returncode}; "
                f"see the end of {self._log}."
            )

    def kill_after(self, checkpoint_step: int) -> int:
        """Kill it once a checkpoint is complete; the last step it had reported."""
        self._wait_until(lambda: checkpoint_step in list_steps(self.checkpoints))
        if self._process.poll() is not None:
            raise ValueError(
                f"the {self._title} ended (exit code {self._process.returncode}) before it could "
                f"be killed; see {self._log}, or give more --steps."
            )
        self._process.kill()
        self._process.wait()
        return self._last_step()

    def _wait_until(self, condition: Any) -> None:
        with self._console.status(self._title) as status:
            while self._process.poll() is None and not condition():
                status.update(f"{self._title}: step {self._last_step()}")
                time.sleep(_POLL_S)

    def _last_step(self) -> int:
        return max((step for step, _ in series(self.workdir)), default=0)


def series(workdir: Path) -> dict[tuple[int, str], float | str]:
    """The losses and gradient norms of a run, by step; a line that is still being written waits."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {(line["step"], key): line[key] for line in lines for key in _METRICS if key in line}


def first_difference(one: Path, other: Path) -> str | None:
    """What differs first, in words; None if nothing does."""
    ours, theirs = series(one), series(other)
    for step, key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get((step, key)), theirs.get((step, key))
        if a != b:
            return f"{key} of step {step} is {a} in {one.name} and {b} in {other.name}"
    ours, theirs = (load_digests(run / "checkpoints") for run in (one, other))
    wrong = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if wrong:
        return f"{len(wrong)} arrays of the last state, such as {min(wrong)}"
    return None
