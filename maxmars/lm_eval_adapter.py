"""Tasks of lm-evaluation-harness (extra `eval`) under one of our models.

The harness knows the tasks: their data, prompts and metrics. It asks a model three things, which
`Answers` computes: log-likelihoods of continuations, of whole texts, and generated text. Texts are
split and cut on the left as by its own class for Hugging Face models, `HFLM`, so that scores can be
compared; a special token that is spelt out in a text is ordinary text here, though.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from maxmars.data.sources import LateStatus
from maxmars.data.tokenizer import Tokenizer
from maxmars.generate import generate_tokens
from maxmars.loglikelihood import Choices, LogLikelihoods, pack_choices
from maxmars.sampling import GREEDY, Sampling
from maxmars.trained_model import TrainedModel

PRESETS = {
    "mars_paper": (
        *("arc_easy", "arc_challenge", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande"),
        *("mmlu", "sciq"),
    ),
}
"""Names that stand for several tasks: those of the MARS paper (arXiv 2411.10438), of which it
reports 0-shot scores."""

_SEED = 1234  # the harness's default for few-shot examples
_MAX_NEW_TOKENS = 256  # the harness's default, too
_GENERATION_ROWS = 16
_LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

Tokens = Integer[np.ndarray, " _"]


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
    """Scores of a model in tasks of lm-evaluation-harness.

    Every process of a run calls with the same arguments and gets the same result.

    Args:
      model: the model.
      tasks: names of tasks or groups of the harness, its `*` patterns, paths of task YAML files, or
        keys of `PRESETS`.
      limit: take the first so many questions of each task only.
      num_fewshot: examples before each question; None is what the task says, else 0. Tasks that say
        0 keep it.
      include_path: directory with more task YAML files.
      batch_size: rows at once, over all devices; None takes what suits the device.
      seed: seed of the few-shot examples and of sampling.

    Returns:
      `results` (task -> metric -> value; standard errors end in `_stderr`), `num_fewshot` and
      `num_questions` of each task, its `versions`, and the `harness` version.

    Raises:
      ImportError: lm-eval is not installed.
      ValueError: there is no such task, or an argument is out of range.
      OSError: the data of a task cannot be had.
    """
    answers = Answers(model, batch_size=batch_size, seed=seed)
    for name, value, least in [("limit", limit, 1), ("num_fewshot", num_fewshot, 0)]:
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}, or None.")
    language_model = _language_model(answers)
    manager = _task_manager(include_path)
    names = _task_names(tasks, manager)
    try:
        found = _harness("evaluator").simple_evaluate(
            language_model,
            tasks=names,
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            fewshot_random_seed=seed,
            log_samples=False,
        )
    except OSError as error:
        raise OSError(
            f"lm-evaluation-harness could not get the data of {', '.join(tasks)}: {error}. Without "
            "a network, take tasks whose YAML file names local files (dataset_path: json with "
            "dataset_kwargs), or datasets that are in the cache of Hugging Face."
        ) from error
    return _summary(found)


class Answers:
    """What a model says to the harness's requests, which are texts.

    Args:
      model: the model.
      batch_size: rows at once, over all devices; None takes what suits the device.
      seed: seed of sampling.
    """

    def __init__(self, model: TrainedModel, *, batch_size: int | None, seed: int) -> None:
        """Compute nothing yet."""
        self._model, self._seed, self._batch_size = model, seed, batch_size
        self._score = LogLikelihoods(model.config, model.mesh, batch_size=batch_size)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): nats, and whether greedy decoding continues so.

        Raises:
          ValueError: a continuation adds no token, or is longer than the model's context.
        """
        return self.score([_encode_pair(*pair, self._model.tokenizer) for pair in pairs])

    def rolling_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Of each text after an end-of-text token, each of its tokens scored once, in nats."""
        tokenizer, longest = self._model.tokenizer, self._model.config.max_seq_len
        windows = [
            list(rolling_windows(tokenizer.encode(t), tokenizer.eot, longest)) for t in texts
        ]
        scores = iter(self.score([window for text in windows for window in text]))
        return [math.fsum(next(scores)[0] for _ in text) for text in windows]

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """As `log_likelihoods`, of token ids. Contexts that are too long are cut on the left."""
        choices = list(_group(pairs, self._model.config.max_seq_len))
        packed = pack_choices(choices, self._model.config.max_seq_len)
        with LateStatus() as status:

            def show(done: int, total: int) -> None:
                status.update(f"scored {done:,} of {total:,} contexts")

            found = self._score.with_greedy(self._model.params, packed, show)
        nats, greedy = map(np.concatenate, (found.log_likelihoods, found.is_greedy))
        return list(zip(nats.tolist(), greedy.tolist(), strict=True))

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Continuations of each (context, generation arguments), up to a stopping text.

        Raises:
          ValueError: an argument is unknown or out of range.
        """
        by_options: dict[_GenerationOptions, list[int]] = {}
        for number, (_, arguments) in enumerate(requests):
            by_options.setdefault(_generation_options(arguments), []).append(number)
        found = [""] * len(requests)
        for options, numbers in by_options.items():
            texts = self._generate([requests[i][0] for i in numbers], options)
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
        return found

    def _generate(self, contexts: Sequence[str], options: _GenerationOptions) -> list[str]:
        tokenizer, longest = self._model.tokenizer, self._model.config.max_seq_len
        # HFLM leaves room for what is generated, and fails where that is more than the context.
        most = max(longest - options.max_new_tokens, longest // 2, 1)
        found = generate_tokens(
            self._model,
            [_encode_context(context, tokenizer)[-most:] for context in contexts],
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling,
            seed=self._seed,
            batch_size=self._batch_size or _GENERATION_ROWS,
            stop=tokenizer.eot,
            is_complete=lambda tokens: options.end(tokenizer.decode(tokens)) is not None,
        )
        texts = map(tokenizer.decode, found)
        return [text[: options.end(text)] for text in texts]


@dataclass(frozen=True, kw_only=True)
class _GenerationOptions:
    """How a task wants its text."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    def end(self, text: str) -> int | None:
        """Where the first of the stopping texts begins; None if there is none."""
        places = [text.find(stop) for stop in self.until]
        return min((place for place in places if place >= 0), default=None)


def _generation_options(arguments: Mapping[str, Any]) -> _GenerationOptions:
    given = {name: value for name, value in arguments.items() if value is not None}
    until = given.pop("until", ())
    lengths = [int(given.pop(name)) for name in _LENGTH_NAMES if name in given]
    temperature = float(given.pop("temperature", given.get("do_sample", False)))
    sampling = GREEDY
    if given.pop("do_sample", temperature > 0):
        sampling = Sampling(
            temperature=temperature, top_k=given.pop("top_k", None), top_p=given.pop("top_p", None)
        )
    for name in ("top_k", "top_p"):
        given.pop(name, None)  # of no effect on greedy decoding
    if given:
        raise ValueError(
            f"a task's generation_kwargs have {', '.join(f'{k}={v}' for k, v in given.items())}, "
            "which maxmars does not know; it knows until, do_sample, temperature, top_k, top_p "
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

    The last window, where fewer tokens are left, takes the more context.

    Args:
      tokens: those to score.
      first: the token before them.
      max_seq_len: context of the model.
    """
    whole = np.concatenate([[first], tokens]).astype(np.int64)
    for start in range(1, len(whole), max_seq_len):
        end = min(start + max_seq_len, len(whole))
        yield whole[max(0, end - max_seq_len - 1) : start], whole[start:end]


def _encode_context(text: str, tokenizer: Tokenizer) -> Tokens:
    return tokenizer.encode(text) if text else np.array([tokenizer.eot])


def _encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """White space at the end of a context goes to the continuation, which is what their common
    encoding has beyond the length of the context's own."""
    stripped = context.rstrip()
    alone = tokenizer.encode(stripped)
    tokens = tokenizer.encode(context + continuation)[len(alone) :]
    if not len(tokens):
        raise ValueError(
            f"the continuation {continuation!r} of {context[-40:]!r} adds no token to it, which "
            "leaves nothing to score; change the task's prompt or choices."
        )
    return _encode_context(stripped, tokenizer), tokens


def _group(pairs: Iterable[tuple[Tokens, Tokens]], max_seq_len: int) -> Iterator[Choices]:
    """Successive continuations of one context together, as many as are no longer than a context."""
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
    """A model as the harness wants it: a subclass of its `LM` that hands requests on."""

    def loglikelihood(self: Any, requests: list[Any]) -> list[tuple[float, bool]]:
        return answers.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self: Any, requests: list[Any]) -> list[float]:
        return answers.rolling_log_likelihoods([request.args[0] for request in requests])

    def generate_until(self: Any, requests: list[Any]) -> list[str]:
        return answers.generate([request.args for request in requests])

    methods = (loglikelihood, loglikelihood_rolling, generate_until)
    base = _harness("api.model").LM  # a class statement would need it at import
    return type("MaxmarsLM", (base,), {method.__name__: method for method in methods})()


def _harness(module: str) -> Any:
    """A module of the harness.

    Raises:
      ImportError: the harness is not installed.
    """
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise ImportError(
            "tasks of lm-evaluation-harness need the package lm-eval (extra `eval`): "
            "pip install 'maxmars[eval]', or pip install lm-eval."
        ) from error


def _task_manager(include_path: str | Path | None) -> Any:
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path={include_path} is no directory of task YAML files.")
    paths = None if include_path is None else str(include_path)
    return _harness("tasks").TaskManager(include_path=paths)


def _task_names(tasks: Sequence[str], manager: Any) -> list[str]:
    """Presets and patterns written out.

    Raises:
      ValueError: there is no such task.
    """
    names = []
    for task in tasks:
        for name in PRESETS.get(task, (task,)):
            found = [name] if Path(name).is_file() else manager.match_tasks([name])
            if not found:
                close = difflib.get_close_matches(name, manager.all_tasks, n=3)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(
                    f"lm-evaluation-harness has no task {name!r}, and there is no such YAML file."
                    f"{hint} `lm_eval ls tasks` lists its tasks; include_path adds own ones."
                )
            names += found
    return list(dict.fromkeys(names))


def _summary(found: Mapping[str, Any] | None) -> dict[str, Any]:
    if found is None:  # under a launcher that sets LOCAL_RANK, the harness reports on rank 0 only
        return {}
    results = {}
    for task, metrics in found["results"].items():
        # A metric's name ends in the filter that its answers went through; what else is there are
        # the task's name and size, and errors that cannot be told ("N/A").
        results[task] = {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if "," in name and isinstance(value, int | float)
        }
    return {
        "results": results,
        "num_fewshot": dict(found["n-shot"]),
        "num_questions": {task: n["effective"] for task, n in found["n-samples"].items()},
        "versions": dict(found["versions"]),
        "harness": f"lm-eval {importlib.metadata.version('lm_eval')}",
    }
