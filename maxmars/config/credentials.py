"""The refusal of credentials where a value enters the records of a run.

Whoever may read a working directory reads its records, and a model card publishes some of them. So
a user's own function reads its credentials from the environment. Patterns are narrow on purpose: an
honest option that they refuse ends a run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from maxmars.config.checks import UsageError

_NAMES = (
    r"(?:password|passwd|secret|credentials?|api[_-]?key|private[_-]?key"
    r"|(?:access|auth|hf)[_-]?token)"
)
_NAME = re.compile(rf"(.*_)?{_NAMES}")
_LOGIN = re.compile(r"://[^\s/?#\"'<>]+@")  # not gs://bucket/a@b
_TEXTS = {
    "a token of the Hugging Face hub": re.compile(r"\bhf_[A-Za-z0-9]{16}"),
    "a token of GitHub, GitLab or Slack": re.compile(
        r"\b(gh[a-z]_|github_pat_|glpat-|xox[a-z]-)[\w-]{12}"
    ),
    "an API key": re.compile(r"\b(sk-[\w-]*[A-Za-z0-9]{16}|AIza[\w-]{35})"),
    "an access key of AWS": re.compile(r"\bA[KS]IA[0-9A-Z]{16}"),
    "a private key": re.compile(r"-BEGIN [A-Z ]*PRIVATE KEY"),
    # eyJ is {" in base64, with which both parts of a JSON Web Token begin.
    "a signed token": re.compile(r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}"),
    # In lower case `bearer` is an English word: there what follows must have a digit.
    "a header with a token": re.compile(
        r"(?i:\bAuthorization[\"']?\s*[:=]\s*[\"']?\w)|\bBearer\s+[\w.~+/=-]{6}"
        r"|(?i:\bbearer\s+(?=\S*\d)\S{8})"
    ),
    # In a query, a connection string or a header; the `password: {x}` of a template is no value.
    "a value of {}": re.compile(rf"(?i)(?<![^\W_])({_NAMES})[\"']?\s*[:=]\s*[\"']?[^\s\"'<{{|]"),
}


def refuse_credentials(value: Any, name: str) -> None:
    """Refuse a value with the name of a credential, or a text that looks like one.

    `text_key`, `answer_token` and `signature` are names like any other; None, True, False and ""
    are no credentials under any name.

    Args:
      value: anything; each item of dataclasses, mappings, lists and tuples is checked.
      name: name of the value for the error, such as `data.options`.

    Raises:
      UsageError: the value is or holds a credential. The message has the name and not the value.
    """
    # The last part of `data.options.db_password` or `--api-key`; apiKey and api-key are api_key.
    leaf = name.rpartition(".")[2].lstrip("-")
    leaf = re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", leaf).lower()
    if value and not isinstance(value, bool) and _NAME.fullmatch(leaf):
        raise UsageError(_refusal(name, "is named as credentials are"))
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            refuse_credentials(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            refuse_credentials(item, name)
    elif isinstance(value, str):
        if _LOGIN.search(value):
            raise UsageError(
                f"{name} is an address with a login; leave the login out of it, and read it from "
                "the environment in your own function."
            )
        for what, pattern in _TEXTS.items():
            if (match := pattern.search(value)) is not None:
                raise UsageError(_refusal(name, f"looks like {what.format(*match.groups())}"))


def _refusal(name: str, why: str) -> str:
    return (
        f"{name} {why}, and the records of the run would keep it; read it from the environment in "
        "your own function, or, if it is no credential, change the name or the text."
    )
