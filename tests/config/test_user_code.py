"""A function of the user's own in a config: equal by its text, relative to where it is named."""

import dataclasses
import json
import os

import pytest
from refusals import refused
from tiny import tiny_config

from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import (
    GrainPart,
    MixtureConfig,
    differences,
    from_dict,
    load_config,
    to_dict,
)

pytestmark = pytest.mark.smoke

CONFIG = """
from maxmars.config import *

OPTIMIZER = OptaxConfig(make="own.py:make", learning_rate=0.1)

def get_config():
    parts = (GrainPart(source="own.py:windows", weight=1.0), MixturePart(path="a", weight=1.0))
    return TrainConfig(
        name="own",
        num_steps=3,
        global_batch_size=8,
        model=ModuleConfig(make="own.py:model", vocab_size=8, max_seq_len=8),
        optimizer=OPTIMIZER,
        data=MixtureConfig(parts=parts),
    )
"""
OWN = "def make(): return 'make'\ndef model(): ...\ndef windows(): ...\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with the config file in `mine/`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text(OWN)
    (tmp_path / "mine" / "config.py").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(rows):
    return [name for name, _, _ in rows]


def parsed(*words):
    return parse_arguments(ConfigArguments, ["mine/config.py", *words], prog="maxmars train").config


def test_a_path_is_relative_to_the_config_file_or_to_where_it_is_typed(folder):
    config = load_config("mine/config.py")
    for source in (config.model.make, config.optimizer.make, config.data.parts[0].source):
        assert os.path.samefile(source.file, folder / "mine" / "own.py")
    (folder / "other.py").write_text("def make(): return 'other'\n")
    assert parsed("--seed", "1").optimizer.make.load()() == "make"
    typed = parsed("--optimizer.make", "other.py:make")
    assert os.path.samefile(typed.optimizer.make.file, folder / "other.py")
    assert typed.optimizer.make.load()() == "other"


def test_functions_are_equal_if_name_and_text_are(folder):
    config = load_config("mine/config.py")
    (folder / "copy.py").write_text(OWN)
    assert differences(config, parsed("--optimizer.make", "copy.py:make")) == []
    assert names(differences(config, parsed("--optimizer.make", "copy.py:model"))) == [
        "optimizer.make"
    ]
    (folder / "copy.py").write_text(f"{OWN}# another text\n")
    ((name, old, new),) = differences(config, parsed("--optimizer.make", "copy.py:make"))
    assert name == "optimizer.make"
    assert "mine/own.py:make" in str(old)
    assert "copy.py:make" in str(new)
    assert str(old).split()[-1] != str(new).split()[-1]  # the digests


def test_a_record_tells_file_function_and_text(folder):
    config = load_config("mine/config.py")
    record = json.loads(json.dumps(to_dict(config)))
    assert record["optimizer"]["make"]["file"] == "mine/own.py"
    assert record["optimizer"]["make"]["function"] == "make"
    assert from_dict(record) == config
    (folder / "mine" / "own.py").unlink()
    assert from_dict(record) == config
    assert names(differences(load_config("mine/config.py"), config)) == [
        "model.make",
        "optimizer.make",
        "data.parts.0.source",
    ]


def test_the_text_that_runs_is_the_one_that_the_config_records(folder):
    own = folder / "mine" / "own.py"
    own.write_text("def make(): return 'first'\n")
    before = load_config("mine/config.py").optimizer.make
    own.write_text("def make(): return 'second'\n")
    with refused(ValueError, "mine/own.py:make"):
        before.load()
    config = load_config("mine/config.py")
    assert config.optimizer.make.load()() == "second"
    own.write_text("def make(): return 'third'\n")  # while a run goes on
    assert config.optimizer.make.load()() == "second"


def test_files_of_one_name_are_refused_as_a_run_keeps_one(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"# {folder}")
    parts = [
        GrainPart(source=f"{tmp_path / folder}/own.py:windows", weight=0.5) for folder in ("a", "b")
    ]
    same = dataclasses.replace(parts[0], options={"seed": 1})
    tiny_config(data=MixtureConfig(parts=(parts[0], same)))
    with refused(ValueError, *(part.source.file for part in parts)):
        tiny_config(data=MixtureConfig(parts=tuple(parts)))
