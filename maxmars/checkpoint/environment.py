"""Environment of a run: versions, code, devices and mesh.

It is recorded with each checkpoint. A run may continue with other versions and on other devices,
which it then says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import maxmars
from maxmars.config.checkout import git_commit, wheel_sha256
from maxmars.optim._newton_schulz import cpu_multiplies_bfloat16

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def environment(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Versions, code, devices and mesh of this run, JSON-ready."""
    devices = mesh.devices.flatten().tolist()
    root = Path(maxmars.__file__).resolve().parents[1]
    wheel = wheel_sha256(root)
    return {
        "git_commit": git_commit(root),
        **({"wheel_sha256": wheel} if wheel is not None else {}),
        "code": package_digest(),
        "python": platform.python_version(),
        **package_versions(),
        "system": platform.platform(),
        "platform": devices[0].platform,
        "device_kinds": sorted({device.device_kind for device in devices}),
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        **(_cpu() if devices[0].platform == "cpu" else {}),
        **({"libtpu_init_args": _libtpu_init_args()} if devices[0].platform == "tpu" else {}),
    }


def package_versions() -> dict[str, str]:
    """The versions of maxmars and of the libraries that decide what it computes, by name."""
    libraries = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"maxmars": maxmars.__version__} | libraries


def package_digest() -> str:
    """The first 16 hex digits of the SHA-256 over the Python files of the running maxmars, without
    the configs, which a wheel has among them, and a checkout beside them."""
    root = Path(maxmars.__file__).parent
    sha = hashlib.sha256()
    for path in sorted({*root.rglob("*.py")} - {*root.glob("config/files/*")}):
        sha.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def commit_of(environment: Mapping[str, Any]) -> str:
    """The commit of the code in a result of `environment`, for `git checkout`."""
    return (environment.get("git_commit") or "unknown").removesuffix("-dirty")


def changes_since(
    earlier: Mapping[str, Any], now: Mapping[str, Any], *, devices: bool = False
) -> list[str]:
    """Differences in words between two results of `environment`: of code, versions and CPU cores;
    with `devices` also of the system, the devices and the mesh."""
    names = ["git_commit", "code", "python", *package_versions(), "libtpu_init_args"]
    names += ["num_cores", "cpu_multiplies_bfloat16"]
    names += ["system", "platform", "device_kinds", "num_devices", "mesh"] if devices else []
    return [
        f"{name} {earlier[name]} -> {now[name]}"
        for name in names
        if name in earlier and name in now and earlier[name] != now[name]
    ]


def _libtpu_init_args() -> str:
    """Options of the TPU compiler from the environment variable."""
    return os.environ.get("LIBTPU_INIT_ARGS", "")


def _cpu() -> dict[str, Any]:
    """What of a CPU changes rounding: XLA splits sums by the number of threads, and Newton-Schulz
    takes the instructions for products of bfloat16 where there are any."""
    return {"num_cores": _num_cores(), "cpu_multiplies_bfloat16": cpu_multiplies_bfloat16()}


def _num_cores() -> int | None:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
