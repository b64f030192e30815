"""Receipts: what each session began with, saved and ended with, in a chain that `audit` checks.

`<workdir>/receipts.jsonl` gets a line where a session begins, for each checkpoint before it is
written, and where a session ends. Each line holds the hash of the one that it goes on from: a save
from the line before of its session, a session from the save of the checkpoint that it restored.
The checkpoint holds the line of its save. So lines lead from the newest checkpoint back to the
first step, and past saves that nothing went on from. Each line also holds the hash of the one above
it in the file, so that none can be taken away or put between, those of lost steps included.

There are no keys: whoever writes all lines anew is found only by computing the steps again.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from maxmars.checkpoint.receipts import FILE, Receipt, hash_of, read_receipts
from maxmars.distributed import processes
from maxmars.distributed.files import LineFile, Workdir, json_number

_LOGGER = logging.getLogger(__name__)

Metric = tuple[int, str, Any]
"""Step, key and value as in `metrics.jsonl`."""


def digest_of_metrics(metrics: Iterable[Metric], kind: str, first: int, last: int) -> str:
    """SHA-256, in hex, over the metrics that a receipt of this kind vouches for.

    These are the training metrics of the steps after `first` up to `last`, and the evaluations from
    step `first` on to the one before `last`: that of step `last` comes after the save. The end of a
    session vouches for it.
    """

    def counts(step: int, key: str) -> bool:
        if key.startswith("eval/"):
            return first <= step < last or (kind == "ended" and step == last)
        return key.startswith("train/") and first < step <= last

    chosen = sorted((metric for metric in metrics if counts(metric[0], metric[1])), key=str)
    return hashlib.sha256(json.dumps(chosen).encode()).hexdigest()


def metrics_of(rows: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """The metrics in lines of `metrics.jsonl`."""
    return [(row["step"], key, row[key]) for row in rows for key in row if key != "step"]


def chain_to(last: Receipt, receipts: Iterable[Receipt]) -> tuple[list[Receipt], str | None]:
    """The receipts that lead to `last`, which a checkpoint holds, in order, and the hash of the one
    that is missing before them; None where they lead to the first step."""
    known = {receipt["hash"]: receipt for receipt in receipts}
    chain, link = [], last["hash"]
    while link is not None and link in known:
        chain.append(known.pop(link))
        link = chain[-1]["previous"]
    return chain[::-1], link


def unvouched(
    rows: Iterable[Mapping[str, Any]], chain: Sequence[Receipt], receipts: Iterable[Receipt]
) -> list[tuple[int, int]]:
    """First and last step of the parts of the metrics that are not what a receipt vouches for.

    The evaluations of the step of the newest checkpoint may come after it, also from a session that
    went on from there: what counts is how the last of these sessions ended.

    Args:
      rows: lines of `metrics.jsonl`.
      chain: see `chain_to`.
      receipts: of the run, in the order of the file.
    """
    metrics = sorted(metrics_of(rows), key=lambda metric: metric[0])
    steps = [step for step, _, _ in metrics]
    pairs = list(itertools.pairwise(chain))
    if chain:
        newest, start, end = chain[-1], chain[-1], None
        for receipt in receipts:
            if receipt["kind"] == "began" and receipt["previous"] == newest["hash"]:
                start, end = receipt, None
            elif receipt["kind"] == "ended" and receipt["previous"] == start["hash"]:
                end = receipt
        pairs += [(start, end)] if end is not None else []
    found = []
    for before, receipt in pairs:
        if receipt["kind"] == "began":
            continue
        first, last = before["step"], receipt["step"]
        part = metrics[bisect.bisect_left(steps, first) : bisect.bisect_right(steps, last)]
        if digest_of_metrics(part, receipt["kind"], first, last) != receipt["metrics"]:
            found.append((first, last))
    return found


class Receipts:
    """Writes the receipts of one session; in processes other than the primary it does nothing.

    Args:
      workdir: directory of the run.
      step: that the session goes on from.
      digest: of the state that it has.
      position: of the data, in examples.
      previous: the receipt in the checkpoint that was restored; empty for a new run, and for a
        checkpoint without one.
      about: what the session runs on, with which batch size and data; JSON-ready.
      tokens: how many the run has trained on after a step; a save records them.
      may_write: see `files.LineFile`.
    """

    def __init__(
        self,
        workdir: Workdir,
        *,
        step: int,
        digest: str,
        position: int,
        previous: Receipt,
        about: Mapping[str, Any],
        tokens: Callable[[int], int],
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._tokens = tokens
        self._workdir, self._may_write, self._about = workdir, may_write, dict(about)
        self._start = step, digest, position
        self._previous = previous
        self._last: Receipt = {"hash": previous.get("hash"), "step": step}
        self._above: str | None = None
        self._metrics: list[Metric] = []
        self._lines: LineFile | None = None

    def begin(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The session begins, in a run with these lines of metrics.

        A warning says where receipts are missing, or metrics not what they vouch for.
        """
        if not processes.is_primary():
            return
        step, rows = self._start[0], list(rows)
        receipts = read_receipts(self._workdir, repair=True)
        self._above = receipts[-1]["hash"] if receipts else None
        self._compare(rows, receipts)
        self._metrics = [metric for metric in metrics_of(rows) if metric[0] == step]
        path = self._workdir / FILE
        self._lines = LineFile(path, self._may_write)
        self._write("began", *self._start, self._about)

    def _compare(self, rows: Sequence[Mapping[str, Any]], receipts: Sequence[Receipt]) -> None:
        if not self._previous:
            return
        chain, missing = chain_to(self._previous, receipts)
        if missing is not None:
            before = chain[0]["step"] if chain else self._last["step"]
            _LOGGER.warning(
                "%s lacks receipts of step %d or before; the run goes on, and `maxmars audit` will "
                "call it broken",
                self._workdir / FILE,
                before,
            )
        saved = [receipt for receipt in receipts if receipt["kind"] == "saved"]
        if saved and saved[-1]["step"] > self._last["step"]:
            _LOGGER.warning(
                "the checkpoint of step %d, which %s tells of, was not completed, or is gone or "
                "damaged; the steps after %d are made again",
                saved[-1]["step"],
                self._workdir / FILE,
                self._last["step"],
            )
        for first, last in unvouched(rows, chain, receipts):
            _LOGGER.warning(
                "%s is not what was recorded between steps %d and %d; training does not depend on "
                "it, and goes on",
                self._workdir / "metrics.jsonl",
                first,
                last,
            )

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The run has recorded these metrics."""
        if self._lines is not None:
            self._metrics += [(step, key, json_number(value)) for key, value in metrics.items()]

    def save(self, step: int, digest: str, position: int) -> Receipt:
        """A checkpoint of this state is about to be written; what to store in it."""
        return self._write("saved", step, digest, position, {"tokens": self._tokens(step)})

    def end(self) -> None:
        """The session ends, with the state that it saved last, or began with."""
        if self._lines is not None:
            last = self._last
            self._write("ended", last["step"], last["digest"], last["position"])

    def _write(
        self,
        kind: str,
        step: int,
        digest: str,
        position: int,
        about: Mapping[str, Any] | None = None,
    ) -> Receipt:
        if self._lines is None:
            return {}
        first = self._last["step"]
        receipt: Receipt = {
            "kind": kind,
            "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "step": step,
            "digest": digest,
            "position": position,
            "metrics": digest_of_metrics(self._metrics, kind, first, step),
            **(about or {}),
            "previous": self._last["hash"],
            "above": self._above,
        }
        receipt["hash"] = hash_of(receipt)
        self._lines.write(json.dumps(receipt))
        self._lines.sync()
        self._metrics = [metric for metric in self._metrics if metric[0] >= step]
        self._last, self._above = receipt, receipt["hash"]
        return receipt

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
