"""Steering a run by hand: back to an older checkpoint, past examples that do harm, or on with a new
state of the optimizer.

An order is carried out once. The line `began` of the session that does so holds it, so that the
same command, which a cluster may start again and again, continues the run from there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxmars.checkpoint import read
from maxmars.checkpoint.journal import Line, read_journal
from maxmars.config import CheckpointConfig, EvalConfig, LogConfig, TrainConfig, to_dict
from maxmars.distributed import processes
from maxmars.distributed.files import Workdir
from maxmars.distributed.workdir import CHECKPOINTS
from maxmars.train.journal import began_in, lines_to, trajectory

Order = dict[str, Any]
"""A `Steering` as the journal has it: its fields; `from`, the step that the run had come to; and
`id`, which tells it from others."""


@dataclass(frozen=True, kw_only=True)
class Steering:
    """What is asked of a run that continues."""

    rewind: int | None = None
    """Step of the checkpoint to go back to; the newer ones are set aside."""
    skip_examples: int = 0
    """Training examples to leave out, from the step on where the run continues."""
    new_optimizer_state: bool = False
    """Make the optimizer's state anew, which may be another optimizer's; parameters, step, schedule
    and data go on."""

    def __bool__(self) -> bool:
        return self != Steering()


def open_order(workdir: Workdir, steering: Steering, config: TrainConfig) -> Order | None:
    """The order to carry out; None without one, and where the newest checkpoint came after it.

    Every process of the run calls, and gets the same.

    Args:
      workdir: directory of the run.
      steering: what is asked.
      config: as it was given: with another one the same may be asked again, whatever it says of
        the end, evaluations, checkpoints and the log.

    Raises:
      ValueError: there is no run to steer.
    """
    if not steering:
        return None
    try:
        newest = read(workdir / CHECKPOINTS)
    except FileNotFoundError:
        raise ValueError(
            "--rewind, --skip-examples and --new-optimizer-state steer a run that continues, but "
            f"{workdir} has no checkpoint; leave them out, or check --workdir."
        ) from None
    defining = dataclasses.replace(
        config, num_steps=1, eval=EvalConfig(), checkpoint=CheckpointConfig(), log=LogConfig()
    )
    fields = dataclasses.asdict(steering)
    text = json.dumps([fields, to_dict(defining)], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]

    def asked() -> str:
        lines = read_journal(workdir)
        began = began_in(trajectory(lines_to(lines, newest.journal) or ()))
        orders = [line["order"] for line in began if line.get("order")]
        if orders and orders[-1]["id"] == name:
            return ""
        # A session that was killed may have set the newer ones aside already.
        saved = (line["step"] for line in reversed(lines) if line["kind"] == "saved")
        return json.dumps({**fields, "id": name, "from": next(saved, newest.step)})

    text = processes.text_from_primary(asked)
    return json.loads(text) if text else None


def orders_in_words(chain: Sequence[Line]) -> list[str]:
    """The orders that were carried out on a trajectory, each in a line."""
    orders = []
    for line in began_in(chain):
        if order := line.get("order"):
            told = [f"at step {line['step']:,}"]
            if order["rewind"] is not None:
                told.append(f"back from step {order['from']:,}")
            if order["skip_examples"]:
                start = line["position"] - order["skip_examples"]
                told.append(f"examples {start:,} to {line['position']:,} left out")
            if order["new_optimizer_state"]:
                told.append("a new state of the optimizer")
            orders.append(", ".join(told))
    return orders
