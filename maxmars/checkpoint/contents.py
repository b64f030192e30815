"""What a checkpoint holds beside its arrays: `meta/data.json`, with a checksum over itself."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import maxmars
from maxmars.config import GPT2Config, TrainConfig, differences, from_dict, to_dict
from maxmars.digest import combine, leaf_types
from maxmars.orbax_io import root_cause

FORMAT_VERSION = 2
"""1 had no metrics, seed and environment, and can be read as well."""

_RANDOMNESS = "every random number is a function of config.seed, the step and its place in it"

# Errors that another attempt may not meet: they say nothing about the checkpoint.
_NOT_DAMAGE = (
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "Permission denied",
    "UNAUTHENTICATED",
    "Too many open files",
    "more bytes than we reserved",
)


class DamagedError(Exception):
    """A checkpoint that cannot be used; the message says why."""


def make_meta(
    step: int,
    state: Any,
    digests: dict[str, str],
    *,
    data_position: int,
    config: TrainConfig | GPT2Config,
    metrics: dict[str, float],
    environment: dict[str, Any],
) -> dict[str, Any]:
    """The contents of `meta/data.json`, JSON-ready. `config` is of the run, or of the model alone
    where the parameters come from elsewhere."""
    types = leaf_types(state)
    seed = config.seed if isinstance(config, TrainConfig) else None
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "data_position": data_position,
        "rng": {"seed": seed, "step": step, "derivation": _RANDOMNESS},
        "metrics": metrics,
        "config": to_dict(config),
        "environment": environment,
        "leaves": {path: {"type": types[path], "digest": digests[path]} for path in types},
        "digest": combine(digests),
    }
    return meta | {"checksum": checksum(meta)}


def checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of all fields but `checksum` itself, in hex."""
    fields = {k: v for k, v in meta.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_meta(path: Any) -> dict[str, Any]:
    """Everything about the checkpoint at a path except its arrays.

    Raises:
      DamagedError: it is missing or not what was written.
      ValueError: a newer version of maxmars wrote it.
    """
    if not (path / "meta").is_dir():
        raise DamagedError("it is not complete: there is no meta in it")
    try:
        # Orbax wrote this file, but is not asked to read it: it would need its own index for that.
        meta = json.loads((path / "meta" / "data.json").read_text())
    except Exception as error:
        raise damage("meta", error) from error
    if not isinstance(meta, dict) or meta.get("checksum") != checksum(meta):
        raise DamagedError("meta does not agree with its checksum")
    if meta["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format {meta['format_version']} and maxmars {maxmars.__version__} reads "
            f"up to {FORMAT_VERSION}; use the version of maxmars that wrote it, or a newer one."
        )
    return meta


def read_metrics(path: Any) -> dict[str, float]:
    """The metrics that were stored with a checkpoint; none if they cannot be read."""
    try:
        return read_meta(path).get("metrics", {})
    except (DamagedError, ValueError):
        return {}


def damage(part: str, error: Exception) -> DamagedError:
    """An error of reading a part as damage; the error itself is raised if it may be none."""
    cause = root_cause(error)
    if isinstance(error, MemoryError) or any(text in cause for text in _NOT_DAMAGE):
        raise error
    return DamagedError(f"{part} cannot be read ({cause})")


def check_leaves(
    path: Any, meta: dict[str, Any], wanted: dict[str, str], config: TrainConfig | None
) -> None:
    """Refuse a checkpoint of another model: older ones of the same run would not fit either.

    Args:
      path: of the checkpoint, for the message.
      meta: its contents.
      wanted: leaf path -> type, as `leaf_types` says.
      config: the configuration of the run, whose differences are named.

    Raises:
      ValueError: names, shapes or types differ.
    """
    saved = {name: leaf["type"] for name, leaf in meta["leaves"].items()}
    if saved == wanted:
        return
    names = [name for name in {**wanted, **saved} if saved.get(name) != wanted.get(name)]
    leaf = names[0]
    text = (
        f"the checkpoint {path} does not fit this configuration: {len(names)} arrays differ, first "
        f"{leaf}, which is {saved.get(leaf, 'absent')} there and {wanted.get(leaf, 'absent')} here"
    )
    rows = differences(from_dict(meta["config"]), config) if config is not None else []
    if rows:
        changed = (f"{name} is {old} there and {new} here" for name, old, new in rows[:8])
        text += f" ({'; '.join(changed)})"
    raise ValueError(f"{text}. Use the configuration it was written with, or another directory.")
