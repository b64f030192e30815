"""`maxmars compare`: run the cells that are missing, then write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from maxmars import sharding
from maxmars.checkpoint.lock import acquire
from maxmars.compare.batched_cells import (
    Step,
    Timing,
    make_batched_step,
    run_cells_together,
    time_both_ways,
)
from maxmars.compare.cell_progress import CellProgress
from maxmars.compare.cells import Cell, CellResult, Contender, finished
from maxmars.compare.one_cell import Session, run_cell
from maxmars.compare.programs import ProgramStore, describe
from maxmars.compare.record import Comparison, check_comparable, open_record
from maxmars.compare.report_files import write_report
from maxmars.compare.search import next_cells
from maxmars.config import TrainConfig
from maxmars.metrics import write_json
from maxmars.precision import choose_precision
from maxmars.preemption import StopRequests
from maxmars.program_cache import ProgramCache, default_directory
from maxmars.report.figures import require_matplotlib
from maxmars.watchdog import Watchdog

PROGRAMS = "programs.json"
_WORTH = 1.1  # what running cells together must gain: less may be noise of the clock


def compare(
    comparison: Comparison, workdir: Path, devices: Sequence[jax.Device] | None = None
) -> bool:
    """Run a comparison, or what is missing of it, and write `report.*` and `figures/`.

    Args:
      comparison: what is compared; each contender's evaluation gets an interval if it has none.
      workdir: a directory on a disk, of this comparison.
      devices: to train on; None takes all.

    Returns:
      Whether it is done; not after SIGTERM or Ctrl-C, which leave the finished cells.

    Raises:
      ValueError: contenders are not comparable or do not fit mesh and data, or `workdir` holds
        another comparison or is in use.
      ImportError: matplotlib is not installed.
      FileNotFoundError: there is no data.
    """
    require_matplotlib()  # not to be missed after hours
    check_comparable(comparison.contenders)
    with contextlib.ExitStack() as stack:
        lock = acquire(workdir / "cells")
        assert lock is not None, "there is one process"
        stack.callback(lock.release)
        comparison = open_record(_with_precision(comparison, devices), workdir)
        progress = stack.enter_context(CellProgress())
        longest = max((c.config.hang_timeout_s or 0 for c in comparison.contenders), default=0)
        platform = (devices or jax.devices())[0].platform
        session = Session(
            workdir=workdir,
            programs=ProgramStore(devices),
            cache=stack.enter_context(
                ProgramCache(default_directory(workdir, platform), progress.say)
            ),
            watchdog=stack.enter_context(Watchdog(longest or None, workdir / "checkpoints")),
            stops=stack.enter_context(StopRequests()),
            progress=progress,
        )
        if not _Runner(comparison, session).run():
            return False
        session.cache.seal()
    write_report(workdir)
    return True


def _with_precision(comparison: Comparison, devices: Sequence[jax.Device] | None) -> Comparison:
    """The comparison with `model.compute_dtype` `auto` replaced, so that all cells share it."""
    contenders = tuple(
        dataclasses.replace(
            c, config=choose_precision(c.config, sharding.make_mesh(c.config.mesh, devices))
        )
        for c in comparison.contenders
    )
    return dataclasses.replace(comparison, contenders=contenders)


class _Runner:
    """Runs the cells of a comparison."""

    def __init__(self, comparison: Comparison, session: Session) -> None:
        """Read which cells are finished."""
        self._comparison = comparison
        self._session = session
        self._contenders = {c.name: c for c in comparison.contenders}
        self._steps: dict[str, Step] = {}
        self._results: dict[Cell, CellResult] = {
            result.cell: result
            for contender in comparison.contenders
            for result in finished(session.workdir, contender.name)
            if result.cell.seed in comparison.seeds
        }

    def run(self) -> bool:
        """Run what is missing; whether all of it was run."""
        say = self._session.progress.say
        if self._results:
            say(f"{len(self._results)} cells are finished and kept")
        while pending := self._pending():
            if self._session.stops.due(0):
                break
            results = self._run_next(pending)
            if results is None:
                break
            for result in results:
                result.write(self._session.workdir)
                self._results[result.cell] = result
            left = self._pending()
            for result in results:
                say(self._line(result, left))
        else:
            return True
        say(
            f"stopped: {len(self._results)} cells are finished and kept, the one at work is not; "
            "the same command continues."
        )
        return False

    def _pending(self) -> list[Cell]:
        comparison = self._comparison
        return next_cells(comparison.contenders, comparison.seeds, self._results)

    def _run_next(self, pending: Sequence[Cell]) -> list[CellResult] | None:
        """Run the first cell, with others where together they take less time."""
        first, session = pending[0], self._session
        contender = self._contenders[first.contender]
        together = [c for c in pending if (c.contender, c.seed) == (first.contender, first.seed)]
        timing = self._prepare(contender, together)
        session.progress.begin(self._title(pending), contender.config.num_steps)
        if timing is None or timing.ratio < _WORTH or len(together) == 1:
            result = run_cell(first, first.config(contender), session)
            return None if result is None else [result]
        configs = [cell.config(contender) for cell in together]
        programs = session.programs.get(configs[0])
        step = self._batched_step(contender, configs[0])
        return run_cells_together(together, configs, programs, step, timing.single_s, session)

    def _batched_step(self, contender: Contender, config: TrainConfig) -> Step:
        if contender.name not in self._steps:
            train_step = self._session.programs.get(config).train_step
            self._steps[contender.name] = make_batched_step(train_step)
        return self._steps[contender.name]

    def _prepare(self, contender: Contender, cells: Sequence[Cell]) -> Timing | None:
        """Describe a contender's programs and time them both ways, once a workdir."""
        path = self._session.workdir / "cells" / contender.name / PROGRAMS
        if path.is_file():
            timing = json.loads(path.read_text())["timing"]
            return None if timing is None else Timing(**timing)
        configs = [cell.config(contender) for cell in cells]
        programs = self._session.programs.get(configs[0])
        timing = None
        if len(cells) > 1 and programs.mesh.size == 1:
            self._session.progress.begin(f"{contender.name}: timing its steps", 1)
            step = self._batched_step(contender, configs[0])
            timing = time_both_ways(configs, programs, step, self._session)
            text = timing.text(contender.config.num_steps)
            self._session.progress.say(f"{contender.name}: {text}")
        fields = describe(configs[0], programs)
        fields["timing"] = None if timing is None else dataclasses.asdict(timing)
        write_json(path, fields)
        return timing

    def _title(self, pending: Sequence[Cell]) -> str:
        done = len(self._results)
        return f"cell {done + 1} of {done + len(pending)} or more: {pending[0]}"

    def _line(self, result: CellResult, pending: Sequence[Cell]) -> str:
        done = len(self._results)
        width = max(map(len, self._contenders))
        cell = result.cell
        text = f"[{done:>3}/{done + len(pending)}+] {cell.contender:<{width}}  "
        text += f"rate {cell.learning_rate:<8g} seed {cell.seed}  "
        text += "diverged" if result.diverged else f"validation loss {result.loss:.4f}"
        text += f"  {result.seconds:.0f} s"
        if pending:
            text += f"  {_duration(self._seconds_left(pending))} or more left"
        return text if result.diverged is None else f"{text}\n        {result.diverged}"

    def _seconds_left(self, pending: Sequence[Cell]) -> float:
        """At the pace of each contender's finished cells; in the scan, with what must follow."""
        pace: dict[str, list[float]] = {}
        for result in self._results.values():
            if result.diverged is None:
                pace.setdefault(result.cell.contender, []).append(result.seconds)
        every = [s for found in pace.values() for s in found] or [0.0]
        means = {
            name: sum(found) / len(found)
            for name in self._contenders
            for found in [pace.get(name, every)]
        }
        later = 0.0
        seeds = self._comparison.seeds
        if any(cell.seed == seeds[0] for cell in pending):
            later = (len(seeds) - 1) * sum(means.values())
        return later + sum(means[cell.contender] for cell in pending)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
