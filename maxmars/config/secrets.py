"""What records hold in place of a secret: `HIDDEN-` and four hex digits of its SHA-256.

The digits tell whether a secret changed, and too little to guess it by. Whoever records what a user
gave, such as a config, a command line or an error, records `hide` of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

_ANYWHERE = re.compile(r"auth(?!or(?!i))|passw|passphrase|secret|credential|signature")
_AT_THE_END = re.compile(r"token$|(^|_)(api_?)?(key|pwd|sig)$|api_?keys$")
_OF_A_VOCABULARY = re.compile(
    r"(bos|eos|eot|end|eod|pad|unk|mask|sep|cls|start|stop|text|special)_token$"
)

_HIDDEN = re.compile(r"HIDDEN-[0-9a-f]{4}")
_LOGIN = re.compile(r"(?<=://)[^\s/?#\"'<>]+(?=@)")  # https://TOKEN@host, https://user:word@host
_NAMED = (
    re.compile(r"(?<![\w./=-])(?P<name>[\w.-]+)=(?P<quote>[\"']?)(?P<value>[^\s,&#;\"']+)"),
    re.compile(r"(?P<q>[\"'])(?P<name>[\w.-]+)(?P=q): (?P<quote>[\"'])(?P<value>.+?)(?P=quote)"),
)


def hide(value: Any, name: str = "") -> Any:
    """A value without secrets: a config, options, a text, or a container of these.

    Text under a name such as `password`, `api_key`, `token` or `auth.header` is a secret, also in
    `?token=...` and `'token': '...'` within a text, as is the login in an address. What is hidden
    already stays as it is.

    Args:
      value: anything; the result is of its type, but a number that is hidden becomes text.
      name: of the value, such as `options.api_key`.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        changes = {n: new for n, old in fields.items() if (new := hide(old, n)) is not old}
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, Mapping):
        return {key: hide(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hide(item, name) for item in value)
    if isinstance(value, str):
        return _hidden(value) if value and is_secret(name) else _hide_in(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _hidden(str(value)) if _ANYWHERE.search(name.lower()) else value
    return value


def is_secret(name: str) -> bool:
    """Whether a text of this name is a secret; `eos_token`, `max_tokens` and `key_size` are not."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[.-]", "_", name).lower()
    at_the_end = _AT_THE_END.search(name) and not _OF_A_VOCABULARY.search(name)
    return bool(at_the_end or _ANYWHERE.search(name))


def hide_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without secrets."""
    kept: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            kept.append(f"{flag}={hide(value, flag)}")
        else:
            before = kept[-1] if kept and kept[-1].startswith("--") else ""
            kept.append(hide(word, "" if word.startswith("--") or "=" in before else before))
    return kept


def reveal(value: Any, name: str) -> Any:
    """Options as the user's own function gets them: what a record hides is in the environment.

    Args:
      value: the options, such as those of a config that was read from a record.
      name: of them all, such as `data.options`. The secret `data.options.login.password` is in the
        variable MAXMARS_LOGIN_PASSWORD.

    Raises:
      ValueError: a variable is missing, or holds another secret than the recorded one.
    """
    if isinstance(value, Mapping):
        return {key: reveal(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(reveal(item, f"{name}.{i}") for i, item in enumerate(value))
    if not isinstance(value, str) or not _HIDDEN.search(value):
        return value
    variable = re.sub(r"\W", "_", f"maxmars.{name.partition('.options.')[2]}").upper()
    secret = os.environ.get(variable, "")
    if value not in (_hidden(secret), hide(secret)):
        problem = "holds another one" if secret else "is not set"
        raise ValueError(
            f"{name} is {value} in the records of the run, which hold no secrets, and the "
            f"environment variable {variable} {problem}; give the secret there."
        )
    return secret


def _hide_in(text: str) -> str:
    def named(match: re.Match[str]) -> str:
        start = match.start("value") - match.start()
        whole, value = match[0], match["value"]
        if not is_secret(match["name"]):
            return whole
        return whole[:start] + _hidden(value) + whole[start + len(value) :]

    text = _LOGIN.sub(lambda login: _hidden(login[0]), text)
    for pattern in _NAMED:
        text = pattern.sub(named, text)
    return text


def _hidden(text: str) -> str:
    if _HIDDEN.fullmatch(text):
        return text
    return f"HIDDEN-{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:4]}"
