"""Checkpoints that survive faults of disks and processes; `README.md` describes the format.

Orbax reads and writes the arrays. `digest` tells whether a bit of them has changed, `lock` lets one
run write at a time, `journal` is the history of a run, and `environment` its versions and devices.
"""

from maxmars.checkpoint.reader import (
    Checkpoint,
    Loaded,
    array_keys,
    find,
    first_sound,
    list_steps,
    load,
    load_arrays,
    load_params,
    read,
)
from maxmars.checkpoint.writer import Checkpointer

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Loaded",
    "array_keys",
    "find",
    "first_sound",
    "list_steps",
    "load",
    "load_arrays",
    "load_params",
    "read",
]
