"""Scores of trained models on tasks: what `maxmars eval` prints and writes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from maxmars import distributed, hf, sharding
from maxmars.checkpoint import load_config
from maxmars.config import EvalConfig, GPT2Config
from maxmars.config_checks import require
from maxmars.data.pipeline import ValidationBatches, open_data
from maxmars.data.tokenizer import Tokenizer, tokenizer_of
from maxmars.data_config import DataConfig, TokenShardsConfig
from maxmars.evaluate import ValidationLoss, make_eval_step, validation_loss
from maxmars.hellaswag import (
    HellaSwag,
    PairedDifference,
    Protocol,
    Question,
    Scores,
    compare,
    load_questions,
    write_questions,
)
from maxmars.metrics import environment, write_json
from maxmars.trained_model import HFTarget, RunTarget, TrainedModel, find_target, open_trained_model

Task = Literal["loss", "hellaswag"]
TASKS: tuple[Task, ...] = ("loss", "hellaswag")
Progress = Callable[[str, int, int], None]
"""Called with what is under way, how much of it is done, and how much there is."""

_LOSS_TOKENS = 4096  # a batch, on each device: its logits are 0.8 GB with GPT-2's vocabulary
_SAMPLE = "She reads 3 books:\n\n\tnaïve  café, don't  stop!"


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Where the validation loss is measured."""

    path: str | None = None
    """Directory of tokens, whose validation split is taken; None takes the data of the run that is
    evaluated."""
    num_windows: int | None = None
    """Windows of the model's context to score; None takes as many as the run does, or 512."""

    def __post_init__(self) -> None:
        """Reject empty evaluations."""
        require(
            self.num_windows is None or self.num_windows > 0,
            f"num_windows={self.num_windows} must be positive.",
        )


@dataclass(frozen=True, kw_only=True)
class HellaSwagOptions:
    """Which questions are scored; see `load_questions`."""

    path: Path | None = None
    num_questions: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """What was found for one model; None and empty for a task that was not asked for."""

    target: str
    name: str
    loss: ValidationLoss | None
    hellaswag: Mapping[Protocol, Scores]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        fields: dict[str, Any] = {"target": self.target, "name": self.name}
        if self.loss is not None:
            fields |= {"loss": self.loss.loss, "loss_tokens": self.loss.num_tokens}
        if self.hellaswag:
            fields["hellaswag"] = {name: s.summary() for name, s in self.hellaswag.items()}
        return fields


@dataclass(frozen=True, kw_only=True)
class Report:
    """Scores of one model, or of two on the same data."""

    models: tuple[ModelScores, ...]
    questions: Sequence[Question]
    environment: Mapping[str, Any]

    def loss_difference(self) -> float | None:
        """First minus second, in nats a token; None without two losses."""
        losses = [model.loss.loss for model in self.models if model.loss is not None]
        return losses[0] - losses[1] if len(losses) == 2 else None

    def hellaswag_differences(self) -> dict[Protocol, dict[str, PairedDifference]]:
        """First minus second by protocol and metric; empty without two models."""
        if len(self.models) != 2:
            return {}
        first, second = (model.hellaswag for model in self.models)
        return {
            protocol: {
                metric: compare(correct, second[protocol].correct[metric])
                for metric, correct in scores.correct.items()
            }
            for protocol, scores in first.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The first model's scores and, of two, the other's under `against` and `difference`."""
        fields = self.models[0].to_json()
        for other in self.models[1:]:
            fields["against"] = other.to_json()
            difference: dict[str, Any] = {}
            if (loss := self.loss_difference()) is not None:
                difference["loss"] = loss
            if found := self.hellaswag_differences():
                difference["hellaswag"] = {
                    protocol: {metric: dataclasses.asdict(d) for metric, d in metrics.items()}
                    for protocol, metrics in found.items()
                }
            fields["difference"] = difference
        return fields | {"environment": dict(self.environment)}

    def write(self, path: Path) -> None:
        """Write the JSON and, beside it, `<stem>[.against].hellaswag.jsonl` with each question.

        Only the primary process does.
        """
        if not distributed.is_primary():
            return
        write_json(path, self.to_json())
        for model, part in zip(self.models, ("", ".against"), strict=False):
            if model.hellaswag:
                file = path.with_name(f"{path.stem}{part}.hellaswag.jsonl")
                write_questions(file, self.questions, model.hellaswag)


def evaluate(
    targets: Sequence[str | Path],
    mesh: Mesh,
    *,
    tasks: Sequence[Task] | None = None,
    loss: LossOptions | None = None,
    hellaswag: HellaSwagOptions | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Score one model, or two on the same data.

    The validation loss is measured on windows as long as the shorter of the contexts of two models.

    Args:
      targets: one or two; see `open_trained_model`. Of two, the second is scored on the data of
        the first.
      mesh: where the models go, one after the other; every process calls.
      tasks: None scores HellaSwag and, if there is validation data, the loss.
      loss: where the loss is measured.
      hellaswag: which questions are scored.
      batch_size: rows scored at once, over all devices; None takes what suits the device.
      progress: called now and then.

    Raises:
      FileNotFoundError, ImportError, ValueError: something is missing or does not fit the model.
    """
    loss, hellaswag = loss or LossOptions(), hellaswag or HellaSwagOptions()
    found = [find_target(target) for target in targets]
    windows, questions = None, []
    if batch_size is not None:
        require(batch_size > 0, f"batch_size={batch_size} must be positive.")
    if tasks is None or "loss" in tasks:
        windows = _open_windows(found, loss, mesh, batch_size)
        if windows is None and tasks is not None:
            raise ValueError(
                f"{targets[0]} is a Hugging Face directory, which has no validation data; name a "
                "directory of tokens (--data.path DIR), or leave the loss out (--tasks hellaswag)."
            )
    if tasks is None or "hellaswag" in tasks:
        questions = load_questions(
            hellaswag.path,
            num_questions=hellaswag.num_questions,
            progress=_named(progress, "downloading HellaSwag"),
        )
    models = []
    for target in targets:
        model = open_trained_model(target, mesh=mesh)
        models.append(
            ModelScores(
                target=str(target),
                name=model.name,
                loss=None if windows is None else _loss(model, windows, progress),
                hellaswag=_hellaswag(model, questions, batch_size, progress) if questions else {},
            )
        )
        del model  # its parameters make room for those of the next
    return Report(models=tuple(models), questions=questions, environment=environment(mesh))


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """Validation windows, and the tokenizer they must be of."""

    batches: ValidationBatches
    tokenizer: Tokenizer
    where: Path


def _open_windows(
    targets: Sequence[RunTarget | HFTarget],
    options: LossOptions,
    mesh: Mesh,
    batch_size: int | None,
) -> _Windows | None:
    """The windows to measure the loss on; None where nothing says which."""
    first, num_windows = targets[0], options.num_windows
    if options.path is not None:
        data: DataConfig = TokenShardsConfig(path=options.path)
    elif isinstance(first, RunTarget):
        run = load_config(first.checkpoints, first.step)
        data, num_windows = run.data, num_windows or run.eval.num_windows
    else:
        return None
    configs = [_model_config(target) for target in targets]
    try:
        tokens, *_ = [open_data(data, "val", model=config) for config in configs]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error} The loss is measured there; name the directory by --data.path, or leave the "
            "loss out (--tasks hellaswag)."
        ) from error
    length = min(config.max_seq_len for config in configs)
    stream = tokens.streams[0]
    batches = ValidationBatches(
        tokens,
        mesh,
        length=length,
        num_windows=num_windows or EvalConfig.num_windows,
        batch_size=batch_size or max(1, _LOSS_TOKENS // length) * sharding.batch_shards(mesh),
    )
    tokenizer = tokenizer_of(stream.directory, stream.tokenizer)
    return _Windows(batches=batches, tokenizer=tokenizer, where=stream.directory)


def _model_config(target: RunTarget | HFTarget) -> GPT2Config:
    match target:
        case RunTarget():
            return load_config(target.checkpoints, target.step).model
        case HFTarget():
            return hf.load_config(target.directory)


def _loss(model: TrainedModel, windows: _Windows, progress: Progress | None) -> ValidationLoss:
    ours, theirs = (t.encode(_SAMPLE).tolist() for t in (model.tokenizer, windows.tokenizer))
    if ours != theirs:
        raise ValueError(
            f"the tokens in {windows.where} are those of another tokenizer "
            f"({windows.tokenizer.name}) than that of {model.name} ({model.tokenizer.name}); "
            "name tokens of its own by --data.path, or leave the loss out (--tasks hellaswag)."
        )
    eval_step = make_eval_step(model.config, model.mesh)
    batches = _counted(windows.batches, _named(progress, f"loss of {model.name}"))
    return validation_loss(eval_step, model.params, batches)


def _hellaswag(
    model: TrainedModel,
    questions: Sequence[Question],
    batch_size: int | None,
    progress: Progress | None,
) -> dict[Protocol, Scores]:
    score = HellaSwag(model.config, model.mesh, model.tokenizer, questions, batch_size=batch_size)
    return score(model.params, _named(progress, f"HellaSwag of {model.name}"))


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else functools.partial(progress, name)


def _counted(
    items: ValidationBatches, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[jax.Array, jax.Array]]:
    for number, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(number, len(items))
