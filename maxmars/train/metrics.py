"""What a run recorded of its steps, `metrics.jsonl`, as read; `README.md` lists the keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from maxmars.distributed.files import read_json_lines
from maxmars.distributed.workdir import METRICS


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
    """The lines of `<workdir>/metrics.jsonl`; none if there is no such file.

    Each has the integer `step`; the other values are numbers, or "NaN", "Infinity", "-Infinity".
    """
    return read_json_lines(epath.Path(workdir) / METRICS, "step")


def validation_keys(name: str | None) -> tuple[str, str]:
    """The keys of loss and bits per byte on a set of `eval.data`; without a name those on the
    validation split of the training data."""
    prefix = f"eval/{name}" if name else "eval"
    return f"{prefix}/loss", f"{prefix}/bits_per_byte"


def validation_losses(rows: Iterable[Mapping[str, Any]], name: str | None) -> dict[int, float]:
    """The losses of `validation_keys` in lines of metrics by step, in nats a token."""
    key, _ = validation_keys(name)
    return {row["step"]: float(row[key]) for row in rows if key in row}


def own_metric(key: str) -> tuple[str, str] | None:
    """Function and name of a number that a function of `eval.own` returned, by its key
    `eval/FUNCTION/NAME`, or a set of `eval.data` and `loss` or `bits_per_byte`; None of another
    key."""
    kind, _, rest = key.partition("/")
    function, slash, name = rest.partition("/")
    return (function, name) if kind == "eval" and slash else None
