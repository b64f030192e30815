"""What `maxmars eval` shows: progress bars, and a table of the scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from maxmars import distributed
from maxmars.eval_report import ModelScores, Report
from maxmars.hellaswag import Protocol


class ProgressBars:
    """Progress on stderr, on a terminal and by the primary process only; gone at the end."""

    def __init__(self) -> None:
        """Show nothing yet."""
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or not distributed.is_primary(),
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        """Begin to show."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bars away."""
        self._progress.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        """Say how much of something is done."""
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name)
        self._progress.update(self._bars[name], completed=done, total=total)


def print_report(report: Report) -> None:
    """Print the scores, and for two models their differences."""
    console = Console(highlight=False, soft_wrap=True)
    names = [model.name for model in report.models]
    table = Table("", *(n if n != names[0] or i == 0 else f"{n} " for i, n in enumerate(names)))
    differences = len(names) == 2
    if differences:
        table.add_column("difference")
        table.add_column("95 % interval")
        table.add_column("McNemar's p")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    if report.questions:
        console.print(
            f"{len(report.questions):,} HellaSwag questions; ± is one standard error", markup=False
        )


def print_harness_scores(name: str, found: Mapping[str, Any]) -> None:
    """Print what `run_lm_eval` found for a model of this name."""
    table = Table("task", "few-shot", "metric", name)
    table.columns[-1].justify = "right"
    for task, metrics in found["results"].items():
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            metric_name, comma, its_filter = metric.partition(",")
            error = metrics.get(f"{metric_name}_stderr{comma}{its_filter}")
            text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
            table.add_row(task, str(found["num_fewshot"].get(task, "")), metric, text)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{found['harness']}; ± is one standard error", markup=False)


def _rows(report: Report) -> Iterator[list[str]]:
    first = report.models[0]
    if first.loss is not None:
        losses = [m.loss for m in report.models if m.loss is not None]
        difference = report.loss_difference()
        extra = [] if difference is None else [f"{difference:+.4f}", "", ""]
        label = f"loss, nats a token ({first.loss.num_tokens:,} tokens)"
        yield [label, *(f"{loss.loss:.4f}" for loss in losses), *extra]
    differences = report.hellaswag_differences()
    for protocol in first.hellaswag:
        for metric in ("acc", "acc_norm"):
            extra = []
            if differences:
                d = differences[protocol][metric]
                low, high = d.interval_95
                extra = [
                    f"{100 * d.difference:+.2f}",
                    f"{100 * low:+.2f} to {100 * high:+.2f}",
                    f"{d.mcnemar_p:.2g}",
                ]
            scores = [_percent(model, protocol, metric) for model in report.models]
            yield [f"hellaswag {metric} ({protocol}), %", *scores, *extra]


def _percent(model: ModelScores, protocol: Protocol, metric: str) -> str:
    summary = model.hellaswag[protocol].summary()
    return f"{100 * summary[metric]:.2f} ± {100 * summary[f'{metric}_stderr']:.2f}"
