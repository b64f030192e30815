"""Secrets in options, command lines and addresses: hidden in records, revealed to own functions."""

import pytest
from refusals import refused

from maxmars.config import GrainConfig, differences, from_dict, to_dict
from maxmars.config.secrets import hide, hide_words, reveal

CANARY = "CANARY5f0e"


def data(**options):
    return GrainConfig(source="own.py:windows", options=options)


@pytest.mark.parametrize(
    "options",
    [
        {"api_token": CANARY},
        {"apiKey": CANARY},
        {"db_passwd": CANARY},
        {"auth": ("me", CANARY)},
        {"headers": {"Authorization": f"Bearer {CANARY}", "X-API-Key": CANARY}},
        {"login": {"user": "me", "password": CANARY}},
        {"url": f"https://{CANARY}@host/x"},
        {"url": f"https://me:{CANARY}@host:443/x?size=3"},
        {"url": f"gs://bucket/x?size=3&token={CANARY}"},
        {"url": f"https://host/x?X-Amz-Signature={CANARY}&size=3"},
        {"query": f'{{"api_key": "{CANARY}"}}'},
    ],
)
def test_records_hold_no_secret_and_are_compared_without(options):
    record = to_dict(data(**options))
    assert CANARY not in str(record)
    assert differences(from_dict(record), data(**options)) == []
    assert to_dict(from_dict(record)) == record
    other = data(**eval(repr(options).replace(CANARY, "CANARY77")))
    rows = differences(from_dict(record), other)
    assert [name for name, _, _ in rows] == ["options"]
    assert "CANARY" not in str(rows)


def test_what_is_no_secret_stays():
    options = {
        "max_tokens": 5,
        "key_size": 32,
        "token": 3,
        "tokenizer": "byte",
        "eos_token": "<|endoftext|>",
        "author": "me",
        "api_key": "",
        "secret": None,
        "path": "/data/key=a/2@3",
        "bucket": "gs://bucket/a@b",
        "model": "hf:OWNER/NAME@main",
    }
    assert to_dict(data(**options))["options"] == options


def test_command_lines():
    words = ["maxmars", "train", f"c.py:token={CANARY},size=1", "--x.api-key", CANARY]
    words += [f"--x.token={CANARY} 2", "--x.eos-token", "END", "--url", f"https://{CANARY}@h/a b"]
    hidden = hide_words(words)
    assert CANARY not in str(hidden)
    kept = ("c.py:token=HIDDEN", ",size=1", "--x.token=HIDDEN", "END", "https://HIDDEN", "@h/a b")
    assert all(text in " ".join(hidden) for text in kept)
    assert hide_words(hidden) == hidden


def test_the_environment_gives_secrets_back(monkeypatch):
    options = {"login": {"password": CANARY}, "url": f"https://{CANARY}@host", "size": 3}
    recorded = hide({"options": options})["options"]
    monkeypatch.setenv("MAXMARS_URL", options["url"])
    named = ("data.options.login.password", recorded["login"]["password"], "MAXMARS_LOGIN_PASSWORD")
    with refused(ValueError, *named):
        reveal(recorded, "data.options")
    monkeypatch.setenv("MAXMARS_LOGIN_PASSWORD", "CANARY77")
    with refused(ValueError, *named) as raised:
        reveal(recorded, "data.options")
    assert "CANARY" not in str(raised.value)
    monkeypatch.setenv("MAXMARS_LOGIN_PASSWORD", CANARY)
    assert reveal(recorded, "data.options") == options
