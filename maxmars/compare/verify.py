"""Repeat a row of a comparison on any machine: the digest of its end, else its losses.

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
from maxmars.compare.curves import Curve
from maxmars.compare.run import find_start, run_trial
from maxmars.compare.summary import Summary, summarize
from maxmars.compare.trials import Row, with_recorded_code
from maxmars.config import PythonSourcesConfig, TokenShardsConfig, TrainConfig
from maxmars.distributed import sharding

LOSS_TOLERANCE = 0.02
"""Nats by which a repeated final loss may differ: rounding grows over a run, and moved the final
losses of trials by up to 0.009 from one mesh to another."""
CURVE_TOLERANCE = 0.05
"""Nats by which earlier validation losses may differ, at higher learning rates."""
SAME_STATE_TOLERANCE = 1e-3
"""Nats by which all validation losses may differ if the run ends with the digest of the row."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A row that was computed again."""

    row: Row
    repeated: Row | None = None
    """Row of the run here; None where the run does not even start like the recorded one."""
    difference: float = math.inf
    """The largest difference of the validation losses, in nats."""
    problem: str | None = None
    """Why the repetition does not confirm the row; None if it does."""

    @property
    def text(self) -> str:
        """The verdict, in a line."""
        row, repeated = self.row, self.repeated
        whose = f"{row.trial.contender}, seed {row.trial.seed}"
        if self.problem is not None or repeated is None:
            return f"{whose}: REFUSED, {self.problem}"
        same_state = repeated.final_state is not None and repeated.final_state == row.final_state
        digest = f"same digest {row.final_state[:16]}, " if same_state and row.final_state else ""
        how = f"equal up to rounding (losses differ by at most {self.difference:.1e})"
        # Published rows have been thinned to every eighth training loss, or fewer.
        losses = dict(repeated.train_losses)
        is_equal = all(losses.get(step) == loss for step, loss in row.train_losses)
        if same_state and not self.difference and is_equal:
            how = "equal bit by bit"
        return f"{whose}: confirmed, {digest}{how}"


def verify(
    workdir: Path,
    scratch: Path,
    *,
    contender: str | None = None,
    seed: int | None = None,
    data_path: str | None = None,
    log: Callable[[str], None],
) -> Reproduction:
    """Compute a run of a comparison again, and compare digests and losses.

    Args:
      workdir: directory of the comparison.
      scratch: working directory of the run.
      contender: whose run, at its best setting; None is the best contender's.
      seed: of the run; None is the first.
      data_path: directory of the tokens here; None is that of the comparison.
      log: gets a line on what differs from the machine of the row: code, versions and devices.

    Raises:
      ValueError: there is no such run, its data is not read from a directory, or model, data and
        mesh do not fit together.
      FileNotFoundError: there is no data, or a file that its config names is another one here.
      KeyboardInterrupt: a signal stopped the run.
    """
    row, config = _find_row(summarize(workdir), contender, seed)
    config = with_recorded_code(config, workdir)
    if data_path is not None:
        if not isinstance(config.data, TokenShardsConfig):
            raise ValueError(f"--data {data_path}: these tokens are not read from a directory.")
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=data_path))
    here = environment(sharding.training_mesh(config.mesh, config.model))
    if changes := changes_since(row.environment, here, devices=True):
        log(f"changed since: {', '.join(changes)}")
    # Weights and tokens first: they are digested in seconds, and a run takes hours.
    weights, tokens = find_start(config)
    if weights != row.initial_weights:
        problem = f"it starts from other weights, digest {weights}."
        return Reproduction(row=row, problem=problem)
    if tokens != row.tokens:
        problem = f"the tokens are other ones, digest {tokens}."
        python, own = row.environment.get("python"), platform.python_version()
        # These data are the standard library's files, other ones in each version.
        if isinstance(config.data, PythonSourcesConfig) and python != own:
            problem += f" They are the sources of Python {python}, and this is Python {own}."
        return Reproduction(row=row, problem=problem)
    repeated = run_trial(row.trial, config, scratch, (weights, tokens))
    if repeated is None:  # a signal ended the run, which saved its state in `scratch`
        raise KeyboardInterrupt
    return judge(row, repeated)


def _find_row(summary: Summary, contender: str | None, seed: int | None) -> tuple[Row, TrainConfig]:
    """The row of a contender at its best setting, and the config of its run."""
    ranked = [(o.best.loss.mean, o) for o in summary.outcomes if o.best is not None]
    outcomes = {o.contender.name: o for _, o in sorted(ranked, key=lambda pair: pair[0])}
    name = next(iter(outcomes), None) if contender is None else contender
    if name not in outcomes:
        raise ValueError(f"--contender {name} is none of those with a finished run: {[*outcomes]}.")
    outcome = outcomes[name]
    assert outcome.best is not None
    rows = {r.trial.seed: r for r in outcome.rows if r.trial.setting == outcome.best.setting}
    own = next(iter(outcome.best.losses)) if seed is None else seed
    if own not in rows:
        raise ValueError(f"--seed {own} is none of the seeds of {name}: {sorted(rows)}.")
    return rows[own], rows[own].trial.config(outcome.contender)


def judge(row: Row, repeated: Row) -> Reproduction:
    """Judge whether the repetition of a run confirms its row."""
    final = _difference(row.loss, repeated.loss)
    curve = _largest_difference(row.curve, repeated.curve)
    far = max(final, curve)
    same_state = row.final_state is not None and row.final_state == repeated.final_state
    problem = None
    if same_state and far > SAME_STATE_TOLERANCE:
        problem = f"its end has the same digest, but a validation loss differs by {far:.2g} nats."
    elif final > LOSS_TOLERANCE:
        problem = f"the final loss differs by {final:.2g} nats, more than {LOSS_TOLERANCE:g}."
    elif curve > CURVE_TOLERANCE:
        problem = f"a validation loss differs by {curve:.2g} nats, more than {CURVE_TOLERANCE:g}."
    return Reproduction(row=row, repeated=repeated, difference=far, problem=problem)


def _largest_difference(recorded: Curve | None, repeated: Curve | None) -> float:
    """The largest difference of two curves; infinite where their points differ."""
    if recorded is None or repeated is None:
        return 0.0 if recorded is repeated else math.inf
    if (recorded.loss_of, recorded.tokens) != (repeated.loss_of, repeated.tokens):
        return math.inf
    return max(map(_difference, recorded.losses, repeated.losses), default=0.0)


def _difference(recorded: float, repeated: float) -> float:
    """The difference of two losses: 0 if both are NaN or the same infinity, infinite if only one of
    them is NaN, or finite."""
    if recorded == repeated or (math.isnan(recorded) and math.isnan(repeated)):
        return 0.0
    return math.inf if math.isnan(recorded - repeated) else abs(recorded - repeated)
