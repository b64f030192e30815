import dataclasses
import re

import pytest

from maxmars.cli.config_file import UsageError, load_config, parse_config
from maxmars.config import TrainConfig
from maxmars.optimizer_config import AdamWConfig, MarsConfig

pytestmark = pytest.mark.smoke

HEADER = """
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maxmars.config import *
from maxmars.data_config import *
from maxmars.optimizer_config import *

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

    def write(body, name="tiny.py"):
        (tmp_path / name).write_text(HEADER + body)
        return str(tmp_path / name)

    return write


def error_of(call, *arguments):
    with pytest.raises(UsageError) as error:
        call(*arguments)
    return str(error.value)


def test_choices_become_arguments_of_get_config(write):
    path = write(CHOICES)
    assert isinstance(load_config(path).optimizer, AdamWConfig)
    config = load_config(f"{path}:optimizer=mars,microbatches=2")
    assert isinstance(config.optimizer, MarsConfig)
    assert config.optimizer.learning_rate == 3e-3
    assert config.num_microbatches == 2


def test_a_file_is_read_again_when_it_has_changed(write):
    body = "def get_config():\n    return make(optimizer=AdamWConfig(), seed={})\n"
    assert load_config(write(body.format(1))).seed == 1
    assert load_config(write(body.format(2))).seed == 2


def test_a_file_hides_no_module_of_its_name(write):
    load_config(write(CHOICES, name="json.py"))
    import json

    assert json.loads("1") == 1


def test_an_unknown_choice_lists_the_names(write):
    message = error_of(load_config, write(CHOICES) + ":optimiser=mars")
    assert "has no choice `optimiser` (did you mean `optimizer`?)" in message
    assert "its choices: optimizer, microbatches." in message


def test_an_unknown_value_lists_the_values(write):
    message = error_of(load_config, write(CHOICES) + ":optimizer=mar")
    assert "optimizer=mar is not a choice (did you mean `mars`?)" in message
    assert "one of adamw, mars." in message
    assert "one of 1, 2." in error_of(load_config, write(CHOICES) + ":microbatches=3")


def test_a_choice_that_has_no_default_is_asked_for(write):
    path = write("def get_config(size: Literal['s', 'm']): ...\n")
    assert "needs the choice size=s|m" in error_of(load_config, path)


@pytest.mark.parametrize("choices", ["optimizer", "optimizer=", "optimizer=mars,optimizer=adamw"])
def test_a_malformed_choice_is_named(write, choices):
    assert "is not a choice; write each as name=value" in error_of(
        load_config, f"{write(CHOICES)}:{choices}"
    )


def test_a_missing_file_suggests_one_that_is_there(write):
    path = write(CHOICES)
    message = error_of(load_config, path.replace("tiny", "tyni") + ":optimizer=mars")
    assert f"did you mean `{path}`?" in message


@pytest.mark.parametrize("spec", ["configs", "tiny.yaml", "tiny.yaml:optimizer=mars", ""])
def test_what_is_no_python_file_is_rejected(spec):
    assert "must be a Python file" in error_of(load_config, spec)


def test_a_file_without_get_config_says_so(write):
    assert "no function get_config" in error_of(load_config, write(""))


def test_get_config_must_return_a_train_config(write):
    path = write("def get_config():\n    return AdamWConfig()\n")
    assert "returned a AdamWConfig" in error_of(load_config, path)


def test_a_choice_must_be_annotated_with_its_values(write):
    path = write("def get_config(size='small'): ...\n")
    assert "annotate get_config's parameter `size`" in error_of(load_config, path)


def test_a_value_that_the_config_rejects_is_shown_with_its_line(write):
    path = write("def get_config():\n    return make(optimizer=AdamWConfig(b1=2.0))\n")
    message = error_of(load_config, path)
    assert re.match(re.escape(path) + r":\d+: AdamWConfig.b1=2.0 must lie in", message)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import no_such_module\n", ImportError),
        ("def get_config():\n    raise ValueError('mine')\n", ValueError),
        ("def get_config(:\n", SyntaxError),
    ],
)
def test_errors_of_the_file_itself_are_its_own(write, body, error):
    with pytest.raises(error) as error_info:
        load_config(write(body))
    assert not isinstance(error_info.value, UsageError)


def test_overrides_change_leaves(write):
    overrides = ["--optimizer.learning-rate", "3e-3", "--model.num_layers", "3"]
    overrides += ["--model.use-bias", "False", "--gradient-clip-norm", "None"]
    overrides += ["--eval.every=7", "--model.remat", "dots"]
    config = parse_config(write(CHOICES) + ":optimizer=mars", overrides, "maxmars train")
    assert isinstance(config.optimizer, MarsConfig)
    assert config.optimizer.learning_rate == 3e-3
    assert config.model.num_layers == 3
    assert config.model.use_bias is False
    assert config.model.remat == "dots"
    assert config.gradient_clip_norm is None
    assert config.eval.every == 7


def test_overrides_change_leaves_of_a_mixture(write):
    body = """
def get_config():
    parts = (MixturePart(path="a", weight=0.7), MixturePart(path="b", weight=0.3))
    fields = dict(num_steps=1, global_batch_size=8, model=GPT2Config.small())
    return TrainConfig(
        name="mix", data=MixtureConfig(parts=parts), optimizer=AdamWConfig(), **fields
    )
"""
    overrides = ["--data.parts.1.weight", "0.1", "--data.parts.0.path", "c"]
    overrides += ["--data.order", "random_windows", "--data.cache-dir", "/local"]
    data = parse_config(write(body), overrides, "maxmars train").data
    assert [(part.path, part.weight) for part in data.parts] == [("c", 0.7), ("b", 0.1)]
    assert (data.order, data.cache_dir) == ("random_windows", "/local")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.num-layer", "3"], "--model.num-layers"),
        (["--model.use-bias", "maybe"], "'True', 'False'"),
        (["--num-steps", "many"], "many"),
        (["--model.num-heads", "5"], "model.num_heads=5"),
    ],
)
def test_a_wrong_override_exits_with_2(write, capsys, overrides, message):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(write(CHOICES), overrides, "maxmars train")
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_an_override_that_does_not_fit_the_others_is_a_usage_error(write):
    overrides = ["--num-microbatches", "3"]
    message = error_of(parse_config, write(CHOICES), overrides, "maxmars train")
    assert message.startswith("global_batch_size=8 must be a multiple of num_microbatches=3")


def flags(config, prefix="--"):
    for field in dataclasses.fields(config):
        name, value = prefix + field.name.replace("_", "-"), getattr(config, field.name)
        yield from flags(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]


def test_help_explains_every_field(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    spec = write(CHOICES) + ":optimizer=mars"
    with pytest.raises(SystemExit) as exit_info:
        parse_config(spec, ["--help"], "maxmars train")
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    config = load_config(spec)
    assert isinstance(config, TrainConfig)
    for flag in flags(config):
        assert f"{flag} " in printed
    # One of each kind of class: a docstring must be shown, not only the flag.
    for words in ("Number of transformer blocks", "Strength of the variance", "Steps between"):
        assert words in printed
