"""Lies about a run, each of which `maxmars audit` must find: `soak.py` plants them in copies.

Each function changes a run's directory, with the help of another run of the same number of steps
and another seed, and returns a pattern that the words of `audit` must match.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from maxmars.checkpoint import list_steps

Rows = list[dict[str, Any]]


def _read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _change_a_loss(run: Path, chance: Random, change: Callable[[dict[str, Any]], Rows]) -> int:
    """Put `change` of a line in the place of one with a training loss; its step."""
    path = run / "metrics.jsonl"
    rows = _read(path)
    number = chance.choice([i for i, row in enumerate(rows) if "train/loss" in row])
    step = rows[number]["step"]
    rows[number : number + 1] = change(rows[number])
    _write(path, rows)
    return step


def edited_loss(run: Path, other: Path, chance: Random) -> str:
    _change_a_loss(run, chance, lambda row: [row | {"train/loss": row["train/loss"] - 1e-6}])
    return r"metrics\.jsonl is not what was recorded between steps"


def removed_metrics(run: Path, other: Path, chance: Random) -> str:
    _change_a_loss(run, chance, lambda row: [])
    return r"metrics\.jsonl is not what was recorded between steps"


def doubled_metrics(run: Path, other: Path, chance: Random) -> str:
    step = _change_a_loss(run, chance, lambda row: [row, row])
    return rf"metrics\.jsonl has the training loss of step {step} 2 times"


def swapped_checkpoint(run: Path, other: Path, chance: Random) -> str:
    """It is of the same step, of a run with another seed."""
    step = chance.choice(list_steps(run / "checkpoints"))
    shutil.rmtree(run / "checkpoints" / str(step))
    shutil.copytree(other / "checkpoints" / str(step), run / "checkpoints" / str(step))
    return rf"checkpoint of step {step} is not of this run|lacks the receipt of step {step}\b"


def renamed_checkpoint(run: Path, other: Path, chance: Random) -> str:
    """It is of another step of the same run."""
    one, another = chance.sample(list_steps(run / "checkpoints"), 2)
    shutil.rmtree(run / "checkpoints" / str(another))
    shutil.copytree(run / "checkpoints" / str(one), run / "checkpoints" / str(another))
    return rf"checkpoint of step {another} is not the one of its receipt"


def swapped_arrays(run: Path, other: Path, chance: Random) -> str:
    """The checkpoint says what it said, but the arrays are of a run with another seed."""
    step = chance.choice(list_steps(run / "checkpoints"))
    state = Path("checkpoints") / str(step) / "state"
    shutil.rmtree(run / state)
    shutil.copytree(other / state, run / state)
    return rf"checkpoint of step {step} is damaged"


def foreign_session(run: Path, other: Path, chance: Random) -> str:
    path = Path("sessions.jsonl")
    _write(run / path, [*_read(run / path), _read(other / path)[-1]])
    return r"sessions\.jsonl has a session of steps \d+ to \d+ without a receipt"


def foreign_receipts(run: Path, other: Path, chance: Random) -> str:
    path = Path("receipts.jsonl")
    _write(run / path, [*_read(run / path), *_read(other / path)])
    return r"receipts\.jsonl is not whole"


def edited_receipt(run: Path, other: Path, chance: Random) -> str:
    path = run / "receipts.jsonl"
    rows = _read(path)
    chance.choice(rows)["position"] += 8
    _write(path, rows)
    return r"receipts\.jsonl has lines \(1\) that cannot be read, or have a wrong hash"


def removed_receipt(run: Path, other: Path, chance: Random) -> str:
    path = run / "receipts.jsonl"
    rows = _read(path)
    del rows[chance.randrange(len(rows))]
    _write(path, rows)
    return r"receipts\.jsonl (is not whole|lacks the end of the session)"


LIES = (
    edited_loss,
    removed_metrics,
    doubled_metrics,
    swapped_checkpoint,
    renamed_checkpoint,
    swapped_arrays,
    foreign_session,
    foreign_receipts,
    edited_receipt,
    removed_receipt,
)
