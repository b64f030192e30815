"""What a run came to: a few lines at its end, and `<workdir>/summary.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxmars import distributed
from maxmars.goodput import ACTIVITIES, run_seconds, shares
from maxmars.metrics import duration, json_number, read_metrics, short, write_json
from maxmars.run import Run

_LEAST_SHARE = 0.0005  # of the time, to be shown
_MEDIANS = ("perf/tokens_per_sec", "perf/step_time", "perf/mfu")
_MEANS = ("train/grad_clip_fraction", "train/clip_fraction")


def write_summary(run: Run, *, done: bool) -> str:
    """Write `summary.json`, and return what it says for people; fewer lines unless all is done.

    Only the primary process, which has the metrics, writes and has more to say than how it ended.
    """
    if not done:
        end = f"stopped after {run.step} steps; the checkpoint is complete, and the same command"
        end += " continues."
    else:
        end = f"done: {run.step} steps"
    if not distributed.is_primary():
        return end
    found = _summary(run, done=done)
    write_json(run.workdir / "summary.json", found)
    lines = list(_lines(found))
    if not done:
        return "\n".join([end, *lines[:2]])
    end += f", {short(float(found['tokens']))} tokens in {duration(found['wall_time_s'])}"
    return "\n".join([end, *lines, *_table(found), f"  all of it in {run.workdir}"])


def _summary(run: Run, *, done: bool) -> dict[str, Any]:
    rows = read_metrics(run.workdir)
    sessions = run.goodput.sessions()
    seconds = run_seconds(sessions)
    found: dict[str, Any] = {
        "name": run.config.name,
        "done": done,
        "step": run.step,
        "num_steps": run.config.num_steps,
        "tokens": run.batches.position * run.config.model.max_seq_len,
        **{key: value for row in rows for key, value in row.items() if key.startswith("eval/")},
        **{key: row[key] for row in rows for key in ("train/loss", "train/skipped") if key in row},
        **{key: json_number(np.median(x)) for key in _MEDIANS if (x := _values(rows, key))},
        **{key: _mean(rows, key) for key in _MEANS if _values(rows, key)},
        "sessions": len(sessions),
        "wall_time_s": sum(seconds.values()),
        "seconds": seconds,
        "shares": shares(seconds),
    }
    losses = [(float(row["eval/loss"]), row["step"]) for row in rows if "eval/loss" in row]
    if losses:
        best, step = min(losses)
        found["best"] = {"eval/loss": json_number(best), "step": step}
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    """What is known, a line each; the first two are of interest at any time."""
    losses = []
    for key, name in (("train/loss", "training"), ("eval/loss", "validation")):
        if key in found:
            losses.append(f"{name} {float(found[key]):.4f}")
    if "best" in found and found["best"]["eval/loss"] != found["eval/loss"]:
        best = found["best"]
        losses.append(f"best validation {float(best['eval/loss']):.4f} at step {best['step']}")
    lines = [f"  loss       {', '.join(losses)}"] if losses else []
    starts = "" if found["sessions"] == 1 else f", over {found['sessions']} starts"
    lines.append(
        f"  goodput    {found['shares']['steps']:.1%} of {duration(found['wall_time_s'])} went "
        f"into steps{starts}"
    )
    if "perf/tokens_per_sec" in found:
        text = f"{short(float(found['perf/tokens_per_sec']))} tokens/s"
        text += f", {1000 * found['perf/step_time']:.4g} ms a step"
        text += f", MFU {found['perf/mfu']:.1%}" if "perf/mfu" in found else ""
        lines.append(f"  speed      {text} (medians)")
    names = dict(zip(_MEANS, ("gradients", "MARS's corrected gradients"), strict=True))
    clipped = [f"{found[key]:.1%} of {name}" for key, name in names.items() if key in found]
    if clipped:
        lines.append(f"  clipped    {', '.join(clipped)}")
    if found.get("train/skipped"):
        lines.append(f"  skipped    {found['train/skipped']} steps; see skipped_steps/")
    return lines


def _table(found: dict[str, Any]) -> list[str]:
    """Where the time went, the largest share first."""
    order = sorted(ACTIVITIES, key=lambda name: -found["seconds"][name])
    return [
        "  time",
        *(
            f"    {ACTIVITIES[name]:<29}{duration(found['seconds'][name]):>9}{share:>8.1%}"
            for name in order
            if (share := found["shares"][name]) >= _LEAST_SHARE
        ),
    ]


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if key in row]


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Mean over the steps; a line speaks for those since the line before."""
    found = [(row["step"], float(row[key])) for row in rows if key in row]
    steps = np.array([step for step, _ in found])
    weights = np.diff(steps, prepend=0)
    return float(np.average([value for _, value in found], weights=np.maximum(weights, 1e-9)))
