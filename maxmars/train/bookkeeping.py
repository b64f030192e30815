"""What a run writes into its working directory beside checkpoints, and what may stand in its way.

Damaged bookkeeping never stops a run. Damaged lines are set aside by `files.read_json_lines`;
`clear` does so with what is no file where a file belongs, or no directory where a directory does.
"""

from __future__ import annotations

import logging
import os

from maxmars.distributed.files import Workdir, is_remote, set_aside
from maxmars.eval.trained_model import MODEL_SOURCE

OPTIMIZER_SOURCE = "sources/optimizer"
"""Where a working directory keeps the file of an `OptaxConfig`."""

_LOGGER = logging.getLogger(__name__)

_FILES = (
    "config.json",
    "config_changes.jsonl",
    "data.json",
    "environment.json",
    "init_from.json",
    "metrics.jsonl",
    "parameters.txt",
    "receipts.jsonl",
    "sessions.jsonl",
    "summary.json",
    "wandb.json",
)
_SOURCES = (MODEL_SOURCE, OPTIMIZER_SOURCE)
_DIRECTORIES = ("logs", "skipped_steps", "sources", *_SOURCES, "tokenizer", "verified")
"""They hold files alone, but for `_SOURCES`."""


def clear(workdir: Workdir) -> None:
    """Rename to `NAME.damaged` what a run could not replace: a directory, a link to nowhere, or a
    file that cannot be read, where it keeps a file; no directory where it keeps one.

    Only the owner of the working directory calls, in the primary process.
    """
    if is_remote(workdir):
        return  # every name there is that of a file
    for name in _DIRECTORIES:
        folder = workdir / name
        if os.path.lexists(folder) and not folder.is_dir():
            _set_aside(folder)
    files = [workdir / name for name in _FILES]
    for name in _DIRECTORIES:
        files += sorted((workdir / name).glob("*"))
    for path in files:
        is_sound = path.is_file() and os.access(path, os.R_OK)
        is_known = path in [workdir / name for name in _SOURCES] or ".damaged" in path.name
        if os.path.lexists(path) and not is_sound and not is_known:
            _set_aside(path)


def _set_aside(path: Workdir) -> None:
    _LOGGER.warning("%s cannot be used; it is now %s", path, set_aside(path).name)
