"""HellaSwag while a model trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from maxmars.config import TrainConfig
from maxmars.data.pipeline import SplitTokens
from maxmars.data.tokenizer import tokenizer_of
from maxmars.hellaswag.questions import load_questions
from maxmars.hellaswag.scores import HellaSwag


@dataclass(frozen=True, kw_only=True)
class LoopScores:
    """What a run reports."""

    metrics: dict[str, float]
    """`eval/hellaswag_acc` and `eval/hellaswag_acc_norm` (protocol `lm_eval`), the same with
    `hellaswag_completion`, and `perf/hellaswag_time` in seconds."""
    text: str
    """The same in a line."""


class HellaSwagInLoop:
    """Scores the questions of `eval.hellaswag_path` under the parameters of a run.

    Args:
      config: of the run.
      mesh: of the run.
      tokens: those it trains on, whose tokenizer is taken.

    Raises:
      FileNotFoundError, ValueError, ImportError: there are no questions, or no tokenizer, or they
        do not fit the model; see `load_questions` and `HellaSwag`.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, tokens: SplitTokens) -> None:
        """Read and encode the questions."""
        questions = load_questions(
            config.eval.hellaswag_path, num_questions=config.eval.hellaswag_questions
        )
        tokenizer = tokenizer_of(tokens.streams[0].directory, tokens.tokenizer)
        self._score = HellaSwag(config.model, mesh, tokenizer, questions)
        self._num_questions = len(questions)

    def __call__(self, params: Any) -> LoopScores:
        """Score parameters in the mesh's shardings; every process calls."""
        started = time.monotonic()
        scores = self._score(params)
        seconds = time.monotonic() - started
        metrics = {"perf/hellaswag_time": seconds}
        parts = []
        for protocol, prefix in (("lm_eval", "hellaswag"), ("completion", "hellaswag_completion")):
            summary = scores[protocol].summary()
            for metric in ("acc", "acc_norm"):
                metrics[f"eval/{prefix}_{metric}"] = summary[metric]
            parts.append(f"{summary['acc_norm']:.2%} ({protocol})")
        text = (
            f"HellaSwag acc_norm {', '.join(parts)} of {self._num_questions:,} questions in "
            f"{seconds:.1f} s"
        )
        return LoopScores(metrics=metrics, text=text)
