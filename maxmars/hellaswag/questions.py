"""HellaSwag's questions: the original jsonl, from a path, the cache, or the network."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxmars import distributed

_URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
_SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
_NUM_BYTES = 12_246_618
_TIMEOUT_S = 20.0
_PIECE_BYTES = 1 << 18
NUM_ENDINGS = 4

Progress = Callable[[int, int], None]
"""Called with the number of bytes that have come, and of all."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A context and four endings, of which `endings[label]` is the true one."""

    index: int
    """Its number in the data set (`ind`)."""
    activity: str
    """What the text is about (`activity_label`)."""
    context: str
    """The whole context (`ctx`)."""
    context_a: str
    """Its whole sentences (`ctx_a`)."""
    context_b: str
    """The beginning of the sentence that the endings complete; may be empty (`ctx_b`)."""
    endings: tuple[str, ...]
    label: int


def load_questions(
    path: str | Path | None = None,
    *,
    num_questions: int | None = None,
    progress: Progress | None = None,
) -> list[Question]:
    """The questions of a file in HellaSwag's own format, by default of the validation set.

    Args:
      path: the file, a JSON object a line. None is the validation set (10,042 questions) in the
        cache directory (MAXMARS_CACHE, default ~/.cache/maxmars), where it is downloaded to once.
      num_questions: take only so many, from the first on; None takes all.
      progress: called while the file is downloaded.

    Raises:
      FileNotFoundError: there is no such file, or it cannot be downloaded.
      ValueError: a line is no question, or the download is not the file that it should be.
    """
    if num_questions is not None and num_questions < 1:
        raise ValueError(f"the number of HellaSwag questions, {num_questions}, must be at least 1.")
    file = _cached_validation_set(progress) if path is None else Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"there is no file {file}; give the path of HellaSwag's hellaswag_val.jsonl, or none "
            "to have it downloaded."
        )
    questions = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                questions.append(_parse(line, f"line {number} of {file}"))
            if len(questions) == num_questions:
                break
    if not questions:
        raise ValueError(f"{file} has no questions; it should have a JSON object a line.")
    return questions


def _parse(line: bytes, where: str) -> Question:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); get the file anew.") from error
    wanted = {"ctx": str, "ctx_a": str, "ctx_b": str, "activity_label": str, "endings": list}
    for name, kind in wanted.items():
        if not isinstance(fields, dict) or not isinstance(fields.get(name), kind):
            raise ValueError(
                f"{where} is not a HellaSwag question: {name!r} is missing or no {_NAMES[kind]}; "
                "the file must have HellaSwag's own format."
            )
    endings = tuple(fields["endings"])
    if len(endings) != NUM_ENDINGS or not all(isinstance(e, str) for e in endings):
        raise ValueError(f"{where}: endings must be {NUM_ENDINGS} strings, not {endings!r}.")
    return Question(
        index=_integer(fields, "ind", where),
        activity=fields["activity_label"],
        context=fields["ctx"],
        context_a=fields["ctx_a"],
        context_b=fields["ctx_b"],
        endings=endings,
        label=_integer(fields, "label", where, NUM_ENDINGS),
    )


_NAMES = {str: "text", list: "list"}


def _integer(fields: dict[str, Any], name: str, where: str, end: int | None = None) -> int:
    """A number, which some copies of the data set write as text."""
    value = fields.get(name)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if type(value) is not int or value < 0 or (end is not None and value >= end):
        rule = "an integer from 0 on" if end is None else f"an integer in [0, {end})"
        hint = " (the test set has no labels; use the validation set)" if name == "label" else ""
        raise ValueError(f"{where}: {name}={value!r} must be {rule}{hint}.")
    return value


def _cached_validation_set(progress: Progress | None) -> Path:
    cache = Path(os.environ.get("MAXMARS_CACHE") or "~/.cache/maxmars").expanduser()
    path = cache / _URL.rpartition("/")[2]
    if not path.is_file():
        try:
            _download(path, progress if distributed.is_primary() else None)
        except OSError as error:  # every error of the network and of the disk
            raise FileNotFoundError(
                f"HellaSwag's validation set is not at {path} and could not be downloaded "
                f"({type(error).__name__}: {error}). Without network, download {_URL} on another "
                "machine, copy it to that place or anywhere, and in the latter case name the file: "
                "--hellaswag.path with `maxmars eval`, eval.hellaswag_path in a config."
            ) from error
    return path


def _download(path: Path, progress: Progress | None) -> None:
    """Put the file in place by one rename, once its checksum is known to be right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    sha, count = hashlib.sha256(), 0
    try:
        with (
            urllib.request.urlopen(_URL, timeout=_TIMEOUT_S) as response,
            temporary.open("xb") as f,
        ):
            while piece := response.read(_PIECE_BYTES):
                f.write(piece)
                sha.update(piece)
                count += len(piece)
                if progress is not None:
                    progress(count, _NUM_BYTES)
        if sha.hexdigest() != _SHA256:
            raise ValueError(
                f"what came from {_URL} is not HellaSwag's validation set: {count} bytes with "
                f"SHA-256 {sha.hexdigest()}, not {_NUM_BYTES} with {_SHA256}. Try again, or get "
                "the file elsewhere and name its path."
            )
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
