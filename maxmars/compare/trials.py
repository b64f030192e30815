"""The trials of a comparison, the rows of the finished ones, and their files.

A trial is one training run: of a contender, with one setting of the fields that are tuned, and one
seed. These three identify it within a directory, whose `compare.json` fixes the contenders'
configs. A comparison goes one way: trials, a row of each that is finished, the summary of the rows,
the report of the summary. The files are

    compare.json                          what is compared
    rows.jsonl                            how each finished trial ended, a line a trial
    sources/SHA256/FILE.py                a copy of each Python file that a config names
    cells/CONTENDER/SETTING,seed=SEED/    the run, as `maxmars train` leaves it

where SETTING is `learning_rate=0.002`, followed by the fields that are not at the config's values,
such as `,b1=0.95`. All but `cells` is enough to continue, to report and to repeat a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import maxmars
from maxmars.compare.curves import Curve
from maxmars.compare.grids import LEARNING_RATE, Grid, Number, value_of, with_values
from maxmars.config import TrainConfig, differences, from_dict, to_dict
from maxmars.config.user_code import Source, sources_in, with_sources
from maxmars.distributed.files import (
    LineFile,
    json_number,
    naming,
    read_json,
    read_json_lines,
    try_lock,
    write_json,
)
from maxmars.distributed.recorded_code import Part, keep_code, recorded_copy

COMPARISON = "compare.json"
_ROWS = "rows.jsonl"
_SOURCES = "sources"
_FORMAT = 6
_PATIENCE_S = 60.0  # another process has the rows for the time of a line

# Fields that neither losses nor step times depend on: they may change when a comparison continues.
# Each trial has its own learning rate, so the config's does not matter either.
_IGNORED_FIELDS = (
    "name",
    "data.verify",
    "hang_timeout_s",
    "checkpoint.",
    "optimizer.learning_rate",
)

# Fields in which contenders may differ: the loss is measured in the same way whatever they are.
MAY_DIFFER = (
    "name",
    "optimizer",
    "schedule.",
    "gradient_clip_norm",
    "gradient_multiplier",
    "num_microbatches",
    "guard.",
    "model.remat",
    "model.scan_unroll",
    "hang_timeout_s",
    "checkpoint.",
    "log.",
)


Setting = tuple[tuple[str, Number], ...]
"""Field and value pairs: the learning rate, and tuned fields that differ from the config."""


def make_setting(config: TrainConfig, values: Mapping[str, Number]) -> Setting:
    """The setting of these values of tuned fields."""
    # Without values that are the config's: settings then stay equal when a field more is tuned.
    changed = {f: v for f, v in sorted(values.items()) if v != value_of(config, f)}
    rate = values.get(LEARNING_RATE, config.optimizer.learning_rate)
    return tuple(({LEARNING_RATE: rate} | changed).items())


def describe_setting(setting: Setting) -> str:
    """Text for people and directories: `learning_rate=0.002,b1=0.95`."""
    return ",".join(f"{field}={value!r}" for field, value in setting)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A config that takes part in a comparison, and how it is tuned."""

    name: str
    config: TrainConfig
    grids: tuple[Grid, ...]
    """Grids of the tuned fields, in the order of the search."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The identity of one training run of a comparison."""

    contender: str
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return f"{describe_setting(self.setting)},seed={self.seed}"

    def directory(self, workdir: Path) -> Path:
        """Working directory of the run."""
        return workdir / "cells" / self.contender / self.name

    def config(self, contender: Contender) -> TrainConfig:
        """Config of the run.

        Raises:
          ValueError: the config does not allow these values together.
        """
        config = with_values(contender.config, dict(self.setting))
        return dataclasses.replace(config, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of a finished trial."""

    trial: Trial
    loss: float
    """Validation loss after the last step, in nats a token; infinite if the run diverged."""
    diverged: str | None
    """Why the run counts as diverged; None if it does not."""
    step_time_s: float | None
    """Median time of a step; None where too few steps were timed."""
    seconds: float
    """Time from the last start of the run to its end."""
    initial_weights: str
    """Digest of the weights that the run started from; the same on every mesh."""
    tokens: str
    """Digest of the batches of the first and the last step."""
    curve: Curve | None
    """The validation losses of the run; None if it diverged before the first."""
    train_losses: tuple[tuple[int, float], ...]
    """Step and training loss of that step's batch, where the run logged it."""
    final_state: str | None
    """Digest of parameters and optimizer after the last step; None if the run diverged."""
    environment: Mapping[str, Any]
    """Versions and devices, as in `environment.json` of the run."""
    cost: Mapping[str, int] | None = None
    """Bytes of the contender's step, see `run.step_cost`; in one row of each contender."""
    data: str | None = None
    """Digest of all data of the run; None in old rows, and where no step ran."""


Rows = Mapping[Trial, Row]
"""The rows of finished trials."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The contenders and seeds of a comparison, and how contenders are tuned."""

    contenders: tuple[Contender, ...]
    baseline: str
    """Name of the contender that the others are tested against."""
    seeds: tuple[int, ...]
    """The first seed is the one that contenders are tuned with."""
    budget: int
    """Trials that the search may take of each contender."""
    finalists: int
    """The best settings of a contender, which run with all seeds."""
    confirm: int = 1
    """Seeds with which a setting must be better before the search moves to it."""

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `compare.json` on how contenders are tuned and tested."""
        names = ("baseline", "seeds", "budget", "finalists", "confirm")
        return {name: getattr(self, name) for name in names}

    @property
    def own_fields(self) -> dict[str, dict[str, object]]:
        """Fields in which contenders differ, optimizers and names aside: contender -> value."""
        first, *others = self.contenders
        names = [contender.name for contender in self.contenders]
        own_values: dict[str, dict[str, object]] = {}
        for other in others:
            rows = _differences(first.config, other.config, ("optimizer", "name"))
            for name, ours, theirs in rows:
                values = own_values.setdefault(name, dict.fromkeys(names, ours))
                values[other.name] = theirs
        return own_values


def check_comparable(contenders: Sequence[Contender]) -> None:
    """Check that contenders differ only in how they train, not in what their loss is measured on.

    Raises:
      ValueError: they differ in model, data, batch size, number of steps or evaluation.
    """
    first = contenders[0]
    for other in contenders[1:]:
        if rows := _differences(first.config, other.config, MAY_DIFFER):
            listed = ", ".join(f"{name} is {ours} there and {new} here" for name, ours, new in rows)
            raise ValueError(
                f"{first.name} and {other.name} cannot be compared: {listed}. Give both the same "
                "values."
            )


def _differences(
    config: TrainConfig, other: TrainConfig, ignored: tuple[str, ...] = _IGNORED_FIELDS
) -> list[tuple[str, object, object]]:
    return [row for row in differences(config, other) if not row[0].startswith(ignored)]


def _copy_directory(source: Source) -> str:
    return f"{_SOURCES}/{(source.sha256 or '')[:16]}"


def with_recorded_code(config: Part, workdir: Path) -> Part:
    """A config of a comparison, or a part of one, with each function in the copy of its file in
    `workdir`.

    Raises:
      ValueError: see `recorded_copy`.
    """
    way_out = "put that file back there, or compare the file as it is now in another --workdir"
    return with_sources(
        config, lambda source: recorded_copy(source, workdir, _copy_directory(source), way_out)
    )


def check_continues(comparison: Comparison, workdir: Path) -> dict[str, TrainConfig]:
    """Check that a comparison can begin in `workdir`, or continue the one there.

    Returns:
      The configs that `workdir` holds, by contender.

    Raises:
      ValueError: `workdir` holds a comparison of another version, or a contender of the same name
        with another config or code.
    """
    stored = _configs_in(_read_fields(workdir))
    for contender in comparison.contenders:
        earlier = stored.get(contender.name, contender.config)
        rows = [
            row
            for row in _differences(contender.config, earlier)
            if row[0] != "model.compute_dtype" or row[1] != "auto"  # not yet set
        ]
        if rows:
            listed = ", ".join(f"{name} ({old} there, {new} here)" for name, new, old in rows)
            raise ValueError(
                f"{workdir} holds another comparison: its {contender.name} differs in {listed}. "
                "Continue it with its own values, or choose another --workdir."
            )
    return stored


def open_comparison(comparison: Comparison, workdir: Path) -> None:
    """Begin a comparison in `workdir`, or continue the one there; writes `compare.json`.

    Contenders of earlier commands keep their configs.

    Raises:
      ValueError: see `check_continues`.
      FileNotFoundError: a Python file that a config names is gone.
    """
    stored = check_continues(comparison, workdir)
    configs = stored | {c.name: c.config for c in comparison.contenders}
    fields = {
        "format": _FORMAT,
        "maxmars": maxmars.__version__,
        **comparison.options,
        "compared": {
            c.name: [dataclasses.asdict(grid) for grid in c.grids] for c in comparison.contenders
        },
        "configs": {name: to_dict(config) for name, config in configs.items()},
    }
    write_json(workdir / COMPARISON, fields)
    # Trials run copies; of a file that has changed since the config was made, there is one already.
    for source in (source for c in comparison.contenders for source in sources_in(c.config)):
        if source.with_current_digest() == source:
            keep_code(source, workdir, _copy_directory(source))


def _configs_in(fields: Mapping[str, Any]) -> dict[str, TrainConfig]:
    """The configs by contender in the fields of `compare.json`."""
    return {name: from_dict(config) for name, config in fields.get("configs", {}).items()}


def read_comparison(workdir: Path) -> Comparison:
    """The comparison in `workdir`.

    Raises:
      ValueError: there is none, it is damaged, or another version of maxmars wrote it.
    """
    fields = _read_fields(workdir)
    if not fields:
        raise ValueError(f"{workdir} holds no comparison: there is no {COMPARISON} in it.")
    try:
        comparison = _comparison(fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise _damaged(workdir) from error
    if comparison.baseline not in {contender.name for contender in comparison.contenders}:
        raise _damaged(workdir)
    return comparison


def _comparison(fields: Mapping[str, Any]) -> Comparison:
    configs = _configs_in(fields)
    contenders = []
    for name, own in fields["compared"].items():
        grids = tuple(
            Grid(field=g["field"], values=tuple(g["values"]), scanned=tuple(g["scanned"]))
            for g in own
        )
        contenders.append(Contender(name=name, config=configs[name], grids=grids))
    numbers = {name: fields[name] for name in ("baseline", "budget", "finalists", "confirm")}
    return Comparison(contenders=tuple(contenders), seeds=tuple(fields["seeds"]), **numbers)


def write_row(row: Row, workdir: Path) -> None:
    """Append a row to `rows.jsonl`: from now on the trial is finished.

    Raises:
      OSError: it cannot be written, or another process keeps it locked.
    """
    fields: dict[str, Any] = dataclasses.asdict(row) | {"loss": json_number(row.loss)}
    fields["train_losses"] = [(step, json_number(loss)) for step, loss in row.train_losses]
    if row.curve is not None:
        fields["curve"] |= {"losses": list(map(json_number, row.curve.losses))}
    fields = {"cell": fields.pop("trial"), **fields}  # as the format calls it
    path = workdir / _ROWS
    # On a network disk two machines that append at the same time write over each other.
    with naming(path), path.open("ab") as file:
        if not try_lock(file, path, _PATIENCE_S):
            raise TimeoutError(f"another process has had the lock for {_PATIENCE_S:g} s")
        rows = LineFile(path)
        rows.write(json.dumps(fields))
        rows.close()


def read_rows(comparison: Comparison, workdir: Path) -> dict[Trial, Row]:
    """The rows of finished trials with contenders and seeds of a comparison, of any setting."""
    names = [contender.name for contender in comparison.contenders]
    rows: dict[Trial, Row] = {}
    for fields in read_json_lines(workdir / _ROWS):
        # A row that is damaged does not count: its trial is run again, and writes another one.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            row = _row(dict(fields))
            if row.trial.contender in names and row.trial.seed in comparison.seeds:
                rows[row.trial] = row
    return dict(sorted(rows.items(), key=lambda f: (names.index(f[0].contender), f[0].name)))


def _row(fields: dict[str, Any]) -> Row:
    """The row of which `write_row` made these fields."""
    # JSON has lists for tuples, and texts for infinite losses.
    trial, curve = fields.pop("cell"), fields.pop("curve")
    setting = tuple((field, value) for field, value in trial["setting"])
    if curve is not None:
        numbers = {name: tuple(curve[name]) for name in ("steps", "tokens")}
        curve = Curve(**curve | numbers | {"losses": tuple(map(float, curve["losses"]))})
    fields["loss"] = float(fields["loss"])
    fields["train_losses"] = tuple((step, float(loss)) for step, loss in fields["train_losses"])
    return Row(trial=Trial(**trial | {"setting": setting}), curve=curve, **fields)


def _damaged(workdir: Path) -> ValueError:
    path = workdir / COMPARISON
    return ValueError(f"{path} is damaged; restore it, or choose another --workdir.")


def _read_fields(workdir: Path) -> dict[str, Any]:
    """The fields of `compare.json`; none where there is no such file."""
    path = workdir / COMPARISON
    if not path.is_file():
        return {}
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise _damaged(workdir)
    if fields.get("format") != _FORMAT:
        raise ValueError(
            f"{workdir} holds a comparison of format {fields.get('format', 1)}, and this maxmars "
            f"has format {_FORMAT}. Choose another --workdir, or continue it with the maxmars that "
            "wrote it."
        )
    return fields
