"""The lines of `receipts.jsonl` that are whole; `maxmars.train.receipts` says what they mean."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from maxmars.distributed.files import Workdir, read_json_lines

FILE = "receipts.jsonl"
Receipt = dict[str, Any]


def hash_of(receipt: Receipt) -> str:
    """SHA-256, in hex, over all fields of a receipt but `hash` itself."""
    fields = {name: value for name, value in receipt.items() if name != "hash"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_receipts(workdir: Workdir, *, repair: bool = False) -> list[Receipt]:
    """The lines of `<workdir>/receipts.jsonl` whose hash is right; none if there is no file.

    For `repair` see `files.read_json_lines`.
    """

    def is_sound(line: Receipt) -> bool:
        has_all = line.keys() >= {"kind", "digest", "metrics", "previous", "above"}
        if line.get("kind") == "began":
            has_all &= line.keys() >= {"session", "data"}
            has_all &= type(line.get("batch_size")) is int
            has_all &= isinstance(line.get("environment"), dict)
            has_all &= isinstance(line.get("own_code", {}), dict)  # older ones have none
        numbers = (line.get("step"), line.get("position"))
        has_all &= all(type(number) is int for number in numbers)
        return has_all and line.get("hash") == hash_of(line)

    return read_json_lines(workdir / FILE, is_sound, repair=repair)


def recorded_code(workdir: Workdir) -> dict[str, str | None]:
    """SHA-256, in hex, of the user's own files that the last session of a run ran with, by
    `FILE.py:NAME`; see `user_code.text_digests`. Empty for a run without this record."""
    began = [receipt for receipt in read_receipts(workdir) if receipt["kind"] == "began"]
    return began[-1].get("own_code", {}) if began else {}
