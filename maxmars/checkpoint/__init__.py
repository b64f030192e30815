"""Checkpoints that survive accidents of disks and processes; `README.md` describes the format."""

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
