"""Which config a run continues with: what may change on the way, and what defines the run.

Some fields may change freely. The others only on purpose, by their names in `--resume-overrides`,
and only while the arrays of the checkpoint still fit: no other model size, and no other optimizer.
Step, optimizer state and data go on where they were. The data position counts examples, so that
another batch size repeats and skips none; of other data, the first examples are never seen.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from maxmars import distributed
from maxmars.checkpoint import load_config, load_leaf_types
from maxmars.config import TrainConfig, differences, to_dict
from maxmars.digest import leaf_types
from maxmars.precision import with_compute_dtype
from maxmars.train_step import abstract_train_state
from maxmars.workdir import Workdir, append_line

_MAY_CHANGE = (
    "name",
    "num_steps",
    "num_microbatches",
    "schedule.decay_steps",
    "data.verify",
    "data.cache_dir",
    "model.attention",
    "model.remat",
    "model.scan_unroll",
    "mesh.",
    "eval.",
    "checkpoint.",
    "log.",
    "guard.max_skipped_in_a_row",
    "hang_timeout_s",
)

Row = tuple[str, Any, Any]
"""Dotted name of a field, its value before and now."""


def stored_config(checkpoints: Workdir, overrides: Sequence[str]) -> TrainConfig | None:
    """The config of the newest checkpoint; None where there is nothing to continue.

    Raises:
      ValueError: there are checkpoints, but none can be read; or there are none, but overrides.
    """
    try:
        return load_config(checkpoints)
    except FileNotFoundError:
        if overrides:
            raise ValueError(
                f"--resume-overrides {','.join(overrides)} is for a run that continues, but there "
                f"is no checkpoint in {checkpoints}; leave it out, or check --workdir."
            ) from None
        return None


def continued_config(
    stored: TrainConfig,
    config: TrainConfig,
    checkpoints: Workdir,
    *,
    mesh: Mesh,
    overrides: Sequence[str],
    say: Callable[[str], None],
) -> TrainConfig:
    """The config to continue with: as asked for, but along the schedule of before.

    Args:
      stored: what the run was started or last continued with.
      config: what is asked for; it fits the mesh.
      checkpoints: of the run.
      mesh: to continue on.
      overrides: dotted names of fields, or groups of fields, that change on purpose.
      say: prints a message.

    Raises:
      ValueError: a field that defines the run differs and is not in `overrides`, there is no field
        of such a name, or the checkpoint would not fit.
    """
    _check_names(stored, config, overrides)
    if config.model.compute_dtype == "auto":  # which was chosen when the run began
        config = with_compute_dtype(config, stored.model.compute_dtype)
    rows = [row for row in differences(stored, config) if not row[0].startswith(_MAY_CHANGE)]
    if rows:
        _check_changes(rows, config, checkpoints, mesh, overrides)
        changes = (f"{name} from {old} to {new}" for name, old, new in rows)
        say(f"changed on purpose: {', '.join(changes)}")
    if config.schedule.decay_steps is None and config.decay_steps != stored.decay_steps:
        say(
            f"num_steps is now {config.num_steps}; the learning rate still follows the schedule "
            f"over {stored.decay_steps} steps (change it with --schedule.decay-steps)."
        )
        schedule = dataclasses.replace(config.schedule, decay_steps=stored.decay_steps)
        config = dataclasses.replace(config, schedule=schedule)
    return config


def record_changes(workdir: Workdir, step: int, stored: TrainConfig, config: TrainConfig) -> None:
    """Append what changed at `step` to `<workdir>/config_changes.jsonl`, if anything did.

    Each continuation is a line: `step`, `time`, and `changed`, from field to its value before and
    now. One whose steps were lost before they were saved stays. Only the primary process writes.
    """
    rows = differences(stored, config)
    if rows and distributed.is_primary():
        changed = {name: [old, new] for name, old, new in rows}
        line = {"step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "changed": changed}
        append_line(workdir / "config_changes.jsonl", json.dumps(line, default=to_dict))


def _check_names(stored: TrainConfig, config: TrainConfig, overrides: Sequence[str]) -> None:
    known = {name: None for c in (stored, config) for name in _names(to_dict(c))}
    for name in overrides:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"--resume-overrides {name}: the config has no such field"
                f"{f' (did you mean {close[0]}?)' if close else ''}; name fields or their groups, "
                "such as optimizer.learning_rate,schedule."
            )


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of fields and groups in what `to_dict` returned."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        if key != "type":
            yield f"{prefix}{key}"
            if isinstance(child, dict | list):
                yield from _names(child, f"{prefix}{key}.")


def _covered(name: str, overrides: Sequence[str]) -> bool:
    return any(name == o or name.startswith(f"{o}.") for o in overrides)


def _described(rows: Sequence[Row]) -> str:
    return ", ".join(f"{name} ({old} there, {new} here)" for name, old, new in rows)


def _check_changes(
    rows: Sequence[Row],
    config: TrainConfig,
    checkpoints: Workdir,
    mesh: Mesh,
    overrides: Sequence[str],
) -> None:
    """Check that every change is on purpose, and that the arrays of the checkpoint still fit."""
    workdir = checkpoints.parent
    refused = [row for row in rows if not _covered(row[0], overrides)]
    misfit = _misfit(rows, config, checkpoints, mesh)
    if refused:
        problem = f"{workdir} holds another run: it differs in {_described(refused)}"
    elif misfit is not None:
        problem = f"--resume-overrides cannot change {_described(rows)}: {misfit}"
    else:
        return
    way_out = "Continue it with its own values, or choose another --workdir"
    names = [name for name, _, _ in rows]
    if misfit is None:
        wanted = ",".join([*overrides, *(name for name, _, _ in refused)])
        way_out += f", or change on purpose with --resume-overrides {wanted}"
    elif not any(name.startswith("model.") for name in names):
        way_out += f" and start there from its weights with --init-from {workdir}"
    raise ValueError(f"{problem}. {way_out}.")


def _misfit(
    rows: Sequence[Row], config: TrainConfig, checkpoints: Workdir, mesh: Mesh
) -> str | None:
    """Why the arrays of the newest checkpoint do not fit a config in which `rows` changed."""
    names = [name for name, _, _ in rows]
    if "optimizer" in names:
        return "that is another optimizer"  # which may have the same arrays
    if not any(name.startswith(("model.", "optimizer.")) for name in names):
        return None
    saved, wanted = load_leaf_types(checkpoints), leaf_types(abstract_train_state(config, mesh))
    wrong = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if not wrong:
        return None
    there, here = (types.get(wrong[0], "absent") for types in (saved, wanted))
    return f"{wrong[0]} is {there} there and {here} here"
