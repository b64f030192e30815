"""Checkpoints that survive accidents of disks and processes; `README.md` describes the format."""

from maxmars.checkpoint.reader import (
    Checkpoint,
    Loaded,
    array_keys,
    find,
    list_steps,
    load,
    load_arrays,
    newest_sound,
    read,
)
from maxmars.checkpoint.writer import Checkpointer, save_params

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Loaded",
    "array_keys",
    "find",
    "list_steps",
    "load",
    "load_arrays",
    "newest_sound",
    "read",
    "save_params",
]
