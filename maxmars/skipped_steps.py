"""Files that describe steps whose update was not applied: what was wrong, and of which text."""

from __future__ import annotations

import functools
from typing import Any

from maxmars import distributed
from maxmars.config import TrainConfig
from maxmars.data.examples import Place
from maxmars.data.pipeline import TrainBatches
from maxmars.data.tokenizer import Tokenizer, saved_tokenizer
from maxmars.metrics import json_number, write_json
from maxmars.workdir import Workdir

_TEXT_CHARACTERS = 200
_EXPLANATION = (
    "The update of this step was not applied, for the given reason. The step was computed on the "
    "rows below. Row r is training example first_example + r: num_tokens tokens of a directory's "
    "split from token `start` on, which begin in the named file or record, and `text` is how they "
    "read at first. All of them: from maxmars.data.formats import open_split; "
    "open_split(directory, split).read(start, num_tokens)"
)


def write_skipped_step(
    workdir: Workdir,
    config: TrainConfig,
    batches: TrainBatches,
    *,
    step: int,
    first_example: int,
    found: dict[str, Any],
) -> str:
    """Write `<workdir>/skipped_steps/<step>.json`; only the primary process does.

    Args:
      workdir: of the run.
      config: of the run.
      batches: tell where the examples are.
      step: the step, counted from 1.
      first_example: index of its first example.
      found: what else is known of it: `reason`, `train/loss` and so on.

    Returns:
      Where it is, in words; or why it could not be written, which must not hide the step itself.
    """
    path = workdir / "skipped_steps" / f"{step}.json"
    if distributed.is_primary():
        try:
            write_json(path, _description(workdir, config, batches, step, first_example, found))
        except OSError as error:
            return f"its examples could not be written to {path} ({error})"
    return f"its examples are in {path}"


def _description(
    workdir: Workdir,
    config: TrainConfig,
    batches: TrainBatches,
    step: int,
    first_example: int,
    found: dict[str, Any],
) -> dict[str, Any]:
    tokenizer = _tokenizer(workdir)
    rows = []
    for row in range(config.global_batch_size):
        place = batches.place(first_example + row)
        rows.append(
            {
                "row": row,
                "microbatch": row // config.microbatch_size,
                "example": first_example + row,
                "directory": str(place.stream.directory),
                "split": place.stream.split,
                "start": place.start,
                **place.stream.locate(place.start),
                "text": _text(place, tokenizer),
            }
        )
    return {
        "explanation": _EXPLANATION,
        "step": step,
        **{key: json_number(v) if isinstance(v, float) else v for key, v in found.items()},
        "seed": config.seed,
        "order": config.data.order,
        "first_example": first_example,
        "num_tokens": config.model.max_seq_len + 1,
        "rows": rows,
    }


@functools.cache  # also where there is none: the attempt may take a while without network
def _tokenizer(workdir: Workdir) -> Tokenizer | None:
    try:
        return saved_tokenizer(workdir / "tokenizer")
    except (ValueError, ImportError, OSError):
        return None


def _text(place: Place, tokenizer: Tokenizer | None) -> str | None:
    """The beginning of an example, if it can be read."""
    if tokenizer is None:
        return None
    try:
        return tokenizer.decode(place.read())[:_TEXT_CHARACTERS]
    except (ValueError, OSError):
        return None
