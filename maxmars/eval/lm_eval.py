"""Tasks of lm-evaluation-harness (extra `eval`) on one of our models.

The harness has the tasks: their data, prompts and metrics. `Answers` computes the three things that
it requests of a model: log-likelihoods of continuations and of whole texts, and new text. Texts are
split, and cut on the left, as by the harness's own class for Hugging Face models, `HFLM`, so that
scores can be compared. One difference: a special token spelt out in a text is ordinary text here.
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
"""Names that stand for several tasks. The MARS paper (arXiv 2411.10438) reports 0-shot scores of
these nine."""

_SEED = 1234  # the harness's default for few-shot examples
_MAX_NEW_TOKENS = 256  # the harness's default
_GENERATION_ROWS = 16
# Values of transformers' arguments that change no text: a task may spell out a default.
_NEUTRAL = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    "top_k": 0,
    "early_stopping": False,
}
_IGNORED = ("use_cache",)  # changes the speed alone
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
      limit: number of questions to score of each task, from the first on; None scores all.
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
      OSError: the data of a task cannot be read or downloaded.
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
    """Answers of a model to the harness's three kinds of requests; see `run_lm_eval`."""

    def __init__(self, model: TrainedModel, *, batch_size: int | None, seed: int) -> None:
        self.model, self._seed, self._batch_size = model, seed, batch_size
        self._score = LogLikelihoods(model.config, model.mesh, batch_size=batch_size)

    def log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Score (context, continuation) pairs: log-likelihood in nats, and whether greedy decoding
        gives the continuation.

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
        """Log-likelihoods of whole texts after the token `start`, in nats."""
        tokenizer, max_seq_len = self.model.tokenizer, self.model.config.max_seq_len
        windows = [
            list(rolling_windows(tokenizer.encode(text), self.model.start, max_seq_len))
            for text in texts
        ]
        scores = iter(self.score([window for text in windows for window in text]))
        return [math.fsum(next(scores)[0] for _ in text) for text in windows]

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        """Score pairs of token ids as `log_likelihoods` does; cuts long contexts on the left."""
        choices = list(_group_pairs(pairs, self.model.config.max_seq_len))
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
        """Continue each context of (context, generation arguments) pairs, up to a stopping text.

        Raises:
          ValueError: an argument is unknown or out of range.
        """
        by_options: dict[_GenerationOptions, list[int]] = {}
        for number, (_, arguments) in enumerate(requests):
            by_options.setdefault(_generation_options(arguments), []).append(number)
        tokenizer, max_seq_len = self.model.tokenizer, self.model.config.max_seq_len
        texts = [""] * len(requests)
        for options, numbers in by_options.items():

            def is_complete(tokens: Tokens, options: _GenerationOptions = options) -> bool:
                return options.end(tokenizer.decode(tokens)) is not None

            # As HFLM, leave room for the new tokens; HFLM fails where they fill the whole context.
            max_prompt = max(max_seq_len - options.max_new_tokens, max_seq_len // 2, 1)
            continuations = generate_tokens(
                self.model,
                [
                    encode_context(requests[i][0], tokenizer, self.model.start)[-max_prompt:]
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
    """The arguments with which a task generates text."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    def end(self, text: str) -> int | None:
        """Index at which the first stopping text begins in a text; None without one."""
        ends = [text.find(stop) for stop in self.until]
        return min((end for end in ends if end >= 0), default=None)


def _generation_options(arguments: Mapping[str, Any]) -> _GenerationOptions:
    kwargs = {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in _IGNORED and _NEUTRAL.get(name, ...) != value
    }
    until = kwargs.pop("until", ())
    lengths = [int(kwargs.pop(name)) for name in _LENGTH_NAMES if name in kwargs]
    # transformers samples at temperature 1 unless a task says otherwise.
    temperature = float(kwargs.pop("temperature", kwargs.get("do_sample", False)))
    sampling = GREEDY
    if kwargs.pop("do_sample", temperature > 0):
        sampling = Sampling(
            temperature=temperature,
            top_k=kwargs.pop("top_k", None),
            top_p=kwargs.pop("top_p", None),
        )
    for name in ("top_k", "top_p"):  # which do not change greedy decoding
        kwargs.pop(name, None)
    if kwargs:
        raise ValueError(
            f"a task's generation_kwargs have {', '.join(f'{k}={v}' for k, v in kwargs.items())}, "
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
    """Cut tokens into (context, continuation) pairs that score each token once.

    `first` is the token before `tokens`. Each context is as long as fits: the last window, which
    has fewer new tokens, has a longer context.
    """
    all_tokens = np.concatenate([[first], tokens]).astype(np.int64)
    for start in range(1, len(all_tokens), max_seq_len):
        end = min(start + max_seq_len, len(all_tokens))
        yield all_tokens[max(0, end - max_seq_len - 1) : start], all_tokens[start:end]


def _group_pairs(pairs: Iterable[tuple[Tokens, Tokens]], max_seq_len: int) -> Iterator[Choices]:
    """Put successive continuations of one context together, as long as they fit into one row."""
    context: Tokens = np.zeros(0, int)
    continuations: list[Tokens] = []
    for next_context, continuation in pairs:
        length = len(context) + sum(map(len, continuations)) + len(continuation)
        if continuations and (length > max_seq_len or not np.array_equal(context, next_context)):
            yield Choices(context=context, continuations=continuations)
            continuations = []
        context = next_context
        continuations.append(continuation)
    if continuations:
        yield Choices(context=context, continuations=continuations)


def _language_model(answers: Answers) -> Any:
    """Make the model for the harness, which hands requests on to `answers`."""

    base: Any = _harness("api.model").LM

    class MaxmarsLM(base):  # not at the top of the file: the harness may not be installed
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
    """Resolve presets, patterns and files into the harness's names and paths of YAML files."""
    # A file that the harness cannot read is missing among its tasks; by its path, it says why.
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
