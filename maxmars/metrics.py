"""What a run records: metrics.jsonl and environment.json.

Keys: those of `train_step.TrainStep`, `perf/tokens_per_sec`, `perf/step_time` and `perf/data_wait`
(seconds a step, and those of them in which the loop waited for tokens), `perf/mfu` (absent where
the peak is unknown), `perf/time_to_first_step` (seconds from the start of the run to the end of its
first step, evaluations aside), `perf/checkpoint_blocking_time` (seconds that an asynchronous save
stopped training), `eval/loss`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import maxmars
from maxmars.config import GPT2Config
from maxmars.workdir import Workdir, open_lines, read_text, write_text

if TYPE_CHECKING:
    import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# Dense bf16 FLOP/s of one device, from the vendors' data sheets; the first pattern found counts.
_PEAK_FLOPS = (
    (r"\bMIG\b", None),  # a slice of a GPU
    (r"\bA100\b", 312e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bG?H[12]00\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"^TPU v4$", 275e12),
    (r"^TPU v5( lite|e)$", 197e12),
    (r"^TPU v5p?$", 459e12),
    (r"^TPU v6( lite|e)$", 918e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device (`jax.Device.device_kind`); None on CPU and where unknown."""
    for pattern, flops in _PEAK_FLOPS:
        if re.search(pattern, device_kind):
            return flops
    return None


def flops_per_token(num_parameters: int, config: GPT2Config) -> int:
    """FLOPs of forward and backward pass a token: 6 N + 12 L d T, as in PaLM (2204.02311, App. B).

    Args:
      num_parameters: all parameters, embeddings included.
      config: the model, of `num_layers` L, `embed_dim` d and `max_seq_len` T.
    """
    attention = 12 * config.num_layers * config.embed_dim * config.max_seq_len
    return 6 * num_parameters + attention


@runtime_checkable
class Tracker(Protocol):
    """What takes the lines of metrics as well, such as a `trackers.Tracker`."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a line."""
        ...

    def sync(self) -> None:
        """Have all lines where a kill does not reach them."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


class MetricsWriter:
    """Appends to `<workdir>/metrics.jsonl`: one JSON object a line, with `step` and metrics.

    Every line is flushed, so that the file can be followed and survives a crash; in a bucket, see
    `workdir`. Non-finite values are the strings "NaN", "Infinity" and "-Infinity": valid JSON,
    which `float()` reads back. Only the primary process writes.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int = 0,
        *,
        may_write: Callable[[], None] = lambda: None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Open the file of a run that continues after `resume_step` steps.

        Lines of later steps, which the run is about to write again, are dropped; at step 0 all are.
        For `may_write` see `workdir.open_lines`. The `trackers` get each line too, and are closed.
        """
        self._lines = None
        self._trackers = trackers
        if not _is_primary():
            return
        path = workdir / "metrics.jsonl"
        text = read_text(path)
        if text is not None:
            write_text(path, _kept_lines(text, resume_step))
        self._lines = open_lines(path, may_write)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line; values are numbers or arrays of one element."""
        if self._lines is not None:
            line = {"step": step} | {key: json_number(value) for key, value in metrics.items()}
            self._lines.write(json.dumps(line, allow_nan=False))
        for tracker in self._trackers:
            tracker.write(step, metrics)

    def sync(self) -> None:
        """Have all lines where a kill does not reach them; see `workdir.BucketLines.sync`."""
        if self._lines is not None:
            self._lines.sync()
        for tracker in self._trackers:
            tracker.sync()

    def close(self) -> None:
        """Close the file; `write` must not be called after it."""
        if self._lines is not None:
            self._lines.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        """The writer; `with` closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def recorded_steps(workdir: Workdir, key: str) -> set[int]:
    """Steps for which `<workdir>/metrics.jsonl`, once opened by a `MetricsWriter`, has a value."""
    return {line["step"] for line in read_metrics(workdir) if key in line}


def read_metrics(workdir: Workdir) -> list[dict[str, Any]]:
    """The lines of `<workdir>/metrics.jsonl`; none if there is no such file."""
    return list(json_lines(read_text(workdir / "metrics.jsonl") or ""))


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last one that is, or was, being written."""
    for line in text.splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            if line.endswith("\n"):
                yield json.loads(line)


def read_json(path: Workdir) -> Any:
    """What a JSON file holds; None if there is none, or if it holds something else."""
    try:
        return json.loads(read_text(path) or "null")
    except ValueError:
        return None


def write_json(path: Workdir, value: Any) -> None:
    """Write a JSON file in one step, and its directory if there is none."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Versions, git commit, devices and mesh of this run, JSON-ready."""
    import jax

    devices = mesh.devices.flatten().tolist()
    return {
        "maxmars": maxmars.__version__,
        "git_commit": _git_commit(Path(maxmars.__file__).resolve().parents[1]),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "system": platform.platform(),
        "platform": devices[0].platform,
        "device_kinds": sorted({device.device_kind for device in devices}),
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "mesh": dict(mesh.shape),
    }


def write_environment(workdir: Workdir, mesh: jax.sharding.Mesh) -> None:
    """Write `environment(mesh)` to `<workdir>/environment.json`; only the primary process does."""
    if _is_primary():
        write_json(workdir / "environment.json", environment(mesh))


def _kept_lines(text: str, resume_step: int) -> str:
    """The lines up to `resume_step`, without a last one that a crash cut short."""
    kept = []
    for line in text.splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if resume_step and step <= resume_step:
            kept.append(line + "\n")
    return "".join(kept)


def json_number(value: Any) -> int | float | str:
    """A number for JSON, which has no non-finite ones: these as strings."""
    number = value if isinstance(value, int) else float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(root: Path) -> str | None:
    """Commit of the checkout that maxmars runs from, `-dirty` if changed; None if it is none."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def short(number: float) -> str:
    """Three digits of a number and its magnitude: 987, 12.3k, 1.23M."""
    for divisor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= divisor * 0.9995:
            scaled = number / divisor
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A duration: 0:07, 12:34, 1:02:03 or 2d 03h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _is_primary() -> bool:
    from maxmars import distributed  # loads JAX, which reading a device table does not need

    return distributed.is_primary()
