"""The lines of a run's `journal.jsonl`, which `maxmars.train.journal` writes and explains.

This much stands below training: whoever runs a kept file of the user's own asks first which text
the run recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from maxmars.config import TrainConfig, from_dict
from maxmars.distributed.files import Workdir, read_json_lines
from maxmars.distributed.workdir import JOURNAL

Line = dict[str, Any]


def hash_of(line: Line) -> str:
    """SHA-256, in hex, of a line as it was written; the next line holds it as `before`."""
    return hashlib.sha256(json.dumps(line).encode()).hexdigest()


def read_journal(workdir: Workdir) -> list[Line]:
    """The lines of `<workdir>/journal.jsonl`; none if there is no file.

    Raises:
      ValueError: a session was steered by options of `train`, as before there was `rewound`.
    """
    lines = read_json_lines(workdir / JOURNAL, "kind", "step", "seconds", "before")
    for line in lines:
        if line.get("order"):
            commit = (line["environment"].get("git_commit") or "unknown").removesuffix("-dirty")
            raise ValueError(
                f"{workdir / JOURNAL}: the session that began at step {line['step']} was steered "
                "by --rewind, --skip-examples or --new-optimizer-state of `train`, which are no "
                f"more. Use the run with the code of commit {commit}, or start a new one from its "
                f"weights with --init-from {workdir} and another --workdir."
            )
    return lines


def untold(workdir: Workdir, meta: Mapping[str, Any]) -> str | None:
    """What a checkpoint says of itself, in its `meta`, and the journal does not: the name of a
    field. None if they agree, or the line whose hash the checkpoint holds is not there."""
    lines = {hash_of(line): line for line in read_json_lines(workdir / JOURNAL, "kind", "before")}
    saved = began = lines.get(meta.get("journal") or "")
    while began is not None and began["kind"] != "began":
        began = lines.get(began["before"])  # which was above it when it was written
    told = {} if began is None else {"data_digest": began["data"], "config": began["config"]}
    if saved is not None:
        told |= {"data_position": saved["position"]}
        told |= {name: saved[name] for name in ("step", "digest", "tokens")}
    return next((name for name in told if told[name] != meta[name]), None)


def config_of(began: Line) -> TrainConfig:
    """The config of a session, by the line that it began with."""
    return from_dict(began["config"])
