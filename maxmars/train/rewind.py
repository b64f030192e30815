"""`maxmars rewind`: go back to an older checkpoint, skip examples, or reset the optimizer's state.

One process appends a line `rewound` to the journal, and then sets the newer checkpoints aside, the
newest first. The next `train` continues from the newest one left. If a kill interrupts `rewind`,
`train` still continues from the newest checkpoint left, without a rewind, and the same `rewind`
does the rest. The line counts until a later step is saved, however often the run is started before
(`journal.rewound_to`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from etils import epath

from maxmars.checkpoint import Checkpoint, find, first_sound, list_steps
from maxmars.checkpoint.journal import (
    Line,
    Rewound,
    Saved,
    below,
    read_journal,
    rewound_to,
    session_starts,
)
from maxmars.checkpoint.lock import acquire
from maxmars.checkpoint.reader import check_arrays
from maxmars.distributed.files import read_text, resolve, set_aside, write_text
from maxmars.distributed.workdir import JOURNAL, WANDB


def rewind(
    workdir: str | os.PathLike[str],
    to: int,
    *,
    skip_examples: int = 0,
    new_optimizer_state: bool = False,
    log: Callable[[str], None] = print,
) -> str | None:
    """Rewind a run, which no process may be training.

    Args:
      workdir: directory of the run, on a disk or `gs://`.
      to: step of a checkpoint, also of the newest. Its arrays are compared with their digests.
        Newer checkpoints are renamed to `STEP.rewound`.
      skip_examples: number of training examples to leave out from that checkpoint on.
      new_optimizer_state: the next session starts from a new optimizer state, also of another
        optimizer. Parameters, step, schedule and data continue.
      log: gets a line for each change.

    Returns:
      The command that trained the run last; None if it was started in Python.

    Raises:
      FileNotFoundError: there is no run, or no checkpoint of this step.
      ValueError: the checkpoint is damaged or of another version, or the run is being trained.
      OSError: the directory cannot be written to.
    """
    checkpoints = find_run(workdir)
    directory = checkpoints.parent
    lock = acquire(checkpoints)
    try:
        checkpoint, lines = _read_checked(checkpoints, to), read_journal(directory)
        newer = [step for step in list_steps(checkpoints) if step > to]
        if newer or skip_examples or new_optimizer_state or rewound_to(lines, to):
            if (directory / WANDB).exists():  # a new run of W&B: charts have one value a step
                set_aside(directory / WANDB, "rewound")
            line = Rewound(
                step=to,
                # The newest save; its checkpoint may be set aside already, after a kill.
                from_=next((line.step for line in lines[::-1] if isinstance(line, Saved)), to),
                digest=checkpoint.digest,
                position=checkpoint.data_position + skip_examples,
                skip_examples=skip_examples,
                new_optimizer_state=new_optimizer_state,
            )
            _append(directory, below(lines[-1] if lines else None, line, seconds={}))
            for step in newer[::-1]:  # newest first: a kill then leaves a run that can continue
                target = set_aside(checkpoints / str(step), "rewound")
                log(f"checkpoint {step} is now {target.name}; delete it if you wish")
            log(f"{directory} is rewound {rewinds_in_words([line])[0]}")
        else:
            log(f"{directory} is at step {to:,} already")
    finally:
        if lock is not None:
            lock.release()
    began = session_starts(lines)
    return began[-1].command if began else None


def find_run(workdir: str | os.PathLike[str]) -> epath.Path:
    """The directory of a run's checkpoints, by its path or the run's; else FileNotFoundError."""
    directory = resolve(workdir)
    checkpoints, step = find(directory) or (None, None)
    if checkpoints is None or step is not None:
        raise FileNotFoundError(f"{directory} is not the directory of a run with checkpoints.")
    return checkpoints


def _read_checked(checkpoints: Any, step: int) -> Checkpoint:
    def use(checkpoint: Checkpoint, skipped: Any) -> Checkpoint:
        check_arrays(checkpoint)
        return checkpoint

    return first_sound(checkpoints, use, step)


def _append(directory: Any, line: Line) -> None:
    """Append a line to the journal, as one write of the whole file."""
    text = read_text(directory / JOURNAL) or ""
    text += "\n" * (not text.endswith("\n") and bool(text))  # a kill may have cut the last line
    write_text(directory / JOURNAL, f"{text}{line.text}\n")


def rewinds_in_words(chain: Iterable[Line]) -> list[str]:
    """The rewinds in a trajectory, in words."""
    rewinds = []
    for line in chain:
        if isinstance(line, Rewound):
            origin = f" from step {line.from_:,}" if line.from_ > line.step else ""
            parts = [f"to step {line.step:,}{origin}"]
            if line.skip_examples:
                start = line.position - line.skip_examples
                parts.append(f"examples {start:,} to {line.position:,} left out")
            if line.new_optimizer_state:
                parts.append("a new state of the optimizer")
            rewinds.append(", ".join(parts))
    return rewinds
