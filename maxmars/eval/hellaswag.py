"""HellaSwag: 10,042 beginnings of a text, each with four endings of which one is true.

Two protocols are in use. GPT-2 small has an `acc_norm` of 31.14 % under `lm_eval` and of 29.55 %
under `completion`:

* `lm_eval` is lm-evaluation-harness's, which the MARS paper reports. The activity's label stands
  before the context, texts are cleaned, and `acc_norm` divides each ending's log-likelihood by its
  number of characters.
* `completion` is that of nanoGPT and llm.c: the raw context and the raw endings are encoded apart,
  and `acc_norm` takes the ending whose tokens have the least mean loss.

Source: Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?", arXiv 1905.07830.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float64, Int

from maxmars.config import ModelConfig, TrainConfig
from maxmars.config.checks import CheckedConfig, NotNegative, Rule, from_json, require
from maxmars.config.data import COMPRESSIONS
from maxmars.config.errors import about, needs_extra
from maxmars.data.batches import DataSplit
from maxmars.data.rows import decompressed, reading
from maxmars.data.tokenizer import Tokenizer, tokenizer_of_tokens
from maxmars.distributed.files import cache_directory, parse_json, replacing, sha256_of, write_text
from maxmars.eval.loglikelihood import (
    Choices,
    LogLikelihoods,
    encode_choices,
    encode_context,
    pack_choices,
)

Protocol = Literal["lm_eval", "completion"]

_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
_TIMEOUT_S = 20.0


# --- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Question(CheckedConfig):
    """A context and four endings, of which `endings[label]` is the true one."""

    index: NotNegative[int]
    """Number of the question in the data set (`ind`)."""
    activity: str
    """The subject of the text (`activity_label`)."""
    context: str
    """The whole context (`ctx`)."""
    context_a: str
    """The context's whole sentences (`ctx_a`)."""
    context_b: str
    """The beginning of the sentence that the endings complete; may be empty (`ctx_b`)."""
    endings: Annotated[tuple[str, ...], Rule(lambda texts: len(texts) == 4, "must be four texts")]
    label: Annotated[int, Rule(lambda label: 0 <= label < 4, "must lie in [0, 4)")]
    """Number of the true ending."""


def load_questions(
    path: str | Path | None = None,
    *,
    num_questions: int | None = None,
) -> list[Question]:
    """Read questions from a file in HellaSwag's own format.

    Args:
      path: the file, one JSON object a line (`.jsonl`, also compressed) or one question a row
        (`.parquet`, as the hub has it). None takes the validation set (10,042 questions) from
        the cache directory (MAXMARS_CACHE, default ~/.cache/maxmars), and downloads it there first
        where it is missing.
      num_questions: number of questions to read, from the first on; None reads all.

    Raises:
      FileNotFoundError: there is no such file, or it cannot be downloaded.
      ValueError: a line or row is no question, the file is damaged, or the checksum of the
        downloaded file does not match.
      ImportError: the library for `.parquet` and `.zst` (extra `hf`) is not installed.
    """
    require(
        num_questions is None or num_questions > 0,
        f"the number of HellaSwag questions, {num_questions}, must be at least 1.",
    )
    file = _cached_validation_set() if path is None else Path(path).expanduser()
    questions = []
    for where, row in _rows(file):
        with about(f"{file}, {where}"):
            fields = row if isinstance(row, dict) else parse_json(row)
            questions.append(_question(fields, len(questions)))
        if len(questions) == num_questions:
            break
    if not questions:
        raise ValueError(f"{file} has no questions; it must have one JSON object a line.")
    return questions


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Location of each question, for messages, and its fields, as a dict or a line of JSON."""
    if file.suffix == ".parquet":
        with about(file), needs_extra("hf"):
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(file)
        for number, fields in enumerate(table.to_pylist()):
            yield f"row {number}", fields
        return
    compression = file.suffix if file.suffix in COMPRESSIONS else ""
    with reading(str(file)), file.open("rb") as raw:
        for number, line in enumerate(decompressed(raw, compression), 1):
            if line.strip():
                yield f"line {number}", line


def _question(row: Any, number: int) -> Question:
    """The question of a row; the row's number is the index where the fields have none."""
    fields = from_json(dict[str, Any], row)
    if fields["label"] in ("", None):
        raise ValueError("label is empty: the test set has none; use the validation set.")
    index = fields.get("ind")
    question = {
        "index": number if index is None else _whole("ind", index),
        "activity": fields["activity_label"],
        "context": fields["ctx"],
        "context_a": fields["ctx_a"],
        "context_b": fields["ctx_b"],
        "endings": fields["endings"],
        "label": _whole("label", fields["label"]),
    }
    return from_json(Question, question)


def _whole(name: str, value: Any) -> int:
    """The integer that a copy of the data may hold as text or as 3.0."""
    with contextlib.suppress(TypeError, ValueError):
        if float(value).is_integer():
            return int(float(value))
    raise ValueError(f"{name} is {value!r}, not a whole number.")


def _cached_validation_set() -> Path:
    path = cache_directory() / _URL.rpartition("/")[2]
    if not path.is_file():
        try:
            download(_URL, path, sha256=_SHA256)
        except (OSError, http.client.HTTPException) as error:
            raise FileNotFoundError(
                f"HellaSwag's validation set is not at {path} and could not be downloaded "
                f"({type(error).__name__}: {error}). Without network, download {_URL} on another "
                "machine and copy it there; or copy it anywhere and name the file: "
                "--hellaswag.path with `maxmars eval`, eval.hellaswag_path in a config."
            ) from error
    return path


def download(url: str, path: Path, *, sha256: str) -> None:
    """Download a file, compare its checksum, and only then rename it to `path`.

    Raises:
      OSError: the network or the disk fails.
      ValueError: the content has another checksum.
    """
    with replacing(path) as temporary:
        with (
            urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response,
            temporary.open("wb") as file,
        ):
            shutil.copyfileobj(response, file)
        digest = sha256_of(temporary)
        require(
            digest == sha256,
            f"{url} did not answer with the file that it should: its SHA-256 is {digest}, not "
            f"{sha256}. Try again, or get the file elsewhere and name its path.",
        )


# --- protocols ------------------------------------------------------------------------------------


def _encode_lm_eval(question: Question, tokenizer: Tokenizer) -> tuple[Choices, list[int]]:
    """Encode as lm-evaluation-harness 0.4 does (task `hellaswag`, version 1.0)."""
    sentence = f"{question.context_a} {question.context_b.capitalize()}"
    context = _clean(f"{question.activity}: {sentence}")
    endings = [_clean(ending) for ending in question.endings]
    choices = encode_choices(context, [f" {ending}" for ending in endings], tokenizer)
    return choices, [len(ending) for ending in endings]


def _clean(text: str) -> str:
    # The WikiHow half of the data set has markers such as [title] and [step].
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _encode_completion(question: Question, tokenizer: Tokenizer) -> tuple[Choices, list[int]]:
    """Encode as nanoGPT's and llm.c's scripts do: context and ending apart."""
    endings = [tokenizer.encode(f" {ending}") for ending in question.endings]
    context = encode_context(question.context, tokenizer)
    return Choices(context=context, continuations=endings), [len(ending) for ending in endings]


PROTOCOLS: Mapping[Protocol, Callable[[Question, Tokenizer], tuple[Choices, list[int]]]] = {
    "lm_eval": _encode_lm_eval,
    "completion": _encode_completion,
}
"""Functions that encode a question, and give the length of each ending, in characters or tokens, by
which `acc_norm` divides its log-likelihood."""

METRICS: Mapping[Protocol, str] = {"lm_eval": "hellaswag", "completion": "hellaswag_completion"}
"""Prefix of the names of a run's metrics, after `eval/`."""


# --- scores ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of questions under one protocol."""

    log_likelihoods: Float64[np.ndarray, "questions endings"]
    """Log-likelihood of each ending given its context, in nats."""
    lengths: Int[np.ndarray, "questions endings"]
    """Length of each ending, in characters (`lm_eval`) or tokens (`completion`)."""
    labels: Int[np.ndarray, " questions"]
    """Number of the true ending."""
    cut: Bool[np.ndarray, " questions"]
    """Whether the beginning of the context was cut off, so that the longest ending fits."""

    @cached_property
    def predictions(self) -> Int[np.ndarray, " questions"]:
        """Number of the likeliest ending."""
        return self.log_likelihoods.argmax(axis=1)

    @cached_property
    def predictions_norm(self) -> Int[np.ndarray, " questions"]:
        """Number of the ending that is likeliest for its length."""
        with np.errstate(divide="ignore"):  # cleaning can empty an ending, which then gets -inf
            return (self.log_likelihoods / self.lengths).argmax(axis=1)

    @property
    def correct(self) -> dict[str, Bool[np.ndarray, " questions"]]:
        """Whether each question is answered rightly, by metric: `acc` and `acc_norm`."""
        predictions = {"acc": self.predictions, "acc_norm": self.predictions_norm}
        return {metric: values == self.labels for metric, values in predictions.items()}

    def summary(self) -> dict[str, float | int]:
        """`acc` and `acc_norm` with standard errors (`acc_stderr`), `num_questions`, and `num_cut`,
        the number of questions with a cut context."""
        count = len(self.labels)
        values: dict[str, float | int] = {}
        for metric, correct in self.correct.items():
            accuracy = float(correct.mean())
            values[metric] = accuracy
            values[f"{metric}_stderr"] = (accuracy * (1 - accuracy) / max(count - 1, 1)) ** 0.5
        return values | {"num_questions": count, "num_cut": int(self.cut.sum())}


def _is_cut(choices: Choices, max_seq_len: int) -> bool:
    longest = max(map(len, choices.continuations))
    return len(choices.context) + longest > max_seq_len + 1  # the last token predicts nothing


class HellaSwag:
    """Scores a fixed list of questions, encoded once, under any parameters of a model.

    A context that is too long together with an ending loses its beginning, as in
    lm-evaluation-harness. A question with an ending that is too long by itself is left out.

    Args:
      config: the model.
      mesh: the mesh of the parameters.
      tokenizer: the model's tokenizer.
      questions: see `load_questions`.
      protocols: the protocols to score by.
      batch_size: see `LogLikelihoods`; a question is one row for each protocol.

    Raises:
      ValueError: the tokenizer has more tokens than the model, or all questions are left out.
    """

    questions: list[Question]
    """The questions that are scored, without those left out."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        tokenizer: Tokenizer,
        questions: Sequence[Question],
        *,
        protocols: Sequence[Protocol] = tuple(PROTOCOLS),
        batch_size: int | None = None,
    ) -> None:
        require(
            tokenizer.num_text_ids <= config.vocab_size,
            f"the tokenizer {tokenizer.name} has {tokenizer.num_text_ids} tokens, more than the "
            f"vocab_size={config.vocab_size} of the model; give the one it was trained with.",
        )
        fitting = []
        for question in questions:
            encoded = [PROTOCOLS[protocol](question, tokenizer) for protocol in protocols]
            endings = [ending for choice, _ in encoded for ending in choice.continuations]
            if all(0 < len(ending) <= config.max_seq_len for ending in endings):
                fitting.append((question, encoded))
        require(
            bool(fitting),
            f"each of the {len(questions)} HellaSwag questions has an ending that is longer than "
            f"the model's context, model.max_seq_len={config.max_seq_len}; leave HellaSwag out.",
        )
        self.questions = [question for question, _ in fitting]
        # The fields of `Scores` that do not depend on parameters.
        self._fixed: dict[Protocol, dict[str, np.ndarray]] = {}
        choices = []  # all questions under the first protocol, then under the second
        for number, protocol in enumerate(protocols):
            of_protocol = [encoded[number] for _, encoded in fitting]
            choices += [choice for choice, _ in of_protocol]
            cut = [_is_cut(choice, config.max_seq_len) for choice, _ in of_protocol]
            self._fixed[protocol] = {
                "lengths": np.array([lengths for _, lengths in of_protocol]),
                "labels": np.array([question.label for question in self.questions]),
                "cut": np.array(cut),
            }
        self._packed = pack_choices(choices, config)
        self._score = LogLikelihoods(config, mesh, batch_size=batch_size)

    def __call__(
        self, params: Any, progress: Callable[[int, int], None] | None = None
    ) -> dict[Protocol, Scores]:
        """Score parameters by each protocol; every process calls and gets all scores.

        Args:
          params: the parameters, in the mesh's shardings.
          progress: called with the number of rows scored so far, and of all.
        """
        nats = np.stack(self._score(params, self._packed, progress).log_likelihoods)
        by_protocol = np.split(nats, len(self._fixed))
        return {
            protocol: Scores(log_likelihoods=values, **fixed)
            for (protocol, fixed), values in zip(self._fixed.items(), by_protocol, strict=True)
        }


def write_scores(
    path: Path, questions: Sequence[Question], scores: Mapping[Protocol, Scores]
) -> None:
    """Write the scores of each question, one JSON object a line.

    Fields: `ind`, `label` and, by protocol, `log_likelihoods`, `lengths`, the predictions by which
    `acc` and `acc_norm` count (`choice`, `choice_norm`), and whether the context was `cut`.
    """
    lines = []
    for i, question in enumerate(questions):
        fields: dict[str, Any] = {"ind": question.index, "label": question.label}
        for protocol, of_protocol in scores.items():
            fields[protocol] = {
                "log_likelihoods": of_protocol.log_likelihoods[i].tolist(),
                "lengths": of_protocol.lengths[i].tolist(),
                "choice": int(of_protocol.predictions[i]),
                "choice_norm": int(of_protocol.predictions_norm[i]),
                "cut": bool(of_protocol.cut[i]),
            }
        lines.append(json.dumps(fields) + "\n")
    write_text(path, "".join(lines))


# --- two models -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of two models' accuracies on the same questions."""

    difference: float
    """First minus second."""
    interval_95: tuple[float, float]
    """95 % confidence interval of the difference, by Student's t over the questions."""
    mcnemar_p: float
    """p-value of McNemar's exact two-sided test that both models are equally good."""
    only_first: int
    """Number of questions that only the first model answers rightly."""
    only_second: int
    """Number of questions that only the second model answers rightly."""


def paired_difference(
    first: Bool[np.ndarray, " questions"], second: Bool[np.ndarray, " other"]
) -> PairedDifference:
    """Compare two models by the questions that each answers rightly.

    Raises:
      ValueError: the two are not of the same length, or empty.
    """
    count = len(first)
    require(
        0 < count == len(second),
        f"{count} and {len(second)} questions cannot be paired; score both models on the same.",
    )
    import scipy.stats  # takes a second, which no start of a training should wait for

    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    discordant = only_first + only_second
    difference = (only_first - only_second) / count
    p = scipy.stats.binomtest(only_first, discordant).pvalue if discordant else 1.0
    low = high = difference
    if discordant and count > 1:  # else the differences have no spread
        interval = scipy.stats.ttest_rel(first * 1.0, second * 1.0).confidence_interval(0.95)
        low, high = float(interval.low), float(interval.high)
    return PairedDifference(
        difference=difference,
        interval_95=(low, high),
        mcnemar_p=float(p),
        only_first=only_first,
        only_second=only_second,
    )


# --- while a model trains -------------------------------------------------------------------------


class HellaSwagInLoop:
    """Scores the questions of `eval.hellaswag_path` under the parameters of a run.

    The tokenizer of `training_data` encodes the questions.

    Raises:
      FileNotFoundError, ValueError, ImportError: there are no questions or no tokenizer, or one
        does not fit the model; see `load_questions` and `HellaSwag`.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, training_data: DataSplit) -> None:
        questions = load_questions(
            config.eval.hellaswag_path, num_questions=config.eval.hellaswag_questions
        )
        tokenizer = tokenizer_of_tokens(training_data.vocabulary)
        self._score = HellaSwag(config.model, mesh, tokenizer, questions)
        self._num_left_out = len(questions) - len(self._score.questions)

    def __call__(
        self, params: Any, before_batch: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], str]:
        """Score parameters in the mesh's shardings; every process calls.

        `before_batch` is called before each batch, and may end the scoring by an exception.

        Returns:
          The metrics `eval/hellaswag_acc` and `eval/hellaswag_acc_norm` (protocol `lm_eval`), the
          same with `hellaswag_completion`, `eval/hellaswag_questions` (number of scored ones), and
          `perf/hellaswag_time` in seconds; and the metrics as a line for people.
        """
        started = time.monotonic()
        before_batch()
        scores = self._score(params, lambda done, total: before_batch() if done < total else None)
        seconds = time.monotonic() - started
        metrics = {"perf/hellaswag_time": seconds}
        summaries = {protocol: of_protocol.summary() for protocol, of_protocol in scores.items()}
        for protocol, prefix in METRICS.items():
            for metric in ("acc", "acc_norm"):
                metrics[f"eval/{prefix}_{metric}"] = summaries[protocol][metric]
            metrics["eval/hellaswag_questions"] = summaries[protocol]["num_questions"]
        text = ", ".join(f"{s['acc_norm']:.2%} ({protocol})" for protocol, s in summaries.items())
        count = describe_count(summaries, self._num_left_out)
        return metrics, f"HellaSwag acc_norm {text} of {count} in {seconds:.1f} s"


def describe_count(summaries: Mapping[Protocol, Mapping[str, Any]], num_left_out: int) -> str:
    """Numbers of questions scored, cut and left out, for people: `5 questions (1 left out)`."""
    cut = {protocol: summary["num_cut"] for protocol, summary in summaries.items()}
    notes = [f"{count:,} cut ({protocol})" for protocol, count in cut.items() if count]
    if num_left_out:
        notes.append(f"{num_left_out:,} left out")
    count = max(summary["num_questions"] for summary in summaries.values())
    text = f"{count:,} question{'' if count == 1 else 's'}"
    return f"{text} ({', '.join(notes)}: longer than the model's context)" if notes else text
