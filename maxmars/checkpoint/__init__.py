"""Checkpoints that survive what happens to disks and processes.

A run's checkpoints are `<directory>/<step>/`, each committed by one rename (on `gs://`, by writing
`commit_success.txt` last):

    state/           the arrays as nested dicts of plain keys (`params/h/...`), in Orbax's format
    meta/data.json   step, data position, seed, metrics, configuration, environment, each leaf's
                     type and digest

Orbax notices a missing file but not a flipped bit, and does not go back to an older checkpoint.
Restoring therefore recomputes the digests, and goes from the newest checkpoint to the oldest until
one agrees. Damaged ones that it passed are renamed to `<step>.damaged`; nothing deletes those. One
run writes to a directory at a time, which a lock ensures; the readers (`load_model` and
other functions) change nothing in it.
"""

from maxmars.checkpoint.checkpointer import Checkpointer
from maxmars.checkpoint.directory import find, list_steps
from maxmars.checkpoint.parameters import (
    LoadedModel,
    StoredModel,
    load_model,
    save_params,
    stream_model,
)
from maxmars.checkpoint.restore import (
    Restored,
    Saved,
    load_config,
    load_digests,
    load_leaf_types,
    load_params,
    load_parts,
)

__all__ = [
    "Checkpointer",
    "LoadedModel",
    "Restored",
    "Saved",
    "StoredModel",
    "find",
    "list_steps",
    "load_config",
    "load_digests",
    "load_leaf_types",
    "load_model",
    "load_params",
    "load_parts",
    "save_params",
    "stream_model",
]
