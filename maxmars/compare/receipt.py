"""Receipts of results: one file a contender, with which anybody can repeat what a comparison found.

`receipt-CONTENDER.json` holds the config at the best setting, each seed's digests of first weights
and tokens, its losses while training and in validation, the digest of its end, how the setting was
found, and versions and devices. Python files that the config names, such as a model of the user's
own, lie in it as text, each at a place that begins with its digest. So the same code has the same
name in every receipt, wherever it was. `track.py` repeats its cells.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maxmars
from maxmars.compare.cells import (
    CellResult,
    Setting,
    cell_from_json,
    cell_to_json,
    check_code,
    read_results,
    stored_code,
)
from maxmars.compare.grids import with_values
from maxmars.compare.search import results_at
from maxmars.compare.summary import Outcome, Summary
from maxmars.config import GPT2Config, TrainConfig, from_dict, to_dict
from maxmars.config.load import named_configs
from maxmars.config.user_code import sources_in, split_source, with_sources
from maxmars.distributed.files import json_number, read_json_object, write_json
from maxmars.model.language_model import num_parameters

_FORMAT = 1
_HASH = "sha256"
_PLACE = re.compile(r"([0-9a-f]{16})/[^/\\]+\.py")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a contender of a comparison reached at its best setting."""

    name: str
    config: TrainConfig
    """At the best setting; its seed is that of the first cell. Functions of the user's own are
    named by the places of `sources`; see `place_code`."""
    num_parameters: int
    cells: tuple[CellResult, ...]
    """One a seed."""
    tuning: Mapping[str, Any]
    """How the setting was found: `fields`, `budget`, and what was `tried`, with losses by seed."""
    sources: Mapping[str, str]
    """Text of the Python files that the config names, by place."""

    @property
    def losses(self) -> list[float]:
        """Final validation losses in nats a token, by seed; infinite where a run diverged."""
        return [cell.loss for cell in self.cells]


def write_receipts(summary: Summary, workdir: Path) -> list[Path]:
    """Write a receipt for each contender that has a best setting; returns their paths.

    A file of the user's own that is gone or another one since its runs leaves its contenders
    without one.
    """
    paths, code = [], stored_code(workdir)
    results = read_results(summary.comparison, workdir)
    for outcome in summary.outcomes:
        if outcome.best is not None:
            setting = outcome.best.setting
            cells = results_at(outcome.contender, setting, summary.comparison, results)
            path = workdir / f"receipt-{outcome.contender.name}.json"
            try:
                check_code(outcome.contender, code, workdir)
                write_json(path, _fields(outcome, setting, cells, summary))
            except FileNotFoundError as error:
                _LOGGER.warning("no %s is written: %s is gone", path.name, error.filename)
            except ValueError as error:
                _LOGGER.warning("no %s is written: %s", path.name, error)
            else:
                paths.append(path)
    return paths


def read_receipt(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no receipt, of another format, was changed after it was written, or says
        two things that do not agree.
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
        config = from_dict(fields["config"])
        # The code of a model would run to count its parameters. Before receipts held code and the
        # number, their models were all GPT-2.
        is_ours = isinstance(config.model, GPT2Config)
        receipt = Receipt(
            name=fields["name"],
            config=config,
            num_parameters=num_parameters(config.model) if is_ours else fields["num_parameters"],
            cells=tuple(map(cell_from_json, fields["cells"])),
            tuning=fields["tuning"],
            sources=fields.get("sources", {}),
        )
        _check(receipt)
        return receipt
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); get it anew from whoever made it.") from (
            error
        )


def place_code(receipt: Receipt, directory: Path | None) -> TrainConfig:
    """The receipt's config with its Python files where they lie on this machine.

    A file that comes with maxmars is taken from there. Others are written to `directory`, so that
    they can be read before they run.

    Args:
      receipt: any.
      directory: for its other files; None if there may be none.

    Raises:
      ValueError: other files are not in `directory` yet; now they are.
    """
    folder = next(iter(named_configs().values())).parent
    known = {path.read_bytes(): path for path in folder.rglob("*.py")}
    places: dict[str, Path] = {}
    written = []
    for place, text in receipt.sources.items():
        content = _bytes(text)
        if content in known:
            places[place] = known[content]
            continue
        if directory is None:
            raise ValueError(
                f"the receipt carries {place.partition('/')[2]}, which does not come with maxmars "
                "and would be run: name a directory by --code DIR, where it is written for you to "
                "read first."
            )
        path = places[place] = directory / place
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            written.append(path)
    if written:
        raise ValueError(
            f"the receipt's code is now in {', '.join(map(str, written))}; read it, then give the "
            "same command again, which runs it."
        )

    def here(source: str) -> str:
        place, _, name = source.rpartition(":")
        return f"{places[place]}:{name}"

    return with_sources(receipt.config, here)


def _with_code(config: TrainConfig) -> tuple[TrainConfig, dict[str, str]]:
    """A config that names its Python files by their places in a receipt, and their texts."""
    texts = {}

    def placed(source: str) -> str:
        path, name = split_source(source)
        text = path.read_bytes().decode(errors="surrogateescape")
        place = f"{_digest(text)}/{path.name}"
        texts[place] = text
        return f"{place}:{name}"

    return with_sources(config, placed), texts


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _digest(text: str) -> str:
    return hashlib.sha256(_bytes(text)).hexdigest()[:16]


def _check(receipt: Receipt) -> None:
    """Check that all parts of a receipt are of one contender at one setting."""
    for source in sources_in(receipt.config):
        if source.rpartition(":")[0] not in receipt.sources:
            raise ValueError(f"it does not carry {source}")
    for place, text in receipt.sources.items():
        match = _PLACE.fullmatch(place)
        if match is None or not isinstance(text, str) or match[1] != _digest(text):
            raise ValueError(f"{place!r} is not the place of its text")
    seeds = [cell.cell.seed for cell in receipt.cells]
    are_numbers = seeds and all(type(seed) is int for seed in seeds)
    if not are_numbers or len(set(seeds)) < len(seeds) or receipt.config.seed != seeds[0]:
        raise ValueError(f"its cells have the seeds {seeds}, of which each may be there once")
    if not isinstance(receipt.name, str) or not isinstance(receipt.tuning, Mapping):
        raise ValueError("its name or its tuning is none")
    if type(receipt.num_parameters) is not int:
        raise ValueError(f"its number of parameters is {receipt.num_parameters!r}")
    for result in receipt.cells:
        cell, curve = result.cell, result.curve
        if not (math.isfinite(result.loss) or result.loss == math.inf):
            raise ValueError(f"the loss of seed {cell.seed} is {result.loss}")
        is_told = isinstance(result.environment, Mapping)
        texts = [result.initial_weights, result.tokens]
        texts += [] if result.data is None else [result.data]
        texts += [result.environment.get("python", "")] if is_told else []
        if not is_told or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"digests or environment of seed {cell.seed} are none")
        if result.step_time_s is not None and not isinstance(result.step_time_s, (int, float)):
            raise ValueError(f"the step time of seed {cell.seed} is {result.step_time_s!r}")
        if cell.contender != receipt.name:
            raise ValueError(f"a cell of {cell.contender!r} is in a receipt of {receipt.name!r}")
        if with_values(receipt.config, dict(cell.setting)) != receipt.config:
            raise ValueError(f"the setting {dict(cell.setting)} is not that of its config")
        if math.isfinite(result.loss) and (curve is None or curve.losses[-1:] != (result.loss,)):
            raise ValueError(f"the loss of seed {cell.seed} is not where its curve ends")


def _fields(
    outcome: Outcome, setting: Setting, cells: list[CellResult], summary: Summary
) -> dict[str, Any]:
    config = with_values(outcome.contender.config, dict(setting))
    placed, texts = _with_code(dataclasses.replace(config, seed=cells[0].cell.seed))
    fields = {
        "format": _FORMAT,
        "maxmars": maxmars.__version__,
        "name": outcome.contender.name,
        "config": to_dict(placed),
        "num_parameters": num_parameters(config.model),
        "sources": texts,
        "cells": list(map(cell_to_json, cells)),
        "tuning": {
            "fields": [grid.field for grid in outcome.contender.grids],
            "budget": summary.comparison.budget,
            "confirm": summary.comparison.confirm,
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
