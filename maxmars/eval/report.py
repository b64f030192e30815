"""Scores of one model, or of two on the same data: what `maxmars eval` prints and writes.

`score_models` loads two models one after the other, so one model's memory suffices. Windows and
questions are chosen before from both configs, so both models get the same. `Report` holds the
scores as JSON-ready fields; the table and the notes are made from these.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from maxmars.checkpoint.environment import environment
from maxmars.config import EvalConfig, ModelConfig
from maxmars.config.user_code import Source
from maxmars.data.batches import UNKNOWN_TOKENIZER, DataSplit, ValidationBatches
from maxmars.data.own_data import OwnWindows
from maxmars.data.tokenizer import difference
from maxmars.data.verification import verify_split
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import json_number, write_json
from maxmars.distributed.progress import Progress
from maxmars.eval.hellaswag import (
    HellaSwag,
    Protocol,
    Question,
    Scores,
    describe_count,
    paired_difference,
    write_scores,
)
from maxmars.eval.own_evaluation import OwnEvaluation
from maxmars.eval.trained_model import Target, TrainedModel, load
from maxmars.eval.validation import ValidationLoss, make_eval_step, validation_loss

_LOSSES = ("loss", "bits_per_byte")
_LOSS_TOKENS = 4096  # a batch on each device: 0.8 GB of logits with GPT-2's vocabulary


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores of one model, or of two on the same data."""

    fields: dict[str, Any]
    """For JSON: `target`, `name`, `source` (`TrainedModel.origin`), `digest` and `environment`. As
    far as requested: `loss` (nats a token), `loss_tokens`, `bits_per_byte` (see `ValidationLoss`;
    `NAME/loss` and so on where the data have a name), `hellaswag` (see `Scores.summary`, by
    protocol), `hellaswag_left_out` (a number of questions), and `own` (numbers of the user's own
    functions, by function and name; non-finite numbers are strings). For two models: `against`,
    with the fields of the second, and `difference`, first minus second."""
    questions: Sequence[Question]
    scores: Sequence[Mapping[Protocol, Scores]]
    """HellaSwag's scores of each model."""

    def write(self, path: Path) -> None:
        """Write the JSON and, beside it, `<stem>[.against].hellaswag.jsonl` with each question.

        Only the primary process writes.
        """
        if not processes.is_primary():
            return
        write_json(path, self.fields)
        for scores, suffix in zip(self.scores, ("", ".against"), strict=False):
            if scores:  # without HellaSwag they are empty
                file = path.with_name(f"{path.stem}{suffix}.hellaswag.jsonl")
                write_scores(file, self.questions, scores)

    @property
    def _models(self) -> list[dict[str, Any]]:
        return [self.fields, *filter(None, [self.fields.get("against")])]

    def notes(self) -> list[str]:
        """Lines below the table: names of two models, and the data that each score is of."""
        models = self._models
        notes = [f"{key}: {model['name']}" for key, model in zip("AB", models, strict=False)]
        notes = notes if len(models) > 1 else []
        for prefix in loss_prefixes(self.fields):
            name, count = prefix.replace("/", " "), self.fields[f"{prefix}loss_tokens"]
            notes.append(f"{name}loss: nats a token, mean over {count:,} tokens")
        if "hellaswag" in self.fields:
            left_out = self.fields["hellaswag_left_out"]
            counts = [describe_count(model["hellaswag"], left_out) for model in models]
            if len(set(counts)) > 1:  # a model of a shorter context cuts more questions
                counts = [f"{count} by {key}" for key, count in zip("AB", counts, strict=True)]
            notes += [f"HellaSwag: {count}" for count in dict.fromkeys(counts)]
            notes.append("HellaSwag is in %, by two protocols; ± is one standard error")
        return notes

    def table(self) -> Table:
        """The scores and, for two models, their differences with McNemar's p; fits 80 columns."""
        first, models = self.fields, self._models
        alone = len(models) == 1
        names = [first["name"]] if alone else ["A", "B", "A - B", "95 % interval", "p"]
        table = _table("", *names)
        difference = first.get("difference", {})
        for name in _loss_names(first):
            values = [model.get(name) for model in models]
            if None not in values:
                texts = [f"{value:.4f}" for value in values]
                texts += [] if alone else [f"{difference[name]:+.4f}"]
                data, _, loss = name.rpartition("/")
                table.add_row(f"{data} {loss.replace('_', ' ')}".strip(), *texts)
        for function, numbers in first.get("own", {}).items():
            for name in numbers:  # the second model's function may return other names
                own_metrics = [model["own"][function].get(name) for model in models]
                values = ["" if value is None else f"{float(value):.4g}" for value in own_metrics]
                if name in difference.get("own", {}).get(function, {}):
                    values.append(f"{float(difference['own'][function][name]):+.4g}")
                table.add_row(escape(f"{function} {name}"), *values)
        for protocol in first.get("hellaswag", {}):
            table.add_row(f"hellaswag {protocol}" if alone else protocol)
            for metric in ("acc", "acc_norm"):
                scores = [model["hellaswag"][protocol] for model in models]
                values = [
                    f"{100 * s[metric]:.2f} ± {100 * s[f'{metric}_stderr']:.2f}" for s in scores
                ]
                if not alone:
                    paired = difference["hellaswag"][protocol][metric]
                    low, high = paired["interval_95"]
                    values += [
                        f"{100 * paired['difference']:+.2f}",
                        f"{100 * low:+.2f} to {100 * high:+.2f}",
                        f"{paired['mcnemar_p']:.2g}",
                    ]
                table.add_row(f"  {metric}", *values)
        return table


def loss_prefixes(fields: Mapping[str, Any]) -> list[str]:
    """Prefixes of the losses among a model's fields: `NAME/`, or "" for data without a name, as the
    validation split of a run's own data."""
    return [key.removesuffix("loss") for key in fields if re.fullmatch("(.+/)?loss", key)]


def _loss_names(fields: Mapping[str, Any]) -> list[str]:
    return [f"{prefix}{loss}" for prefix in loss_prefixes(fields) for loss in _LOSSES]


def _table(label: str, *columns: str) -> Table:
    """Make a table of numbers beside labels; long cells are folded, not cut."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(label, overflow="fold")
    for name in columns:
        table.add_column(escape(name), justify="right", overflow="fold")
    return table


def score_models(
    targets: Sequence[Target],
    mesh: Mesh,
    *,
    data: Callable[[ModelConfig], dict[str, DataSplit]] | None = None,
    num_windows: int = EvalConfig.num_windows,
    questions: Sequence[Question] = (),
    own: Sequence[Source | str] = (),
    batch_size: int | None = None,
) -> Report:
    """Score one model, or two on the same data.

    For two models, the windows of the validation loss are as long as the shorter context, and a
    HellaSwag question that is left out for one is left out for both (see `HellaSwag`).

    Args:
      targets: one model or two.
      mesh: the mesh of the parameters; every process calls.
      data: opens the validation data for a model, by name (see `open_validation`).
      num_windows: number of windows to score.
      questions: of HellaSwag, see `load_questions`.
      own: functions of the user's own.
      batch_size: rows scored at once, over all devices; None takes as many as suit the device.

    Raises:
      FileNotFoundError, ImportError, ValueError: a file is missing or does not fit the model.
    """
    validation: dict[str, tuple[ValidationBatches, DataSplit]] = {}
    num_questions, models, scores = len(questions), [], []
    scorers: list[HellaSwag] = []
    with Progress(stderr=True) as status:

        def show_progress(task: str) -> Callable[[int, int], None]:
            return lambda done, total: status.update(f"{task} {done:,}/{total:,}", done, total)

        if data is not None:
            validation = _open_validation(targets, data, num_windows, mesh, batch_size)
        evaluations = [OwnEvaluation(source, field="own") for source in own]
        if questions:
            with status.waiting("encoding HellaSwag"):
                scorers = _scorers(targets, questions, mesh, batch_size)
                questions = scorers[0].questions
        for i, target in enumerate(targets):
            model = load(target, mesh=mesh)
            fields: dict[str, Any] = {"target": target.path, "name": model.name}
            fields |= {"source": model.origin, "digest": model.digest}
            hellaswag: Mapping[Protocol, Scores] = {}
            for name, (batches, split) in validation.items():
                loss = _loss(model, batches, split, show_progress(f"loss of {model.name}"))
                prefix = f"{name}/" if name else ""
                fields |= {f"{prefix}loss": loss.loss, f"{prefix}loss_tokens": loss.num_tokens}
                fields |= {f"{prefix}bits_per_byte": loss.bits_per_byte}
            if scorers:
                hellaswag = scorers[i](model.params, show_progress(f"HellaSwag of {model.name}"))
                fields["hellaswag"] = {protocol: s.summary() for protocol, s in hellaswag.items()}
            for evaluation in evaluations:
                status.update(f"{evaluation.name} of {model.name}")
                numbers = {name: json_number(x) for name, x in evaluation(model).items()}
                fields.setdefault("own", {})[evaluation.name] = numbers
            models.append(fields)
            scores.append(hellaswag)
            del model  # its parameters make room for those of the next
    fields = models[0]
    if questions:
        fields["hellaswag_left_out"] = num_questions - len(questions)
    if len(models) == 2:
        fields |= {"against": models[1], "difference": _difference(models, scores)}
    fields["environment"] = environment(mesh)
    return Report(fields=fields, questions=questions, scores=scores)


def _scorers(
    targets: Sequence[Target],
    questions: Sequence[Question],
    mesh: Mesh,
    batch_size: int | None,
) -> list[HellaSwag]:
    """Make a scorer of the same questions for each target."""
    scorers = []
    for target in targets:
        config = target.config()
        score = HellaSwag(config, mesh, target.tokenizer(config), questions, batch_size=batch_size)
        scorers.append(score)
    # Models of different contexts or tokenizers may leave out different questions.
    common = set.intersection(*(set(score.questions) for score in scorers))
    if any(len(score.questions) > len(common) for score in scorers):
        return _scorers(targets, [q for q in questions if q in common], mesh, batch_size)
    return scorers


def _difference(
    models: Sequence[dict[str, Any]], scores: Sequence[Mapping[Protocol, Scores]]
) -> dict[str, Any]:
    """Differences, first model minus second: the losses, HellaSwag by protocol and metric, and the
    numbers of the user's own functions that both models have."""
    difference = {}
    for name in _loss_names(models[0]):
        first, second = (model.get(name) for model in models)
        if first is not None and second is not None:
            difference[name] = first - second
    if scores[0]:
        difference["hellaswag"] = {
            protocol: {
                metric: dataclasses.asdict(
                    paired_difference(correct, scores[1][protocol].correct[metric])
                )
                for metric, correct in first.correct.items()
            }
            for protocol, first in scores[0].items()
        }
    if "own" in models[0]:
        difference["own"] = {
            function: {
                name: json_number(float(value) - float(models[1]["own"][function][name]))
                for name, value in numbers.items()
                if name in models[1]["own"][function]
            }
            for function, numbers in models[0]["own"].items()
        }
    return difference


def _open_validation(
    targets: Sequence[Target],
    data: Callable[[ModelConfig], dict[str, DataSplit]],
    num_windows: int,
    mesh: Mesh,
    batch_size: int | None,
) -> dict[str, tuple[ValidationBatches, DataSplit]]:
    """Open the validation data: the batches to score, and their split, by name."""
    configs = sorted((t.config() for t in targets), key=lambda config: config.max_seq_len)
    try:
        # Opened for both models, which checks the data against both; the shorter windows are taken.
        splits, *_ = [data(config) for config in configs]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error} The loss is measured there; name the directory by --data.path, or leave the "
            "loss out (--tasks hellaswag)."
        ) from error
    length = configs[0].max_seq_len
    rows = batch_size or max(1, _LOSS_TOKENS // length) * sharding.batch_shards(mesh)
    for split in splits.values():
        verify_split(split.files, "val")
    return {
        name: (ValidationBatches(split, mesh, num_windows=num_windows, batch_size=rows), split)
        for name, split in splits.items()
    }


def _loss(
    model: TrainedModel,
    batches: ValidationBatches,
    split: DataSplit,
    progress: Callable[[int, int], None],
) -> ValidationLoss:
    # Only data of the user's own may leave the tokenizer open.
    is_own = all(isinstance(part, OwnWindows) for part in split.parts)
    is_undeclared = is_own and split.vocabulary.tokenizer == UNKNOWN_TOKENIZER
    if not is_undeclared and (problem := difference(model.tokenizer, split.vocabulary)):
        raise ValueError(
            f"the tokens in {split.parts[0].path} are of another tokenizer than {model.name}: "
            f"{problem}; name its own by --data.path, or leave the loss out (--tasks hellaswag)."
        )

    def shown() -> Iterator[dict[str, jax.Array]]:
        for number, batch in enumerate(batches, 1):
            yield batch
            progress(number, len(batches))

    step = make_eval_step(model.config, model.mesh, model.tokenizer.bytes_of_tokens())
    return validation_loss(step, model.mesh, model.params, shown())


def harness_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a result of `run_lm_eval`: task, number of few-shot examples, metric with its filter,
    and value with standard error."""
    for task, metrics in report["results"].items():
        for metric, value in metrics.items():
            if "_stderr" in metric:
                continue
            metric_name, comma, filter_name = metric.partition(",")
            error = metrics.get(f"{metric_name}_stderr{comma}{filter_name}")
            text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
            yield task, str(report["num_fewshot"].get(task, "")), metric, text


def harness_table(name: str, report: Mapping[str, Any]) -> Table:
    """Table of a result of `run_lm_eval`, under the model's name."""
    table = _table("task", "few-shot", "metric", name)
    table.columns[2].justify = "left"
    for task, shots, metric, text in harness_rows(report):
        table.add_row(task, shots, metric.removesuffix(",none"), text)
    return table
