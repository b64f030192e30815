"""Options of own functions: which names and texts are credentials, and are refused."""

import json

import pytest
from refusals import refused

from maxmars.config import AdamWConfig, GPT2Config, GrainConfig, TrainConfig, from_dict, to_dict

CANARY = "CANARY5f0e"
KEY = "a1B2c3D4e5F6g7H8i9J0"
HONEST = """
    text_key answer_token rng_key signature token tokens eos_token pad_token mask_token
    special_tokens max_tokens token_dtype key keys sort_key cache_key key_size
    num_key_value_heads primary_key author authors authority auth passes compass secretary
    num_secrets password_length is_secret
"""


def data(**options):
    return GrainConfig(source="own.py:windows", options=options)


def config(**options):
    return TrainConfig(
        name="own",
        num_steps=1,
        global_batch_size=1,
        model=GPT2Config.small(),
        data=data(**options),
        optimizer=AdamWConfig(),
    )


def test_honest_options_are_recorded_as_they_are():
    options = dict.fromkeys(HONEST.split(), "question") | {"is_secret": True, "max_tokens": 5}
    options |= {"hf_token": "", "password": None, "use_secret": False}
    options |= {
        "path": "/data/key=a/2@3",
        "bucket": "gs://bucket/a@b",
        "model": "hf:OWNER/NAME@main",
        "directory": "runs/hf_gpt2_small/task-with-a-long-name-of-many-words",
        "prefix": "The Bearer of",
        "prompt": "the bearer carries on. Authorization is needed; enter your password:",
        "template": "User: {user} Password: {password} api_key=<key>",
        "text": "token=<answer>, sort_key: x, tokens=3, the secret of eyJ",
    }
    honest = config(**options)
    assert from_dict(to_dict(honest)).data.options == options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"password": CANARY}, "data.options.password"),
        ({"passwd": CANARY}, "passwd"),
        ({"db_password": 271828}, "db_password"),
        ({"client-secret": CANARY}, "client-secret"),
        ({"credential": CANARY}, "credential"),
        ({"credentials": ("me", CANARY)}, "credentials"),
        ({"apiKey": CANARY}, "apiKey"),
        ({"OPENAI_API_KEY": CANARY}, "OPENAI_API_KEY"),
        ({"private_key": CANARY}, "private_key"),
        ({"login": {"access_token": CANARY}}, "data.options.login.access_token"),
        ({"auth_token": CANARY}, "auth_token"),
        ({"hf_token": CANARY}, "hf_token"),
        ({"hub": f"hf_{KEY}"}, "data.options.hub"),
        ({"model": [f"sk-{KEY}"]}, "data.options.model"),
        ({"model": f"sk-proj-{KEY}"}, "data.options.model"),
        ({"user": "AKIAIOSFODNN7EXAMPLE"}, "data.options.user"),
        ({"headers": {"Authorization": f"Bearer {CANARY}"}}, "data.options.headers.Authorization"),
        ({"header": "Authorization: Bearer X"}, "data.options.header"),
        ({"header": f"authorization=Basic {CANARY}"}, "data.options.header"),
        ({"header": json.dumps({"Authorization": f"token {CANARY}"})}, "data.options.header"),
        ({"header": f"bearer {CANARY}1"}, "data.options.header"),
        ({"header": f"X-Api-Key: {CANARY}"}, "Api-Key"),
        ({"url": f"https://host/x?size=3&access_token={CANARY}"}, "access_token"),
        ({"database": f"host=db password='{CANARY}'"}, "password"),
        ({"hub": [f"ghp_{KEY}"]}, "data.options.hub"),
        ({"hub": f"github_pat_{KEY}"}, "data.options.hub"),
        ({"hub": f"glpat-{KEY}"}, "data.options.hub"),
        ({"chat": f"xoxb-{KEY}"}, "data.options.chat"),
        ({"user": "ASIAIOSFODNN7EXAMPLE"}, "data.options.user"),
        ({"key": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY}"}, "data.options.key"),
        ({"login": f"eyJ{KEY}.eyJ{KEY}.{KEY}"}, "data.options.login"),
        ({"url": f"https://me:{CANARY}@host:443/x?size=3"}, "data.options.url"),
        ({"url": f"https://{CANARY}@host"}, "data.options.url"),
    ],
)
def test_credentials_are_refused_by_name_and_are_not_printed(options, named):
    with refused(ValueError, named, "environment") as raised:
        config(**options)
    values = (CANARY, KEY, "271828", "AKIA")
    assert not [value for value in values if value in str(raised.value)]
