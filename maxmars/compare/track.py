"""Check receipts by repeating their cells, and rank them on a board."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxmars.checkpoint.environment import changes_since, environment
from maxmars.compare.cells import MAY_DIFFER, CellResult, describe_setting
from maxmars.compare.curves import Curve, Line
from maxmars.compare.figures import draw_losses, require_matplotlib
from maxmars.compare.receipt import Receipt, place_code
from maxmars.compare.run import find_start, run_cell
from maxmars.compare.statistics import Interval, mean_interval
from maxmars.compare.tables import markdown_table
from maxmars.config import (
    PythonSourcesConfig,
    SoapConfig,
    TokenShardsConfig,
    TrainConfig,
    differences,
)
from maxmars.config.numbers import short
from maxmars.distributed import sharding
from maxmars.distributed.files import json_number, write_json, write_text

EARLY_STEPS, EARLY_TOLERANCE = 20, 1e-3
"""In so many first steps the training losses on another machine may differ by these nats; later
ones are not judged, since rounding grows. Under SOAP it does so at once."""
LOSS_TOLERANCE = 0.02
"""Nats by which a repeated final loss may differ: rounding grows over a run, and moved the final
losses of cells by up to 0.009 from one mesh to another."""
CURVE_TOLERANCE = 0.05
"""The same of evaluations before the last one, when the learning rate is higher."""
MARGIN = 0.004
"""A target counts as reached if (target - mean) times the root of the number of seeds is at least
this many nats, as in the speedruns of modded-nanogpt."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A cell of a receipt that was computed again."""

    seed: int
    steps: int
    is_equal: bool
    """Whether all its losses, and the end if it was reached, are equal bit by bit."""
    difference: float
    """The largest difference of its first training losses and the validation losses, in nats."""
    problem: str | None
    """Why it does not confirm the receipt; None if it does."""


def verify(
    receipt: Receipt,
    scratch: Path,
    *,
    num_cells: int = 1,
    steps: int | None = None,
    data_path: str | None = None,
    code: Path | None = None,
    log: Callable[[str], None],
) -> list[Repeated]:
    """Compute cells of a receipt again, and compare digests and losses.

    Args:
      receipt: see `receipt.read_receipt`.
      scratch: an empty directory for the runs.
      num_cells: how many, in the order of their seeds.
      steps: only so many first steps of each; None is all of them.
      data_path: directory of the tokens here; None is that in the receipt.
      code: directory for Python files of the receipt; see `receipt.place_code`.
      log: gets a line on what differs from the machine of the receipt, code, versions and devices,
        and one for each cell.

    Raises:
      ValueError: the receipt has fewer cells, its data is not read from a directory, its code
        should be read first, or model, data and mesh do not fit together.
      FileNotFoundError: there is no data.
      KeyboardInterrupt: a signal stopped a run.
    """
    if num_cells > len(receipt.cells):
        raise ValueError(f"--cells {num_cells}: the receipt has {len(receipt.cells)} cells.")
    config = place_code(receipt, code)
    if data_path is not None:
        if not isinstance(config.data, TokenShardsConfig):
            raise ValueError(f"--data {data_path}: the receipt's tokens are not read from a path.")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data_path))
    here = environment(sharding.training_mesh(config))
    if changes := changes_since(receipt.cells[0].environment, here, devices=True):
        log(f"changed since the receipt: {', '.join(changes)}")
    found = []
    for theirs in receipt.cells[:num_cells]:
        own = dataclasses.replace(config, seed=theirs.cell.seed)
        found.append(_repeat(theirs, own, scratch, steps))
        log(describe(found[-1]))
        if found[-1].problem is not None:
            break
    return found


def describe(repeated: Repeated) -> str:
    """One line on a cell."""
    text = f"seed {repeated.seed}, {repeated.steps:,} steps: "
    if repeated.problem is not None:
        return f"{text}REFUSED, {repeated.problem}"
    if repeated.is_equal:
        return f"{text}equal bit by bit"
    return f"{text}equal up to rounding (losses differ by at most {repeated.difference:.1e})"


def _repeat(theirs: CellResult, config: TrainConfig, scratch: Path, steps: int | None) -> Repeated:
    weights, tokens = find_start(config)

    def repeated(difference: float, problem: str | None, *, is_equal: bool = False) -> Repeated:
        return Repeated(
            seed=theirs.cell.seed,
            steps=num_steps,
            is_equal=is_equal,
            difference=difference,
            problem=problem,
        )

    num_steps = 0
    if weights != theirs.initial_weights:
        return repeated(math.inf, f"it starts from other weights, digest {weights}.")
    if tokens != theirs.tokens:
        problem = f"the tokens are other ones, digest {tokens}."
        python, own = theirs.environment.get("python"), platform.python_version()
        if isinstance(config.data, PythonSourcesConfig) and python != own:
            problem += f" They are the sources of Python {python}, and this is Python {own}."
        return repeated(math.inf, problem)
    num_steps = min(steps or config.num_steps, config.num_steps)
    cut = config
    if num_steps < config.num_steps:
        # A run that is shorter than its warmup never comes to the decay.
        decay = max(config.decay_steps, config.schedule.warmup_steps)
        schedule = dataclasses.replace(config.schedule, decay_steps=decay)
        every = dataclasses.replace(config.eval, every=num_steps)
        cut = dataclasses.replace(config, num_steps=num_steps, schedule=schedule, eval=every)
    # Nothing that the receipt says is a part of the path.
    ours = run_cell(theirs.cell, cut, scratch / str(theirs.cell.seed), (weights, tokens))
    if ours is None:
        raise KeyboardInterrupt
    logged = dict(theirs.train_losses)
    pairs = {step: (logged[step], loss) for step, loss in ours.train_losses if step in logged}
    # A run also logs its last step, which in the receipt's run was one of many.
    lacks = any(step not in logged for step, _ in ours.train_losses if step < num_steps)
    if lacks or not pairs:
        return repeated(math.inf, "the receipt lacks training losses of these steps.")
    early = max(_apart(*pair) for step, pair in pairs.items() if step <= EARLY_STEPS)
    is_equal, final, along = not any(_apart(*pair) for pair in pairs.values()), 0.0, 0.0
    is_same_run = is_equal  # its evaluations cannot be others
    if num_steps == config.num_steps:
        final, along = _apart(theirs.loss, ours.loss), _curves_apart(theirs.curve, ours.curve)
        is_same_end = theirs.final_state == ours.final_state
        is_same_run |= is_same_end
        is_equal &= not final and not along and is_same_end
    problem, goes_apart = None, not early <= EARLY_TOLERANCE
    # Which basis SOAP takes where eigenvalues are equal depends on rounding, and so do its updates.
    is_judged_whole = isinstance(config.optimizer, SoapConfig) and math.isfinite(early)
    if goes_apart and not is_judged_whole:
        problem = f"a training loss differs by {early:.2g} nats, more than {EARLY_TOLERANCE:g}."
    elif goes_apart and num_steps < config.num_steps:
        problem = (
            f"a training loss differs by {early:.2g} nats. Rounding moves SOAP so far at once that "
            "on another machine only whole runs are judged: leave out --steps."
        )
    elif not final <= LOSS_TOLERANCE:
        problem = f"the final loss differs by {final:.2g} nats, more than {LOSS_TOLERANCE:g}."
    elif not along <= CURVE_TOLERANCE:
        problem = f"a validation loss differs by {along:.2g} nats, more than {CURVE_TOLERANCE:g}."
    elif is_same_run and not max(final, along) <= EARLY_TOLERANCE:
        far = max(final, along)
        problem = f"the run is equal bit by bit, but a validation loss differs by {far:.2g} nats."
    return repeated(max(early, final, along), problem, is_equal=is_equal)


def _curves_apart(theirs: Curve | None, ours: Curve | None) -> float:
    """The largest difference of two curves; infinite where they have other points."""
    if theirs is None or ours is None:
        return 0.0 if theirs is ours else math.inf
    if (theirs.loss_of, theirs.tokens) != (ours.loss_of, ours.tokens):
        return math.inf
    return max(map(_apart, theirs.losses, ours.losses), default=0.0)


def _apart(theirs: float, ours: float) -> float:
    """The difference of two losses: 0 of two that both are no numbers, or the same infinity, and
    infinite where one of them is a number only."""
    if theirs == ours or (math.isnan(theirs) and math.isnan(ours)):
        return 0.0
    return math.inf if math.isnan(theirs - ours) else abs(theirs - ours)


# --- the board ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A receipt on the board."""

    path: str
    receipt: Receipt
    loss: Interval
    """Over the seeds, nats a token."""
    reached: bool | None
    """Whether the mean is below the target by more than chance; None without a target."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Entries whose losses are measured on the same thing: model, data, batch and evaluation."""

    entries: tuple[Entry, ...]
    """The best first."""
    target: float | None

    @property
    def title(self) -> str:
        """What all entries share."""
        first = self.entries[0].receipt
        config, tokens = first.config, first.config.tokens_per_step
        steps = "" if self.target is not None else f"{config.num_steps:,} steps of "
        return (
            f"{short(first.num_parameters)} parameters, {steps}{tokens:,} tokens a step, "
            f"tokens {first.cells[0].tokens[:12]}"
        )


def make_board(receipts: Mapping[str, Receipt], target: float | None = None) -> list[Division]:
    """Sort receipts into divisions, and rank each.

    Args:
      receipts: by path.
      target: a validation loss. The entries whose final losses reach it rank by their number of
        steps, which then may differ within a division; without a target all rank by mean loss.
    """
    groups: list[list[Entry]] = []
    any_steps = target is not None
    for path, receipt in receipts.items():
        losses, reached = receipt.losses, None
        if target is not None:
            reached = (target - sum(losses) / len(losses)) * math.sqrt(len(losses)) >= MARGIN
        entry = Entry(path=path, receipt=receipt, loss=mean_interval(losses), reached=reached)
        own = [
            g for g in groups if all(_is_same_division(e.receipt, receipt, any_steps) for e in g)
        ]
        if own:
            own[0].append(entry)
        else:
            groups.append([entry])

    def rank(entry: Entry) -> tuple[bool, float, float]:
        steps = float(entry.receipt.config.num_steps) if entry.reached else 0.0
        return entry.reached is False, steps, entry.loss.mean

    return [Division(entries=tuple(sorted(group, key=rank)), target=target) for group in groups]


def _is_same_division(first: Receipt, second: Receipt, any_steps: bool) -> bool:
    """Whether two receipts are of the same model, tokens, batch and evaluation."""
    ignored = (*MAY_DIFFER, "seed", "data.path", "data.verify", "mesh.")
    # Of the evaluations the last one counts.
    ignored = (*ignored, "eval.every", "eval.batch_size", "eval.hellaswag_")
    ignored = (*ignored, "num_steps") if any_steps else ignored
    rows = differences(first.config, second.config)
    if not all(name.startswith(ignored) for name, _, _ in rows):
        return False
    data, others = ({c.data for c in r.cells if c.data is not None} for r in (first, second))
    if data and others and data != others:
        return False
    pythons, theirs = ({c.environment.get("python") for c in r.cells} for r in (first, second))
    if isinstance(first.config.data, PythonSourcesConfig) and pythons != theirs:
        return False
    # Their digests are those of the first and the last batch.
    tokens = {cell.cell.seed: cell.tokens for cell in first.cells}
    return first.config.num_steps != second.config.num_steps or all(
        tokens.get(cell.cell.seed, cell.tokens) == cell.tokens for cell in second.cells
    )


def write_board(divisions: Sequence[Division], directory: Path) -> None:
    """Write `board.md`, `board.json` and a PNG of the losses of each division.

    Raises:
      ImportError: matplotlib is not installed.
    """
    require_matplotlib()
    blocks, fields = ["# Board"], []
    for number, division in enumerate(divisions, 1):
        blocks += [f"## {division.title}", _division_table(division)]
        names = [entry.receipt.name for entry in division.entries]
        lines = [
            Line(name=name if names.count(name) == 1 else entry.path, curves=curves)
            for name, entry in zip(names, division.entries, strict=True)
            if (curves := tuple(c.curve for c in entry.receipt.cells if c.curve is not None))
        ]
        picture = directory / f"board-{number}.png"
        if draw_losses(lines, picture, against="tokens"):
            blocks.append(f"![validation loss against tokens]({picture.name})")
        fields.append(
            {
                "division": division.title,
                "target": division.target,
                "entries": [_entry_fields(entry) for entry in division.entries],
            }
        )
    blocks.append(
        "`maxmars track verify` repeats the losses. The name of an optimizer and the time of a "
        "step are what the author of the receipt says."
    )
    write_text(directory / "board.md", "\n\n".join(blocks) + "\n")
    write_json(directory / "board.json", fields)


def _division_table(division: Division) -> str:
    columns = ["optimizer", "loss (95%)", "seeds", "steps", "setting", "step", "receipt"]
    columns += [] if division.target is None else [f"reached {division.target:g}"]
    rows = []
    for entry in division.entries:
        receipt, first, loss = entry.receipt, entry.receipt.cells[0], entry.loss
        text = f"{loss.mean:.4f}"
        if loss.low is not None and loss.high is not None:
            text += f" ± {(loss.high - loss.low) / 2:.4f}"
        row = [receipt.name, text, str(len(receipt.cells)), f"{receipt.config.num_steps:,}"]
        row += [describe_setting(first.cell.setting).replace(",", ", ")]
        row += ["" if first.step_time_s is None else f"{1000 * first.step_time_s:.1f} ms"]
        row += [entry.path]
        row += [] if entry.reached is None else ["yes" if entry.reached else "no"]
        rows.append(row)
    return markdown_table(columns, rows)


def _entry_fields(entry: Entry) -> dict[str, Any]:
    receipt, first = entry.receipt, entry.receipt.cells[0]
    return {
        "name": receipt.name,
        "receipt": entry.path,
        "loss": dataclasses.asdict(entry.loss) | {"mean": json_number(entry.loss.mean)},
        "losses": list(map(json_number, receipt.losses)),
        "num_steps": receipt.config.num_steps,
        "reached": entry.reached,
        "setting": dict(first.cell.setting),
        "step_time_s": first.step_time_s,
        "environment": dict(first.environment),
    }
