"""The summary at the end of a session: `summary.json`, and the last lines of the output.

All figures come from the run's own records, `metrics.jsonl` and the journal, and cover all sessions
of the run.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxmars.config import PythonSourcesConfig
from maxmars.config.numbers import duration, short
from maxmars.distributed import processes
from maxmars.distributed.files import json_number, write_json
from maxmars.distributed.workdir import SUMMARY, TOKENIZER
from maxmars.eval.own_evaluation import in_one_line
from maxmars.train.journal import ACTIVITIES, run_seconds, shares
from maxmars.train.metrics import own_metric, read_metrics, validation_keys
from maxmars.train.run import Run

_MIN_SHARE = 0.0005  # activities with a smaller share of the time are not shown
_MEDIANS = ("perf/tokens_per_sec", "perf/step_time", "perf/mfu")


def write_summary(run: Run, *, done: bool, journal: str | None = None) -> str:
    """Write `summary.json`, and return its text; a short one unless the run is done.

    Only the primary process writes, as it has the metrics; others return one line. `journal` is the
    hash of the journal's last line: `audit` then notices if the line is removed.
    """
    end = f"done: {run.step} steps"
    if not done:
        saved = "the checkpoint is complete, and " if run.step else ""
        end = f"stopped after {run.step} steps; {saved}the same command continues."
    if not processes.is_primary():
        return end
    figures = _summary(run, done=done) | {"journal": journal}
    write_json(run.workdir / SUMMARY, figures)
    lines = _lines(figures)
    if not done:
        return "\n".join([end, *lines[:2]])
    end += f", {short(float(figures['tokens']))} tokens in {duration(figures['wall_time_s'])}"
    table = [
        f"    {ACTIVITIES[name]:<29}{duration(figures['seconds'][name]):>9}{share:>8.1%}"
        for name in sorted(ACTIVITIES, key=lambda name: -figures["seconds"][name])
        if (share := figures["shares"][name]) >= _MIN_SHARE
    ]
    where = f"  all of it in {run.workdir}"
    data = run.config.data
    prompt = "def " if isinstance(data, PythonSourcesConfig) else "Once"
    command = ["generate", str(run.workdir), "--prompt", prompt]
    if not (run.workdir / TOKENIZER).exists():  # `generate` needs a tokenizer
        command = ["report", str(run.workdir)]
    following = f"next: {shlex.join(['maxmars', *command])}"
    return "\n".join([end, *lines, "  time", *table, where, following])


def _summary(run: Run, *, done: bool) -> dict[str, Any]:
    rows = read_metrics(run.workdir)
    sessions = run.journal.sessions(run.step, done=done)
    seconds = run_seconds(sessions)

    def values(key: str) -> list[float]:
        return [float(row[key]) for row in rows if key in row]

    figures: dict[str, Any] = {
        "name": run.config.name,
        "done": done,
        "step": run.step,
        "num_steps": run.config.num_steps,
        "data_digest": run.training.data_digest,
        "tokens": run.sinks.tokens(run.step),
        # Of each key the newest value.
        **{key: value for row in rows for key, value in row.items() if key.startswith("eval/")},
        **{key: row[key] for row in rows for key in ("train/loss", "train/skipped") if key in row},
        **{key: json_number(np.median(some)) for key in _MEDIANS if (some := values(key))},
        "sessions": len(sessions),
        "wall_time_s": sum(seconds.values()),
        "seconds": seconds,
        "shares": shares(seconds),
    }
    if run.train_step.evaluated is not None:
        figures["evaluated"] = run.train_step.evaluated
    metric, _ = validation_keys(run.config.checkpoint.keep_best_of)  # by default `eval/loss`
    if best := best_evaluation(rows, metric):
        figures["best"] = best
    return figures


def best_evaluation(
    rows: Sequence[Mapping[str, Any]], metric: str = "eval/loss"
) -> dict[str, Any] | None:
    """The lowest finite value of a metric in lines of `metrics.jsonl`, with its `step`; None if no
    value is finite."""
    losses = [(float(row[metric]), row["step"]) for row in rows if metric in row]
    loss, step = min((some for some in losses if math.isfinite(some[0])), default=(None, None))
    return None if loss is None else {metric: loss, "step": step}


def _lines(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text; the first two are also shown when a run stops."""
    losses = []
    for key, name in (("train/loss", "training"), ("eval/loss", "validation")):
        if key in figures:
            losses.append(f"{name} {float(figures[key]):.4f}")
    if "eval/bits_per_byte" in figures:
        losses[-1] += f" ({float(figures['eval/bits_per_byte']):.4f} bits a byte)"
    for metric in figures.get("best", {}).keys() - {"step"}:
        loss, step = figures["best"][metric], figures["best"]["step"]
        if loss != figures[metric]:
            of = "".join(f" of {name}" for name, _ in filter(None, [own_metric(metric)]))
            losses.append(f"best validation{of} {loss:.4f} at step {step}")
    of = f"; validation of {figures['evaluated']}" if "evaluated" in figures else ""
    lines = [f"  loss       {', '.join(losses)}{of}"] if losses else []
    starts = "" if figures["sessions"] == 1 else f", over {figures['sessions']} starts"
    lines.append(
        f"  goodput    {figures['shares']['steps']:.1%} of {duration(figures['wall_time_s'])} went "
        f"into steps{starts}"
    )
    own: dict[str, dict[str, float]] = {}
    for key, value in figures.items():
        if metric := own_metric(key):
            function, name = metric
            own.setdefault(function, {})[name] = float(value)
    lines += [f"  {function:<10} {in_one_line(numbers)}" for function, numbers in own.items()]
    if "perf/tokens_per_sec" in figures:
        text = f"{short(float(figures['perf/tokens_per_sec']))} tokens/s"
        text += f", {1000 * figures['perf/step_time']:.4g} ms a step"
        text += f", MFU {figures['perf/mfu']:.1%}" if "perf/mfu" in figures else ""
        lines.append(f"  speed      {text} (medians)")
    if figures.get("train/skipped"):
        lines.append(f"  skipped    {figures['train/skipped']} steps")
    return lines
