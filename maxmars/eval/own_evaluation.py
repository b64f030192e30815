"""Evaluations of the user's own: functions from a trained model to numbers by name.

A run calls them on its parameters as it trains (`OwnInLoop`), `maxmars eval` on a loaded model. The
signature and the result are checked, and an error names the line in the user's file.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from maxmars.config import TrainConfig
from maxmars.config.errors import EXTERNAL_ERRORS, about, line_in_user_file
from maxmars.config.user_code import Source
from maxmars.data.batches import DataSplit
from maxmars.data.tokenizer import tokenizer_of_tokens
from maxmars.eval.trained_model import TrainedModel

# Raised unchanged: the command line prints these in one line, or with a traceback.
REPORTED_ERRORS = (*EXTERNAL_ERRORS, RuntimeError, MemoryError)


class OwnEvaluation:
    """A function of the user's own, `NAME(trained) -> {name: number, ...}`.

    Raises:
      FileNotFoundError, ValueError: there is no such function, or it cannot be called with one
        argument. An exception of the file's own code is raised as it is.
    """

    def __init__(self, source: Source | str, *, field: str = "eval.own") -> None:
        source = Source.parse(source, field=field, example="my_eval.py:rhyme")
        self._label = f"{field}={source!r}"
        self._function = source.load(field=field)
        self.name = source.function
        try:
            inspect.signature(self._function).bind(None)
        except TypeError as error:
            raise ValueError(
                f"{self._label} cannot be called with the trained model alone ({error}); it is "
                f"{self.name}(trained), with what maxmars.eval.load returns."
            ) from None

    def __call__(self, trained: TrainedModel) -> dict[str, float]:
        """The numbers of a model by name; every process of the model's mesh calls.

        The function may return arrays of shape [].

        Raises:
          ValueError: the function returns something else, or fails. OSError, ImportError,
            KeyError, RuntimeError and MemoryError are raised as they are.
        """
        with about(self._label):
            try:
                metrics: Any = self._function(trained)
            except REPORTED_ERRORS:
                raise
            except Exception as error:
                where = line_in_user_file(error)
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
            if not isinstance(metrics, Mapping) or not metrics:
                raise ValueError(f"it returned {metrics!r:.80}, {_REQUIRED}.")
            for name, value in metrics.items():
                if not (isinstance(name, str) and name and _is_number(value)):
                    shape = f" [{', '.join(map(str, np.shape(value)))}]" if np.ndim(value) else ""
                    raise ValueError(f"it returned {value!r:.60}{shape} for {name!r}, {_REQUIRED}.")
        return {name: float(value) for name, value in metrics.items()}


_REQUIRED = "but must return a dict of numbers by name, such as {'share': 0.5}"


def _is_number(value: Any) -> bool:
    if isinstance(value, str) or np.ndim(value):  # float("1") would pass
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


class OwnInLoop:
    """Calls a function of the user's own with the parameters of a run.

    Raises:
      FileNotFoundError, ValueError, ImportError: see `OwnEvaluation` and `tokenizer_of_tokens`.
    """

    def __init__(
        self, source: Source | str, config: TrainConfig, mesh: Mesh, training_data: DataSplit
    ) -> None:
        self._evaluation = OwnEvaluation(source)
        self._config, self._mesh = config, mesh
        self._tokenizer = tokenizer_of_tokens(training_data.vocabulary)
        self.name = self._evaluation.name
        self.time_metric = f"perf/{self.name}/time"
        """Name of the metric of the seconds that a call takes."""

    def __call__(
        self, params: Any, before_batch: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], str]:
        """Evaluate parameters in the mesh's shardings; every process calls.

        `before_batch` is called once before, and may end the evaluation by an exception.

        Returns:
          The metrics `eval/NAME/...` and `time_metric`; and the numbers as a line for people.
        """
        before_batch()
        started = time.monotonic()
        trained = TrainedModel(
            config=self._config.model,
            params=params,
            tokenizer=self._tokenizer,
            mesh=self._mesh,
            name=self._config.name,
        )
        numbers = self._evaluation(trained)
        seconds = time.monotonic() - started
        metrics = {f"eval/{self.name}/{name}": value for name, value in numbers.items()}
        text = f"{self.name}: {in_one_line(numbers)} in {seconds:.1f} s"
        return metrics | {self.time_metric: seconds}, text


def in_one_line(numbers: Mapping[str, float]) -> str:
    """Numbers by name for people: `share 0.5, count 12`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
