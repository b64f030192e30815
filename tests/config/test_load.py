"""CONFIG: names, paths and choices, and what is wrong with them or in a config file."""

import numpy as np
import pytest
from refusals import refused
from token_directories import write_llm_c, write_nanogpt, write_shards

from maxmars.config import (
    AdamWConfig,
    MarsConfig,
    Source,
    TokenShardsConfig,
    differences,
    load_config,
)
from maxmars.config.checks import UsageError

pytestmark = pytest.mark.smoke

HEADER = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maxmars.config import *

def make(**fields):
    fields = dict(num_steps=3000, global_batch_size=8, model=GPT2Config.small()) | fields
    return TrainConfig(name="tiny", data=PythonSourcesConfig(), **fields)
"""
CHOICES = """
@dataclass(frozen=True)
class Table:
    learning_rate: float

def get_config(
    optimizer: Literal["adamw", "mars"] = "adamw", microbatches: Literal[1, 2] = 1
) -> TrainConfig:
    mars = MarsConfig(learning_rate=Table(3e-3).learning_rate)
    optimizers = {"adamw": AdamWConfig(), "mars": mars}
    return make(optimizer=optimizers[optimizer], num_microbatches=microbatches)
"""


@pytest.fixture
def write(tmp_path):
    """Writes a config file and returns its path."""

    def write(body, name="tiny.py", header=HEADER):
        (tmp_path / name).write_text(header + body)
        return str(tmp_path / name)

    return write


def test_choices_become_arguments_of_get_config(write):
    path = write(CHOICES)
    assert isinstance(load_config(path).optimizer, AdamWConfig)
    config = load_config(f"{path}:optimizer=mars,microbatches=2")
    assert isinstance(config.optimizer, MarsConfig)
    assert config.optimizer.learning_rate == 3e-3
    assert config.num_microbatches == 2


def test_a_file_is_read_again_when_it_has_changed_and_hides_no_module_of_its_name(write):
    body = "def get_config():\n    return make(optimizer=AdamWConfig(), seed={})\n"
    for seed in (1, 2):
        assert load_config(write(body.format(seed), name="json.py")).seed == seed
    import json

    assert json.loads("1") == 1


def test_a_bare_name_means_a_file_of_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart").name == "quickstart"
    assert load_config("gpt2:size=xl,optimizer=muon").name == "gpt2-xl-muon"


@pytest.mark.parametrize("name", ["quickstart", "compare_tiny"])
def test_a_small_config_takes_any_tokens(name, tmp_path):
    write_shards(tmp_path / "tokens", np.arange(100), vocab_size=500)
    config = load_config(f"{name}:data={tmp_path / 'tokens'}")
    assert config.data == TokenShardsConfig(path=str(tmp_path / "tokens"))
    assert config.model.vocab_size == 500
    write_nanogpt(tmp_path / "nanogpt", np.arange(100), np.arange(100))
    assert load_config(f"{name}:data={tmp_path / 'nanogpt'}").model.vocab_size == 50257
    for magic, size in ((20240520, 1), 50257), ((20240801, 7), 128256):
        write_llm_c(tmp_path / str(size) / "a_train.bin", np.arange(100), *magic)
        assert load_config(f"{name}:data={tmp_path / str(size)}").model.vocab_size == size
    with refused(UsageError, tmp_path / "none"):
        load_config(f"{name}:data={tmp_path / 'none'}")


def test_any_text_may_hold_colons_and_commas(write):
    body = (
        "import dataclasses\nfrom typing import Literal\n"
        "def get_config(data: str, optimizer: Literal['a', 'b'] = 'a'):\n"
        "    config = make(optimizer=AdamWConfig())\n"
        "    return dataclasses.replace(config, name=f'{data} {optimizer}')\n"
    )
    for choices, name in (
        ("data=gs://bucket/of tokens", "gs://bucket/of tokens a"),
        ("data=a,b=c,d,optimizer=b", "a,b=c,d b"),
        ("data=my,data", "my,data a"),
        ("optimizer=b,data=my.py:f,x", "my.py:f,x b"),
    ):
        assert load_config(f"{write(body)}:{choices}").name == name


def test_a_choice_may_be_a_function_of_the_users_own(tmp_path, monkeypatch, write):
    """Its file is relative to where it is typed, not to the config file."""
    write_shards(tmp_path / "a,tokens", np.arange(100), vocab_size=500)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def make(learning_rate): ...")
    monkeypatch.chdir(tmp_path / "sub")
    for config in (
        load_config(f"quickstart:data={tmp_path / 'a,tokens'},optimizer=mine.py:make"),
        load_config(f"compare_tiny:data={tmp_path / 'a,tokens'}", {"optimizer": "mine.py:make"}),
    ):
        assert config.model.vocab_size == 500
        make = config.optimizer.make
        assert isinstance(make, Source)
        assert (make.file, make.short, len(make.sha256)) == ("mine.py", "mine", 64)
        assert config.name.endswith("mine")
    for wrong in ("yours.py:make", "mine.py:", "mine"):
        assert f"optimizer={wrong}" in error_of(f"quickstart:optimizer={wrong}")
    path = write("def get_config(a: Source): ...", "b.py", "from maxmars.config import Source\n")
    assert "Literal" in error_of(path)


@pytest.mark.parametrize("name", ["quickstart", "compare_tiny"])
@pytest.mark.parametrize("optimizer", ["adamw", "nadamw", "lion", "soap", "muon", "mars", "mars_m"])
def test_optimizers_of_the_configs_for_beginners(name, optimizer):
    config = load_config(name, {"optimizer": optimizer})
    assert differences(config, load_config(f"{name}:optimizer={optimizer}")) == []


def error_of(spec):
    with pytest.raises(UsageError) as error:
        load_config(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


WRONG = "def get_config():\n    return "


@pytest.mark.parametrize(
    ("body", "choices", "named"),
    [
        (CHOICES, ":optimiser=mars", ["optimiser=mars", "`optimizer=mars`", "microbatches=1|2"]),
        (CHOICES, ":microbatches=3", ["microbatches=3", "microbatches=1|2"]),
        (CHOICES, ":optimizer", ["'optimizer='"]),
        (CHOICES, ":optimizer=mars,optimizer=adamw", ["'optimizer=adamw'", "once"]),
        ("", "", ["get_config"]),
        (WRONG + "AdamWConfig()\n", "", ["AdamWConfig", "TrainConfig"]),
        ("def get_config(size: Literal['s', 'm']): ...\n", "", ["size=s|m"]),
        ("def get_config(path: str): ...\n", "", ["path=TEXT"]),
        ("def get_config(size='s'): ...\n", "", ["`size`", "Literal"]),
    ],
)
def test_what_is_wrong_with_choices_is_said(write, body, choices, named):
    path = write(body)
    error = error_of(path + choices)
    assert [words for words in [path, *named] if words not in error] == []


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("quickstrat", ["'quickstrat'", "`quickstart`"]),
        ("gtp2:size=xl", ["'gtp2'", "compare_tiny, gpt2, quickstart"]),
        ("gpt2.yaml", ["'gpt2.yaml'", "`gpt2`"]),
        ("", ["''"]),
        ("configs/gpt2.yaml:size=xl", ["configs/gpt2.yaml:size=xl", ".py"]),
        ("{tmp}/tyni.py:optimizer=mars", ["`{tmp}/tiny.py`"]),
    ],
)
def test_a_name_that_does_not_exist(spec, named, write, tmp_path):
    write(CHOICES)
    error = error_of(spec.format(tmp=tmp_path))
    assert [words for words in named if words.format(tmp=tmp_path) not in error] == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("\nimport no_such_module\n", "2: No module named"),
        ("\ndef get_config(:\n", "2: invalid syntax: def get_config(:"),
        ("\ndef get_config():\n    return 1 / 0\n", "3: division by"),
        ("from maxmars.config import *\n\nAdamWConfig(b1=2.0)\n", "3: AdamWConfig.b1=2.0 must"),
    ],
)
def test_errors_of_the_file_itself_name_its_line(write, body, named):
    path = write(body, header="")
    assert f"tiny.py:{named}" in error_of(path)
