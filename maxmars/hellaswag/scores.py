"""Scoring the questions under a model, and what comes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float64, Int

from maxmars.config import GPT2Config
from maxmars.data.tokenizer import Tokenizer
from maxmars.hellaswag.protocols import PROTOCOLS, Protocol, encode_questions
from maxmars.hellaswag.questions import Question
from maxmars.loglikelihood import LogLikelihoods, Progress, pack_choices


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Questions under one protocol."""

    log_likelihoods: Float64[np.ndarray, "questions endings"]
    """Of each ending given its context, in nats."""
    lengths: Int[np.ndarray, "questions endings"]
    """Of each ending: in characters (`lm_eval`) or tokens (`completion`)."""
    labels: Int[np.ndarray, " questions"]
    """The number of the true ending."""

    @cached_property
    def choices(self) -> Int[np.ndarray, " questions"]:
        """The likeliest ending."""
        return self.log_likelihoods.argmax(axis=1)

    @cached_property
    def choices_norm(self) -> Int[np.ndarray, " questions"]:
        """The ending that is likeliest for its length."""
        with np.errstate(divide="ignore"):  # an ending of which cleaning leaves nothing never is
            return (self.log_likelihoods / self.lengths).argmax(axis=1)

    @property
    def correct(self) -> Mapping[str, Bool[np.ndarray, " questions"]]:
        """Which questions are answered rightly: by metric, `acc` and `acc_norm`."""
        return {"acc": self.choices == self.labels, "acc_norm": self.choices_norm == self.labels}

    def summary(self) -> dict[str, float | int]:
        """`acc`, `acc_norm`, a standard error of each (`acc_stderr`), and `num_questions`."""
        count = len(self.labels)
        values: dict[str, float | int] = {}
        for metric, correct in self.correct.items():
            share = float(correct.mean())
            values[metric] = share
            values[f"{metric}_stderr"] = (share * (1 - share) / max(count - 1, 1)) ** 0.5
        return values | {"num_questions": count}


class HellaSwag:
    """Scores a fixed list of questions under a model; encodes them once.

    Args:
      config: the model.
      mesh: of the parameters.
      tokenizer: of the model.
      questions: see `load_questions`.
      protocols: those to score by.
      batch_size: see `LogLikelihoods`; a question is a row for each protocol.

    Raises:
      ValueError: the tokenizer has more tokens than the model, or an ending does not fit into the
        model's context.
    """

    def __init__(
        self,
        config: GPT2Config,
        mesh: Mesh,
        tokenizer: Tokenizer,
        questions: Sequence[Question],
        *,
        protocols: Sequence[Protocol] = tuple(PROTOCOLS),
        batch_size: int | None = None,
    ) -> None:
        """Encode the questions."""
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, more than the "
                f"model's vocab_size={config.vocab_size}; give the one that the model was trained "
                "with."
            )
        self._labels = np.array([question.label for question in questions])
        encoded = [
            encode_questions(questions, protocol, tokenizer, config.max_seq_len)
            for protocol in protocols
        ]
        self._lengths = {
            protocol: np.array([question.lengths for question in found])
            for protocol, found in zip(protocols, encoded, strict=True)
        }
        choices = [question.choices for found in encoded for question in found]
        self._packed = pack_choices(choices, config.max_seq_len)
        self._log_likelihoods = LogLikelihoods(config, mesh, batch_size=batch_size)

    def __call__(self, params: Any, progress: Progress | None = None) -> dict[Protocol, Scores]:
        """The scores by protocol; every process calls and gets them.

        Args:
          params: the parameters, in the mesh's shardings.
          progress: called with the number of rows that are done and of all: see `LogLikelihoods`.
        """
        found = np.stack(self._log_likelihoods(params, self._packed, progress))
        parts = np.split(found, len(self._lengths))
        return {
            protocol: Scores(log_likelihoods=part, lengths=lengths, labels=self._labels)
            for (protocol, lengths), part in zip(self._lengths.items(), parts, strict=True)
        }


def write_questions(
    path: Path, questions: Sequence[Question], scores: Mapping[Protocol, Scores]
) -> None:
    """Write what was found for each question, a JSON object a line.

    Fields: `ind`, `label` and, by protocol, `log_likelihoods`, `lengths`, and which endings `acc`
    and `acc_norm` take (`choice`, `choice_norm`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        for i, question in enumerate(questions):
            fields: dict[str, Any] = {"ind": question.index, "label": question.label}
            for protocol, found in scores.items():
                fields[protocol] = {
                    "log_likelihoods": found.log_likelihoods[i].tolist(),
                    "lengths": found.lengths[i].tolist(),
                    "choice": int(found.choices[i]),
                    "choice_norm": int(found.choices_norm[i]),
                }
            file.write(json.dumps(fields) + "\n")
    temporary.replace(path)
