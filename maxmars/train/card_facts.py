"""What a model card can tell: what the run of a checkpoint recorded, and what reports measured."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maxmars.checkpoint import Checkpoint
from maxmars.checkpoint.journal import Line, read_journal
from maxmars.checkpoint.reader import DamagedError
from maxmars.config import TrainConfig
from maxmars.distributed.files import (
    Workdir,
    read_json,
    read_json_object,
    resolve,
)
from maxmars.distributed.workdir import DATA, IMPORTED_FROM
from maxmars.eval.hellaswag import describe_count
from maxmars.eval.report import harness_rows
from maxmars.eval.trained_model import Exported
from maxmars.train.audit import Audit, audit
from maxmars.train.journal import (
    Session,
    began_in,
    changes_of_config,
    lines_to,
    sessions_of,
    trajectory,
)
from maxmars.train.metrics import read_metrics

_PATH = re.compile(
    # Of a disk, also in hf:/path and file:///path, and gs://; of https:// nothing.
    r"(?<![\w./-])(?:gs:/|file://|~\w*)?/(?:[^\s'\"`(),;:=/]+/)*([^\s'\"`(),;:=/]+)/?"
)
_PROTOCOLS = {"lm_eval": "hellaswag", "completion": "hellaswag_completion"}

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Score:
    """An accuracy on HellaSwag."""

    protocol: str
    metric: str
    share: float
    num_questions: int | None
    """None where it was not recorded."""

    @property
    def interval_95(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the share; None where the number of questions is unknown."""
        if not self.num_questions:
            return None
        import scipy.stats  # takes a second

        right = round(self.share * self.num_questions)
        test = scipy.stats.binomtest(right, self.num_questions)
        interval = test.proportion_ci(0.95, method="wilson")
        return float(interval.low), float(interval.high)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an evaluation of the exported model found."""

    scores: Sequence[Score] = ()
    remark: str = ""
    """About questions that are longer than the model's context."""
    loss: float | None = None
    """Validation loss of `maxmars eval`, nats a token."""
    loss_tokens: int = 0
    tasks: Sequence[tuple[str, str, str, str]] = ()
    """Of lm-evaluation-harness; see `harness_rows`."""
    harness: str = ""
    """Name and version of the harness."""


def read_report(path: str | Path) -> Fields:
    """What `maxmars eval --output` wrote.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is another one.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"--report {path} is no file; `maxmars eval TARGET --output {path}` writes one."
        )
    fields = read_json_object(file)
    if not isinstance(fields.get("name"), str) or "environment" not in fields:
        raise ValueError(f"{path} is no report of `maxmars eval TARGET --output FILE.json`.")
    return fields


class Facts:
    """What a run recorded, up to the step of the exported checkpoint."""

    def __init__(self, stored: Checkpoint) -> None:
        self.stored = stored
        self.config = stored.config if isinstance(stored.config, TrainConfig) else None
        self.workdir: Workdir = resolve(stored.path).parent.parent
        self.rows: list[dict[str, Any]] = []
        self.sessions: list[Session] = []
        self.chain: list[Line] = []
        if self.config is None:
            return
        rows = read_metrics(self.workdir)
        self.rows = [row for row in rows if 0 <= row["step"] <= stored.step]
        lines = read_journal(self.workdir)
        self.sessions = sessions_of(lines)
        self.chain = trajectory(lines_to(lines, stored.journal) or ())

    @property
    def began(self) -> list[Line]:
        """The lines with which the sessions before the checkpoint began."""
        return began_in(self.chain)

    @cached_property
    def data(self) -> list[dict[str, Any]]:
        """The parts of the data; none where they were not recorded."""
        return (read_json(self.workdir / DATA) or {"parts": []})["parts"]

    @property
    def changes(self) -> dict[int, str]:
        """The fields of the config that changed on the way, in words, by step."""
        return changes_of_config(self.chain)

    @property
    def imported_from(self) -> str:
        """The Hugging Face model of an import, in words; empty where that is unknown."""
        found = read_json(self.workdir / IMPORTED_FROM)
        return "" if found is None else f" from `{public(found['source'])}`"

    @property
    def tokens(self) -> int:
        """Tokens that the model was trained on, as `summary.json` counts them."""
        return self.stored.tokens

    def last(self, key: str) -> tuple[int, float] | None:
        """Step and value of the last line that has a metric."""
        return next(((r["step"], float(r[key])) for r in reversed(self.rows) if key in r), None)

    @property
    def measured(self) -> Measured:
        """HellaSwag as the run measured it at the step of the checkpoint."""
        assert self.config is not None
        row: dict[str, Any] = {}
        for line in self.rows:
            if line["step"] == self.stored.step and "eval/hellaswag_acc" in line:
                row = line
        count = row.get("eval/hellaswag_questions")
        count = count if type(count) is int else None
        scores = [
            Score(protocol=protocol, metric=metric, share=float(row[key]), num_questions=count)
            for protocol, prefix in _PROTOCOLS.items()
            for metric in ("acc", "acc_norm")
            if 0 <= float(row.get(key := f"eval/{prefix}_{metric}", -1)) <= 1
        ]
        how = {"cut": "lost the beginning of their context", "leave_out": "were left out"}
        told = how[self.config.eval.hellaswag_too_long]
        remark = f"Questions longer than the model's context, if any, {told}."
        return Measured(scores=scores, remark=remark)

    @cached_property
    def audited(self) -> Audit | str:
        """The audit without its expensive part, or why there is none."""
        try:
            return audit(self.workdir, compare_arrays=False, log=lambda text: None)
        except (ValueError, OSError, DamagedError) as error:
            return str(error)

    @property
    def is_from_scratch(self) -> bool:
        """Whether the journal says that the first weights were drawn at random."""
        return bool(self.began) and self.began[0]["step"] == 0 and not self._start

    @property
    def _start(self) -> Any:
        """The `init_from` of the first session; True where that is unknown."""
        return self.began[0]["init_from"] if self.began else True

    @property
    def origin(self) -> str | None:
        """What the first weights were; None where that is unknown."""
        start = self._start
        if self.is_from_scratch:
            assert self.config is not None
            return f"drawn at random (seed {self.config.seed})"
        if not isinstance(start, dict):
            return None
        state = " with their optimizer's state" if start["optimizer_state"] else ""
        run, _, step = start["weights"].rpartition("/checkpoints/")
        place = f"{public(run)}/checkpoints/{step}" if run else public(start["weights"])
        return f"those of `{place}`{state} (digest `{start['params_digest']}`)"


def reported(exported: Exported, reports: Sequence[Fields]) -> Measured:
    """What reports on this model say; of two that say the same, the later one.

    Raises:
      ValueError: a report is on another model, or damaged.
    """
    measured = Measured()
    digest = exported.source.digest if isinstance(exported.source, Checkpoint) else None
    for report in reports:
        models = [report, *filter(None, [report.get("against")])]
        found = [
            model
            for model in models
            if model.get("digest") == digest and (digest or model["name"] == exported.name)
        ]
        if not found:
            which = "" if digest is None else f", digest {digest[:16]}"
            raise ValueError(
                f"--report: these are scores of {' and '.join(m['name'] for m in models)}, and "
                f"not of {exported.name}{which}; `{eval_command(exported)}` makes those."
            )
        try:
            if "loss" in found[0]:
                loss, count = float(found[0]["loss"]), int(found[0]["loss_tokens"])
                measured = dataclasses.replace(measured, loss=loss, loss_tokens=count)
            if "harness" in found[0]:
                tasks = [*measured.tasks, *harness_rows(found[0])]
                harness = str(found[0]["harness"])
                measured = dataclasses.replace(measured, tasks=tasks, harness=harness)
            if "hellaswag" in found[0]:
                summaries = found[0]["hellaswag"]
                scores = [
                    Score(
                        protocol=protocol,
                        metric=metric,
                        share=float(summary[metric]),
                        num_questions=int(summary["num_questions"]),
                    )
                    for protocol, summary in summaries.items()
                    for metric in ("acc", "acc_norm")
                ]
                remark = f"Scored: {describe_count(summaries, report['hellaswag_left_out'])}."
                measured = dataclasses.replace(measured, scores=scores, remark=remark)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"--report: the scores of {exported.name} are damaged ({error!r}); "
                f"`{eval_command(exported)}` makes them anew."
            ) from error
    return measured


def eval_command(exported: Exported) -> str:
    """The command that measures the exported model, for people."""
    source = exported.source
    place = source.path if isinstance(source, Checkpoint) else source.source
    return shlex.join(["maxmars", "eval", str(place), "--output", "scores.json"])


def public(text: str) -> str:
    """A text with its paths shortened to their last names."""
    return _PATH.sub(r"\1", text)
