"""`maxmars rewind`: take a run back to an older checkpoint, past examples that do harm, or on with
a new state of the optimizer.

One process appends a line `rewound` to the journal, and then sets the newer checkpoints aside, the
newest first; the next `train` goes on from the one that is left. Until the last of them is aside
the run is not rewound: after a kill in between, `train` goes on from the newest that is left, or
the same `maxmars rewind` does the rest. The line is in force until a later step is saved, however
often the run is started before that (`journal.rewound_to`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

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
    """Rewind a run that no process is training.

    Args:
      workdir: directory of the run, on a disk or `gs://`.
      to: step of a checkpoint, whose arrays are compared with their digests first. Newer ones are
        renamed to `STEP.rewound`; it may be the newest itself.
      skip_examples: training examples to leave out from there on.
      new_optimizer_state: the next session makes the optimizer's state anew, which may be another
        optimizer's; parameters, step, schedule and data go on.
      log: gets a line for each thing that is done.

    Returns:
      The command that trained the run last; None if it was started in Python.

    Raises:
      FileNotFoundError: there is no run, or no checkpoint of this step.
      ValueError: the checkpoint is damaged or of another version, or the run is being trained.
      OSError: the directory cannot be written to.
    """
    directory = resolve(workdir)
    checkpoints, named = find(directory) or (None, None)
    if checkpoints is None or named is not None:
        raise FileNotFoundError(f"{directory} is not the directory of a run with checkpoints.")
    directory = checkpoints.parent  # of the run, also where its checkpoints were named
    lock = acquire(checkpoints)
    try:
        checkpoint, lines = _sound(checkpoints, to), read_journal(directory)
        newer = [step for step in list_steps(checkpoints) if step > to]
        if newer or skip_examples or new_optimizer_state or rewound_to(lines, to):
            if (directory / WANDB).exists():  # so that its charts have one value a step
                set_aside(directory / WANDB, "rewound")
            line = Rewound(
                step=to,
                from_=next((line.step for line in lines[::-1] if isinstance(line, Saved)), to),
                digest=checkpoint.digest,
                position=checkpoint.data_position + skip_examples,
                skip_examples=skip_examples,
                new_optimizer_state=new_optimizer_state,
            )
            _append(directory, below(lines[-1] if lines else None, line, seconds={}))
            for step in newer[::-1]:
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


def _sound(checkpoints: Any, step: int) -> Checkpoint:
    def use(checkpoint: Checkpoint, skipped: Any) -> Checkpoint:
        check_arrays(checkpoint)
        return checkpoint

    return first_sound(checkpoints, use, step)


def _append(directory: Any, line: Line) -> None:
    """Write the journal with one line more, below one that a kill may have cut off."""
    text = read_text(directory / JOURNAL) or ""
    text += "\n" * (not text.endswith("\n") and bool(text))
    write_text(directory / JOURNAL, f"{text}{line.text}\n")


def rewinds_in_words(chain: Iterable[Line]) -> list[str]:
    """The rewinds of a trajectory, each in a line."""
    rewinds = []
    for line in chain:
        if isinstance(line, Rewound):
            back = f" from step {line.from_:,}" if line.from_ > line.step else ""
            told = [f"to step {line.step:,}{back}"]
            if line.skip_examples:
                start = line.position - line.skip_examples
                told.append(f"examples {start:,} to {line.position:,} left out")
            if line.new_optimizer_state:
                told.append("a new state of the optimizer")
            rewinds.append(", ".join(told))
    return rewinds
