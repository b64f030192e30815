"""Receipts of results: one file a contender, with which anybody can repeat what a comparison found.

`receipt-CONTENDER.json` holds the config at the best setting, each seed's digests of first weights
and tokens, its losses while training and in validation, the digest of its end, how the setting was
found, and versions and devices. `track.py` repeats its cells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maxmars
from maxmars.compare.cells import CellResult, Setting, cell_from_json, cell_to_json, read_results
from maxmars.compare.grids import with_values
from maxmars.compare.search import results_at
from maxmars.compare.summary import Outcome, Summary
from maxmars.config import TrainConfig, from_dict, to_dict
from maxmars.distributed.files import json_number, read_json_object, write_json

_FORMAT = 1
_HASH = "sha256"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a contender of a comparison reached at its best setting."""

    name: str
    config: TrainConfig
    """At the best setting; its seed is that of the first cell."""
    cells: tuple[CellResult, ...]
    """One a seed."""
    tuning: Mapping[str, Any]
    """How the setting was found: `fields`, `budget`, and what was `tried`, with losses by seed."""

    @property
    def losses(self) -> list[float]:
        """Final validation losses in nats a token, by seed; infinite where a run diverged."""
        return [cell.loss for cell in self.cells]


def write_receipts(summary: Summary, workdir: Path) -> list[Path]:
    """Write a receipt for each contender that has a best setting; returns their paths."""
    paths = []
    results = read_results(summary.comparison, workdir)
    for outcome in summary.outcomes:
        if outcome.best is not None:
            setting = outcome.best.setting
            cells = results_at(outcome.contender, setting, summary.comparison, results)
            path = workdir / f"receipt-{outcome.contender.name}.json"
            write_json(path, _fields(outcome, setting, cells, summary))
            paths.append(path)
    return paths


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no receipt, of another format, or was changed after it was written.
    """
    fields = read_json_object(path)
    if not {"format", _HASH, "cells", "config", "name", "tuning"} <= fields.keys():
        raise ValueError(f"{path} is no receipt of `maxmars compare`; name a receipt-*.json.")
    if fields["format"] != _FORMAT:
        raise ValueError(
            f"{path} was written by maxmars {fields.get('maxmars')} in format {fields['format']}; "
            f"this version reads format {_FORMAT}."
        )
    if fields[_HASH] != _hash(fields):
        raise ValueError(
            f"{path} was changed after it was written: its hash is not that of its contents. Get "
            "it anew from whoever made it."
        )
    try:
        return Receipt(
            name=fields["name"],
            config=from_dict(fields["config"]),
            cells=tuple(map(cell_from_json, fields["cells"])),
            tuning=fields["tuning"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); get it anew from whoever made it.") from (
            error
        )


def _fields(
    outcome: Outcome, setting: Setting, cells: list[CellResult], summary: Summary
) -> dict[str, Any]:
    config = with_values(outcome.contender.config, dict(setting))
    fields = {
        "format": _FORMAT,
        "maxmars": maxmars.__version__,
        "name": outcome.contender.name,
        "config": to_dict(dataclasses.replace(config, seed=cells[0].cell.seed)),
        "cells": list(map(cell_to_json, cells)),
        "tuning": {
            "fields": [grid.field for grid in outcome.contender.grids],
            "budget": summary.comparison.budget,
            "tried": [
                {"setting": dict(tried), "losses": list(map(json_number, losses))}
                for tried, losses in outcome.losses.items()
            ],
        },
    }
    return fields | {_HASH: _hash(fields)}


def _hash(fields: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of everything but the hash itself.

    It finds damage and careless changes. Whoever changes a loss and writes the hash anew is found
    by repeating the cell.
    """
    text = json.dumps({k: v for k, v in fields.items() if k != _HASH}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
