"""Reading of `metrics.jsonl`, the metrics of a run; `README.md` lists the keys.

`sinks.MetricsFile` writes the file. Keys of validation are `eval/loss` on the training data's
split, `eval/NAME/loss` on a set of `eval.data`, and `eval/NAME/...` from a function of `eval.own`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from maxmars.distributed.files import read_json_lines
from maxmars.distributed.workdir import METRICS


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
    """The lines of `<workdir>/metrics.jsonl`; empty if there is no such file.

    Each line has an integer `step`; other values are numbers, or "NaN", "Infinity", "-Infinity".
    """
    return read_json_lines(epath.Path(workdir) / METRICS, "step")


def validation_keys(name: str | None) -> tuple[str, str]:
    """Keys of loss and bits per byte on the set `name` of `eval.data`; None means the validation
    split of the training data."""
    prefix = f"eval/{name}" if name else "eval"
    return f"{prefix}/loss", f"{prefix}/bits_per_byte"


def validation_losses(rows: Iterable[Mapping[str, Any]], name: str | None) -> dict[int, float]:
    """Validation losses in lines of metrics, by step, in nats a token; for `name` see
    `validation_keys`."""
    key, _ = validation_keys(name)
    return {row["step"]: float(row[key]) for row in rows if key in row}


def own_metric(key: str) -> tuple[str, str] | None:
    """Function and name in a key `eval/FUNCTION/NAME` of a number from `eval.own`, or set and name
    in one of `eval.data` such as `eval/SET/loss`; None for other keys."""
    kind, _, rest = key.partition("/")
    function, slash, name = rest.partition("/")
    return (function, name) if kind == "eval" and slash else None
