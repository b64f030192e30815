"""Tasks of lm-evaluation-harness (extra `eval`) on one of our models.

The harness has the tasks: their data, prompts and metrics. It asks a model for three things, which
`Answers` computes: log-likelihoods of continuations, log-likelihoods of whole texts, and generated
text. Texts are split, and cut on the left, as by the harness's own class for Hugging Face models,
`HFLM`, so that scores can be compared. One difference: a special token that is spelt out in a text
is ordinary text here.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxmars.config.errors import EXTERNAL_ERRORS, needs_extra
from maxmars.distributed.progress import Progress
from maxmars.eval.generate import GREEDY, Sampling, Tokens, generate_tokens
from maxmars.eval.loglikelihood import (
    Choices,
    LogLikelihoods,
    encode_choices,
    encode_context,
    pack_choices,
)
from maxmars.eval.trained_model import TrainedModel

PRESETS = {
    "mars_paper": (
        *("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande"),
        *("mmlu", "sciq"),
    ),
}
"""Names that stand for several tasks: the MARS paper (arXiv 2411.10438) reports 0-shot scores of
these nine."""

_SEED = 1234  # the harness's default for few-shot examples
_MAX_NEW_TOKENS = 256  # the harness's default as well
_GENERATION_ROWS = 16
# Arguments of transformers whose value here changes nothing.
_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    "top_k": 0,
    "early_stopping": False,
}
_IGNORED = ("use_cache",)  # what a token costs
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def run_lm_eval(
    model: TrainedModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    batch_size: int | None = None,
    seed: int = _SEED,
) -> dict[str, Any]:
    """Score a model on tasks of lm-evaluation-harness.

    Every process calls with the same arguments and gets the same result.

    Args:
      model: the model.
      tasks: names of tasks or groups of the harness, its `*` patterns, paths of task YAML files, or
        keys of `PRESETS`.
      limit: score the first so many questions of each task only.
      num_fewshot: number of solved examples before each question; None takes the task's own number,
        or 0. Tasks whose own number is 0 keep it.
      include_path: directory with more task YAML files.
      batch_size: rows scored at once, over all devices; None takes as many as suit the device.
      seed: seed of the few-shot examples and of sampling.

    Returns:
      `results` (task -> metric -> value; standard errors end in `_stderr`), `num_fewshot` and
      `num_questions` of each task, its `versions`, and the `harness` version.

    Raises:
      ImportError: lm-eval is not installed.
      ValueError: there is no such task, an argument is out of range, or the harness cannot run a
        task as its YAML file and data are.
      OSError: the data of a task cannot be had.
    """
    for name, value, least in [("limit", limit, 1), ("num_fewshot", num_fewshot, 0)]:
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}, or None.")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path={include_path} is no directory of task YAML files.")
    language_model = _language_model(Answers(model, batch_size=batch_size, seed=seed))
    paths = None if include_path is None else str(include_path)
    manager = _harness("tasks").TaskManager(include_path=paths)
    names = _task_names(tasks, manager, include_path)
    try:
        report = _harness("evaluator").simple_evaluate(
            language_model,
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            fewshot_random_seed=seed,
            log_samples=False,
        )
    except OSError as error:
        error.add_note(
            f"the data of {', '.join(tasks)} (without a network, take tasks whose YAML file names "
            "local files, or datasets in the cache of Hugging Face)"
        )
        raise
    except (*EXTERNAL_ERRORS, MemoryError, jax.errors.JaxRuntimeError) as error:
        error.add_note(f"lm-evaluation-harness, {', '.join(tasks)}")
        raise
    except Exception as error:  # YAML files, data and functions of tasks raise anything
        raise ValueError(
            f"lm-evaluation-harness, {', '.join(tasks)}: {type(error).__name__}: {error} "
            "(MAXMARS_TRACEBACK=1 shows where)"
        ) from error
    if report is None:  # where a launcher sets LOCAL_RANK, the harness reports on rank 0 only
        return {}
    results = {}
    for task, metrics in report["results"].items():
        # A metric's name is "NAME,FILTER". The other entries are the task's name and size, and
        # standard errors that the harness could not compute ("N/A").
        results[task] = {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if "," in name and isinstance(value, int | float)
        }
    return {
        "results": results,
        "num_fewshot": dict(report["n-shot"]),
        "num_questions": {task: n["effective"] for task, n in report["n-samples"].items()},
        "versions": dict(report["versions"]),
        "harness": f"lm-eval {importlib.metadata.version('lm_eval')}",
    }


class Answers:
    """Answers the harness's three kinds of requests with a model; arguments as of `run_lm_eval`."""

    def __init__(self, model: TrainedModel, *, batch_size: int | None, seed: int) -> None:
        self.model, self._seed, self._batch_size = model, seed, batch_size
        self._score = LogLikelihoods(model.config, model.mesh, batch_size=batch_size)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score (context, continuation) pairs: log-likelihood in nats, and whether it is greedy.

        Raises:
          ValueError: a continuation adds no token, or is longer than the model's context.
        """
        encoded = []
        for context, continuation in pairs:
            choices = encode_choices(
                context, [continuation], self.model.tokenizer, self.model.start
            )
            encoded.append((choices.context, choices.continuations[0]))
            if not len(choices.continuations[0]):
                raise ValueError(
                    f"the continuation {continuation!r} of {context[-40:]!r} adds no token to it, "
                    "which leaves nothing to score; change the task's prompt or choices."
                )
        return self.score(encoded)

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Log-likelihoods of whole texts after the token `start`, in nats; no token twice."""
        tokenizer, longest = self.model.tokenizer, self.model.config.max_seq_len
        windows = [
            list(rolling_windows(tokenizer.encode(t), self.model.start, longest)) for t in texts
        ]
        scores = iter(self.score([window for text in windows for window in text]))
        return [math.fsum(next(scores)[0] for _ in text) for text in windows]

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """The same as `log_likelihoods`, for token ids; cuts long contexts on the left."""
        choices = list(_group(pairs, self.model.config.max_seq_len))
        packed = pack_choices(choices, self.model.config)
        with Progress(stderr=True) as status:
            scores = self._score(
                self.model.params,
                packed,
                lambda done, total: status.update(f"scored {done:,} of {total:,} contexts"),
            )
        nats, greedy = map(np.concatenate, (scores.log_likelihoods, scores.is_greedy))
        return list(zip(nats.tolist(), greedy.tolist(), strict=True))

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continue the context of each (context, generation arguments), up to a stopping text.

        Raises:
          ValueError: an argument is unknown or out of range.
        """
        by_options: dict[_GenerationOptions, list[int]] = {}
        for number, (_, arguments) in enumerate(requests):
            by_options.setdefault(_generation_options(arguments), []).append(number)
        tokenizer, longest = self.model.tokenizer, self.model.config.max_seq_len
        texts = [""] * len(requests)
        for options, numbers in by_options.items():

            def is_complete(tokens: Tokens, options: _GenerationOptions = options) -> bool:
                return options.end(tokenizer.decode(tokens)) is not None

            # HFLM leaves room for the new tokens, and fails where they are more than the context.
            most = max(longest - options.max_new_tokens, longest // 2, 1)
            continuations = generate_tokens(
                self.model,
                [
                    encode_context(requests[i][0], tokenizer, self.model.start)[-most:]
                    for i in numbers
                ],
                max_new_tokens=options.max_new_tokens,
                sampling=options.sampling,
                seed=self._seed,
                batch_size=self._batch_size or _GENERATION_ROWS,
                stop=tokenizer.ends,
                is_complete=is_complete,
            )
            for number, text in zip(numbers, map(tokenizer.decode, continuations), strict=True):
                texts[number] = text[: options.end(text)]
        return texts


@dataclass(frozen=True, kw_only=True)
class _GenerationOptions:
    """How a task wants its text generated."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    def end(self, text: str) -> int | None:
        """Where the first stopping text begins in a text; None if there is none."""
        ends = [text.find(stop) for stop in self.until]
        return min((end for end in ends if end >= 0), default=None)


def _generation_options(arguments: Mapping[str, Any]) -> _GenerationOptions:
    given = {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in _IGNORED and _NEUTRAL.get(name, ...) != value
    }
    until = given.pop("until", ())
    lengths = [int(given.pop(name)) for name in _LENGTH_NAMES if name in given]
    temperature = float(given.pop("temperature", given.get("do_sample", False)))
    sampling = GREEDY
    if given.pop("do_sample", temperature > 0):
        sampling = Sampling(
            temperature=temperature, top_k=given.pop("top_k", None), top_p=given.pop("top_p", None)
        )
    for name in ("top_k", "top_p"):
        given.pop(name, None)  # they do not change greedy decoding
    if given:
        raise ValueError(
            f"a task's generation_kwargs have {', '.join(f'{k}={v}' for k, v in given.items())}, "
            "but maxmars only knows until, do_sample, temperature, top_k, top_p "
            f"and {', '.join(_LENGTH_NAMES)}."
        )
    return _GenerationOptions(
        until=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        max_new_tokens=lengths[0] if lengths else _MAX_NEW_TOKENS,
        sampling=sampling,
    )


def rolling_windows(
    tokens: Tokens, first: int, max_seq_len: int
) -> Iterator[tuple[Tokens, Tokens]]:
    """(context, continuation) pairs that score each token once, with as much context as fits.

    `first` is the token before `tokens`. The last window has fewer new tokens, so it has more
    context.
    """
    whole = np.concatenate([[first], tokens]).astype(np.int64)
    for start in range(1, len(whole), max_seq_len):
        end = min(start + max_seq_len, len(whole))
        yield whole[max(0, end - max_seq_len - 1) : start], whole[start:end]


def _group(pairs: Iterable[tuple[Tokens, Tokens]], max_seq_len: int) -> Iterator[Choices]:
    """Put successive continuations of one context together, as long as they fit into one row."""
    context: Tokens = np.zeros(0, int)
    continuations: list[Tokens] = []
    for its_context, continuation in pairs:
        length = len(context) + sum(map(len, continuations)) + len(continuation)
        if continuations and (length > max_seq_len or not np.array_equal(context, its_context)):
            yield Choices(context=context, continuations=continuations)
            continuations = []
        context = its_context
        continuations.append(continuation)
    if continuations:
        yield Choices(context=context, continuations=continuations)


def _language_model(answers: Answers) -> Any:
    """The model for the harness, which hands requests on to `answers`."""

    base: Any = _harness("api.model").LM

    class MaxmarsLM(base):  # here, since the harness may not be installed
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return answers.log_likelihoods([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return answers.rolling_log_likelihoods([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return answers.generate([request.args for request in requests])

    return MaxmarsLM()


def _harness(module: str) -> Any:
    with needs_extra("eval"):
        return importlib.import_module(f"lm_eval.{module}")


def _task_names(tasks: Sequence[str], manager: Any, include_path: str | Path | None) -> list[str]:
    """Names of the harness, and YAML files, for presets and patterns."""
    # The harness leaves out files that it cannot read; given by their path, it says why.
    files = [] if include_path is None else sorted(Path(include_path).rglob("*.yaml"))
    names = []
    for task in tasks:
        for name in PRESETS.get(task, (task,)):
            matches = [name] if Path(name).is_file() else manager.match_tasks([name])
            if not matches:
                line = re.compile(rf"^task: *['\"]?{re.escape(name)}['\"]? *$", re.MULTILINE)
                matches = [str(f) for f in files if line.search(f.read_text(errors="replace"))]
            if not matches:
                close = difflib.get_close_matches(name, manager.all_tasks, n=3)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(
                    f"lm-evaluation-harness has no task {name!r}, and there is no such YAML file."
                    f"{hint} `lm_eval ls tasks` lists its tasks; include_path adds your own."
                )
            names += matches
    return list(dict.fromkeys(names))
