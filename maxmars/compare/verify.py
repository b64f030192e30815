"""Repeat a row of a comparison on any machine: the digest of its end first, then its losses.

A comparison's directory holds all that a repetition needs: configs, seeds, digests and losses, and
a copy of every Python file that a config names. A forged loss is found by computing it again.
Nothing shows what a directory leaves out, such as a seed that its author did not like.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from maxmars.checkpoint.environment import changes_since, environment
from maxmars.compare.cells import CellResult, with_kept_code
from maxmars.compare.curves import Curve
from maxmars.compare.run import find_start, run_cell
from maxmars.compare.summary import Summary, summarize
from maxmars.config import PythonSourcesConfig, SoapConfig, TokenShardsConfig, TrainConfig
from maxmars.distributed import sharding

EARLY_STEPS, EARLY_TOLERANCE = 20, 1e-3
"""In so many first steps the training losses on another machine may differ by these nats; later
ones are not judged, since rounding grows. Under SOAP it does so at once."""
LOSS_TOLERANCE = 0.02
"""Nats by which a repeated final loss may differ: rounding grows over a run, and moved the final
losses of cells by up to 0.009 from one mesh to another."""
CURVE_TOLERANCE = 0.05
"""The same of evaluations before the last one, when the learning rate is higher."""


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A row that was computed again."""

    row: CellResult
    steps: int
    """That were computed; 0 where the run does not even start as the row says."""
    is_whole: bool = False
    """Whether these are all of the run."""
    is_equal: bool = False
    """Whether all its losses, and the end if it was reached, are equal bit by bit."""
    difference: float = math.inf
    """The largest difference of its first training losses and the validation losses, in nats."""
    problem: str | None
    """Why it does not confirm the row; None if it does."""
    digest: str | None = None
    """Of the end, where it was reached and is that of the row."""

    @property
    def text(self) -> str:
        """The verdict."""
        cell = self.row.cell
        whose = f"{cell.contender}, seed {cell.seed}, {self.steps:,} steps"
        if self.problem is not None:
            return f"{whose}: REFUSED, {self.problem}"
        how = f"equal up to rounding (losses differ by at most {self.difference:.1e})"
        how = "equal bit by bit" if self.is_equal else how
        if not self.is_whole:
            return f"{whose}: {how} so far; the final loss was not computed again"
        digest = "" if self.digest is None else f"same digest {self.digest[:16]}, "
        return f"{whose}: confirmed, {digest}{how}"


def verify(
    workdir: Path,
    scratch: Path,
    *,
    contender: str | None = None,
    seed: int | None = None,
    steps: int | None = None,
    data_path: str | None = None,
    log: Callable[[str], None],
) -> Repeated:
    """Compute a run of a comparison again, and compare digests and losses.

    Args:
      workdir: directory of the comparison.
      scratch: working directory of the run.
      contender: whose run, at its best setting; None is the best contender's.
      seed: of the run; None is the first.
      steps: only so many first steps; None is all of them.
      data_path: directory of the tokens here; None is that of the comparison.
      log: gets a line on what differs from the machine of the row: code, versions and devices.

    Raises:
      ValueError: there is no such run, its data is not read from a directory, or model, data and
        mesh do not fit together.
      FileNotFoundError: there is no data, or a file that its config names is another one here.
      KeyboardInterrupt: a signal stopped the run.
    """
    row, config = _find(summarize(workdir), contender, seed)
    config = with_kept_code(config, workdir)
    if data_path is not None:
        if not isinstance(config.data, TokenShardsConfig):
            raise ValueError(f"--data {data_path}: these tokens are not read from a directory.")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data_path))
    here = environment(sharding.training_mesh(config.mesh, config.model))
    if changes := changes_since(row.environment, here, devices=True):
        log(f"changed since: {', '.join(changes)}")
    weights, tokens = find_start(config)
    if weights != row.initial_weights:
        problem = f"it starts from other weights, digest {weights}."
        return Repeated(row=row, steps=0, problem=problem)
    if tokens != row.tokens:
        problem = f"the tokens are other ones, digest {tokens}."
        python, own = row.environment.get("python"), platform.python_version()
        if isinstance(config.data, PythonSourcesConfig) and python != own:
            problem += f" They are the sources of Python {python}, and this is Python {own}."
        return Repeated(row=row, steps=0, problem=problem)
    num_steps = min(steps or config.num_steps, config.num_steps)
    ours = run_cell(row.cell, _first_steps(config, num_steps), scratch, (weights, tokens))
    if ours is None:
        raise KeyboardInterrupt
    return judge(row, ours, config, num_steps)


def _find(
    summary: Summary, contender: str | None, seed: int | None
) -> tuple[CellResult, TrainConfig]:
    """The row of a contender at its best setting, and the config of its run."""
    ranked = [(o.best.loss.mean, o) for o in summary.outcomes if o.best is not None]
    outcomes = {o.contender.name: o for _, o in sorted(ranked, key=lambda pair: pair[0])}
    name = next(iter(outcomes), None) if contender is None else contender
    if name not in outcomes:
        raise ValueError(f"--contender {name} is none of those with a finished run: {[*outcomes]}.")
    outcome = outcomes[name]
    assert outcome.best is not None
    rows = {r.cell.seed: r for r in outcome.results if r.cell.setting == outcome.best.setting}
    own = next(iter(outcome.best.losses)) if seed is None else seed
    if own not in rows:
        raise ValueError(f"--seed {own} is none of the seeds of {name}: {sorted(rows)}.")
    return rows[own], rows[own].cell.config(outcome.contender)


def _first_steps(config: TrainConfig, num_steps: int) -> TrainConfig:
    if num_steps == config.num_steps:
        return config
    # A run that is shorter than its warmup never comes to the decay.
    decay = max(config.decay_steps, config.schedule.warmup_steps)
    return dataclasses.replace(
        config,
        num_steps=num_steps,
        schedule=dataclasses.replace(config.schedule, decay_steps=decay),
        eval=dataclasses.replace(config.eval, every=num_steps),
    )


def judge(theirs: CellResult, ours: CellResult, config: TrainConfig, num_steps: int) -> Repeated:
    """Whether a run of the first steps of a row confirms it.

    Args:
      theirs: the row.
      ours: its repetition.
      config: of the whole run.
      num_steps: that were computed again.
    """
    logged, whole = dict(theirs.train_losses), num_steps == config.num_steps
    pairs = {step: (logged[step], loss) for step, loss in ours.train_losses if step in logged}
    # Those between may lack in a row that is kept for long; and a run logs its last step too, which
    # in a longer one was one of many.
    steps = {step for step, _ in ours.train_losses}
    needed = {s for s in steps if s <= min(EARLY_STEPS, num_steps - 1) or s == config.num_steps}
    if not pairs or needed - logged.keys():
        problem = "the row lacks training losses of these steps."
        return Repeated(row=theirs, steps=num_steps, problem=problem)
    early = max((_apart(*pair) for s, pair in pairs.items() if s <= EARLY_STEPS), default=0.0)
    is_equal, final, along = not any(_apart(*pair) for pair in pairs.values()), 0.0, 0.0
    is_same_run = is_equal  # its evaluations cannot be others
    if whole:
        final, along = _apart(theirs.loss, ours.loss), _curves_apart(theirs.curve, ours.curve)
        is_same_end = theirs.final_state == ours.final_state
        is_same_run |= is_same_end
        is_equal &= not final and not along and is_same_end
    problem, goes_apart = None, not early <= EARLY_TOLERANCE
    # Which basis SOAP takes where eigenvalues are equal depends on rounding, and so do its updates.
    is_judged_whole = isinstance(config.optimizer, SoapConfig) and math.isfinite(early)
    if goes_apart and not is_judged_whole:
        problem = f"a training loss differs by {early:.2g} nats, more than {EARLY_TOLERANCE:g}."
    elif goes_apart and not whole:
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
    return Repeated(
        row=theirs,
        steps=num_steps,
        is_whole=whole,
        is_equal=is_equal,
        digest=ours.final_state if whole and theirs.final_state == ours.final_state else None,
        difference=max(early, final, along),
        problem=problem,
    )


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
