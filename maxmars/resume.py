"""Which config a run continues with: what may change between its parts, and what defines it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from maxmars.checkpoint import load_config
from maxmars.config import TrainConfig, differences

# What may change when a run continues; everything else defines the run.
_MAY_CHANGE = (
    "name",
    "num_steps",
    "num_microbatches",
    "schedule.decay_steps",
    "data.verify",
    "data.cache_dir",
    "model.remat",
    "model.scan_unroll",
    "mesh.",
    "eval.",
    "checkpoint.",
    "log.",
    "guard.max_skipped_in_a_row",
)


def stored_config(checkpoints: Path) -> TrainConfig | None:
    """The config of the newest checkpoint; None where there is nothing to continue.

    Raises:
      ValueError: there are checkpoints, but none can be read.
    """
    try:
        return load_config(checkpoints)
    except FileNotFoundError:
        return None


def continued_config(
    stored: TrainConfig, config: TrainConfig, workdir: Path, say: Callable[[str], None]
) -> TrainConfig:
    """The config to continue with: as asked for, but along the schedule of before.

    Args:
      stored: what the run was started or last continued with.
      config: what is asked for.
      workdir: of the run, for messages.
      say: prints a message.

    Raises:
      ValueError: a field that defines the run differs.
    """
    changed = [
        f"{name} ({old} there, {new} here)"
        for name, old, new in differences(stored, config)
        if not name.startswith(_MAY_CHANGE)
    ]
    if changed:
        raise ValueError(
            f"{workdir} holds another run: it differs in {', '.join(changed)}. "
            "Continue it with its own values, or choose another --workdir."
        )
    if config.schedule.decay_steps is None and config.decay_steps != stored.decay_steps:
        say(
            f"num_steps is now {config.num_steps}; the learning rate still follows the schedule "
            f"over {stored.decay_steps} steps (change it with --schedule.decay-steps)."
        )
        schedule = dataclasses.replace(config.schedule, decay_steps=stored.decay_steps)
        config = dataclasses.replace(config, schedule=schedule)
    return config
