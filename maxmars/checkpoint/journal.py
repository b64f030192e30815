"""The lines of a run's `journal.jsonl`, which `maxmars.train.journal` writes and explains.

This much stands below training: whoever runs a kept file of the user's own asks first which text
the run recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from maxmars.config import TrainConfig, from_dict
from maxmars.config.user_code import Source, with_sources
from maxmars.distributed.files import Workdir, read_json_lines
from maxmars.distributed.workdir import JOURNAL, MODEL_SOURCE, OLD_RECEIPTS, OPTIMIZER_SOURCE

Line = dict[str, Any]


def hash_of(line: Line) -> str:
    """SHA-256, in hex, of a line as it was written; the next line holds it as `before`."""
    return hashlib.sha256(json.dumps(line).encode()).hexdigest()


def read_journal(workdir: Workdir) -> list[Line]:
    """The lines of `<workdir>/journal.jsonl`; none if there is no file."""
    return read_json_lines(workdir / JOURNAL, "kind", "step", "seconds", "before")


def config_of(began: Line) -> TrainConfig:
    """The config of a session, by the line that it began with."""
    code = began.get("own_code", {})  # of before the config held the digests
    return with_recorded(from_dict(began["config"]), code)


def recorded_code(workdir: Workdir) -> dict[str, str | None]:
    """SHA-256, in hex, of the user's own files in a run of an older maxmars, whose configs did not
    hold them: by `FILE.py:NAME` where its last session recorded them, else by the name of the file
    that the run keeps."""
    folders = [workdir / folder for folder in (MODEL_SOURCE, OPTIMIZER_SOURCE)]
    kept = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    code: dict[str, str | None] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in kept}
    lines = [*read_json_lines(workdir / OLD_RECEIPTS, "kind"), *read_journal(workdir)]
    for line in lines:
        code |= line.get("own_code", {})
    return code


def with_recorded(config: Any, code: Mapping[str, str | None]) -> Any:
    """A config of an older maxmars with the digests of the user's own files, which were recorded by
    `FILE.py:NAME`, by path, or by name."""

    def recorded(source: Source) -> Source:
        name = source.file.rpartition("/")[2]
        digest = code.get(f"{name}:{source.function}") or code.get(source.file) or code.get(name)
        return source if source.sha256 else dataclasses.replace(source, sha256=digest)

    return with_sources(config, recorded)
