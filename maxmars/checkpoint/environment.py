"""What a run ran on: versions, git commit, devices and mesh."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import maxmars

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Versions, git commit, devices and mesh of this run, JSON-ready."""
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(root: Path) -> str | None:
    """Commit of the checkout that maxmars runs from, `-dirty` if changed; None if it is none."""
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.check_output(
            command, cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None
