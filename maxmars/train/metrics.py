"""What a run records of its steps: `metrics.jsonl`. `README.md` beside this file lists the keys."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maxmars.checkpoint.journal import PrefixHash
from maxmars.distributed import processes
from maxmars.distributed.files import LineFile, Workdir, json_number, read_json_lines, write_text
from maxmars.distributed.workdir import METRICS
from maxmars.train.trackers import Trackers


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Appends to `<workdir>/metrics.jsonl`: one JSON object a line, with `step` and metrics.

    Non-finite values are the strings "NaN", "Infinity" and "-Infinity": valid JSON, which `float()`
    reads back. Only the primary process writes.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int = 0,
        *,
        tokens: Callable[[int], int],
        may_write: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
    ) -> None:
        """Open the file of a run that continues after `resume_step` steps.

        Lines of later steps, which the run is about to write again, are dropped; at step 0 all are.
        `tokens` says how many the run has trained on after a step, which each line has. For
        `may_write` see `files.LineFile`. The `trackers` get each line too, and are closed.
        """
        self.tokens = tokens
        """From a step to the tokens that the run has trained on after it."""
        self._lines: LineFile | None = None
        self._trackers = trackers or Trackers({}, lambda text: None)
        self.kept: list[dict[str, Any]] = []
        """The lines that were there, in the primary process."""
        self.last: dict[str, tuple[int, Any]] = {}
        """Step and value of the newest line with each key, in the primary process."""
        self.prefix = PrefixHash()
        """Of all lines, in the primary process."""
        if processes.is_primary():
            path = workdir / METRICS
            lines = read_metrics(workdir) if resume_step else []
            self.kept = [line for line in lines if line["step"] <= resume_step]
            if path.exists():
                write_text(path, "".join(json.dumps(line) + "\n" for line in self.kept))
            self.last = {key: (line["step"], line[key]) for line in self.kept for key in line}
            for line in self.kept:
                self.prefix = self.prefix.after(line)
            self._lines = LineFile(path, may_write)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line; values are numbers or arrays of one element."""
        metrics = {"tokens": self.tokens(step), **metrics}
        if self._lines is not None:
            line = {"step": step} | {key: json_number(value) for key, value in metrics.items()}
            self._lines.write(json.dumps(line, allow_nan=False))
            self.prefix = self.prefix.after(line)
            self.last |= {key: (step, value) for key, value in line.items()}
        self._trackers.each(lambda tracker: tracker.write(step, metrics))

    def sync(self) -> None:
        """Have all lines where a kill does not reach them."""
        if self._lines is not None:
            self._lines.sync()
        self._trackers.each(lambda tracker: tracker.sync())

    def close(self) -> None:
        """Close the file and the trackers; `write` must not be called after it."""
        if self._lines is not None:
            self._lines.close()
        self._trackers.each(lambda tracker: tracker.close())

    def __exit__(self, *_: object) -> None:
        self.close()


def own_metric(key: str) -> tuple[str, str] | None:
    """Function and name of a number that a function of `eval.own` returned, by its key
    `eval/FUNCTION/NAME`; None of another key."""
    kind, _, rest = key.partition("/")
    function, slash, name = rest.partition("/")
    return (function, name) if kind == "eval" and slash else None


def read_metrics(workdir: Workdir) -> list[dict[str, Any]]:
    """The lines of `<workdir>/metrics.jsonl`; none if there is no such file.

    Each has the integer `step`; the other values are numbers, or "NaN", "Infinity", "-Infinity".
    """
    return read_json_lines(workdir / METRICS, "step")


def validation_losses(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """The validation losses in lines of metrics by step, in nats a token."""
    return {row["step"]: float(row["eval/loss"]) for row in rows if "eval/loss" in row}
