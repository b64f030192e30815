"""The lines of a run's `journal.jsonl`, which `maxmars.train.journal` writes and explains.

This much stands below training: whoever runs a kept file of the user's own asks first which text
the run recorded.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from maxmars.distributed.files import Workdir, read_json_lines
from maxmars.distributed.workdir import JOURNAL, OLD_RECEIPTS

Line = dict[str, Any]


def hash_of(line: Line) -> str:
    """SHA-256, in hex, of a line as it was written; the next line holds it as `before`."""
    return hashlib.sha256(json.dumps(line).encode()).hexdigest()


def read_journal(workdir: Workdir) -> list[Line]:
    """The lines of `<workdir>/journal.jsonl`; none if there is no file."""
    return read_json_lines(workdir / JOURNAL, "kind", "step", "seconds", "before")


def recorded_code(workdir: Workdir) -> dict[str, str | None]:
    """SHA-256, in hex, of the user's own files that the last session of a run ran with, by
    `FILE.py:NAME`; see `user_code.text_digests`. Empty for a run without this record."""
    lines = [*read_json_lines(workdir / OLD_RECEIPTS, "kind"), *read_journal(workdir)]
    began = [line for line in lines if line["kind"] == "began"]
    return began[-1].get("own_code", {}) if began else {}
