import dataclasses
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import tyro
from token_directories import write_shards

from maxmars.config import AdamWConfig, MarsConfig, MeshConfig, TokenShardsConfig, TrainConfig
from maxmars.config.command_line import UsageError, load_config, parse_config, parse_options

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


def test_a_bare_name_means_a_file_of_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart").name == "quickstart"
    assert load_config("gpt2:size=xl,optimizer=muon").name == "gpt2-xl-muon"
    assert load_config("ablations:optimizer=gamma_0").name == "compare-tiny-mars-gamma_0"


def test_a_choice_annotated_with_str_takes_any_text(tmp_path):
    write_shards(tmp_path / "tokens", np.arange(100), vocab_size=500)
    config = load_config(f"quickstart:data={tmp_path / 'tokens'}")
    assert config.data == TokenShardsConfig(path=str(tmp_path / "tokens"))
    assert config.model.vocab_size == 500


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


WRONG = "def get_config():\n    return "
BEST = "import dataclasses\nfrom maxmars.config import CheckpointConfig\n" + WRONG
BEST += "dataclasses.replace(make(optimizer=AdamWConfig()), "
BEST += "checkpoint=CheckpointConfig(best_metric='eval/los'))\n"


@pytest.mark.parametrize(
    ("body", "choices", "message"),
    [
        (CHOICES, ":optimiser=mars", "has no choice `optimiser` (did you mean `optimizer`?)"),
        (CHOICES, ":optimiser=mars", "its choices: optimizer, microbatches."),
        (CHOICES, ":optimizer=mar", "optimizer=mar is not a choice (did you mean `mars`?)"),
        (CHOICES, ":optimizer=mar", "one of adamw, mars."),
        (CHOICES, ":microbatches=3", "one of 1, 2."),
        (CHOICES, ":optimizer", "is not a choice; write each as name=value"),
        (CHOICES, ":optimizer=", "is not a choice; write each as name=value"),
        (CHOICES, ":optimizer=mars,optimizer=adamw", "is not a choice; write each as name=value"),
        ("", "", "no function get_config"),
        (WRONG + "AdamWConfig()\n", "", "returned a AdamWConfig"),
        ("def get_config(size: Literal['s', 'm']): ...\n", "", "needs the choice size=s|m"),
        ("def get_config(path: str): ...\n", "", "needs the choice path=TEXT"),
        ("def get_config(size='s'): ...\n", "", "annotate get_config's parameter `size`"),
        (WRONG + "make(optimizer=AdamWConfig(b1=2.0))\n", "", "AdamWConfig.b1=2.0 must lie in"),
        (BEST, "", "CheckpointConfig.best_metric=eval/los must be eval/loss, which"),
    ],
)
def test_what_is_wrong_in_a_config_is_said(write, body, choices, message):
    path = write(body)
    error = error_of(load_config, path + choices)
    assert path in error
    assert message in error


def test_a_value_that_the_config_rejects_is_shown_with_its_line(write):
    path = write(WRONG + "make(optimizer=AdamWConfig(b1=2.0))\n")
    assert re.match(re.escape(path) + r":\d+: AdamWConfig", error_of(load_config, path))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("quickstrat", "there is no config 'quickstrat' (did you mean `quickstart`?)"),
        (
            "gtp2:size=xl",
            "choose one of ablations, compare_tiny, gpt2, quickstart, or give",
        ),
        ("gpt2.yaml", "there is no config 'gpt2.yaml' (did you mean `gpt2`?)"),
        ("", "there is no config ''"),
        ("configs/gpt2", "must be a Python file"),
        ("configs/gpt2.yaml:size=xl", "must be a Python file"),
    ],
)
def test_a_name_that_does_not_exist(spec, message):
    assert message in error_of(load_config, spec)


def test_a_missing_file_suggests_a_similar_name(write):
    path = write(CHOICES)
    message = error_of(load_config, path.replace("tiny", "tyni") + ":optimizer=mars")
    assert f"did you mean `{path}`?" in message


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("\nimport no_such_module\n", "{path}:2: ModuleNotFoundError: No module named"),
        ("\ndef get_config():\n    raise ValueError('mine')\n", "{path}:3: ValueError: mine"),
        ("\ndef get_config(:\n", "{path}:2: invalid syntax: def get_config(:"),
        ("\ndef get_config():\n    return 1 / 0\n", "{path}:3: ZeroDivisionError: division by"),
    ],
)
def test_errors_of_the_file_itself_name_its_line(write, body, told):
    path = write("")
    Path(path).write_text(body)
    assert error_of(load_config, path).startswith(told.format(path=path))


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
    overrides += ["--data.order", "random_windows"]
    data = parse_config(write(body), overrides, "maxmars train").data
    assert [(part.path, part.weight) for part in data.parts] == [("c", 0.7), ("b", 0.1)]
    assert data.order == "random_windows"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--model.num-layer", "3"],
            "no option --model.num-layer (did you mean `--model.num-layers`",
        ),
        (["--xyzzy", "3"], "no option --xyzzy; see `maxmars train "),
        (["--optimizer.qkv", "heads"], "tiny.py:optimizer=... have others; see `maxmars train "),
        (["3"], "takes no argument '3'; see"),
        (["--model.use-bias", "maybe"], "--model.use-bias maybe must be True or False."),
        (["--num-steps=many"], "--num-steps many must be an integer."),
        (["--eval.every", "often"], "--eval.every often must be an integer or None."),
        (["--model.remat", "foo"], "must be auto or full or attention or dots or None."),
        (["--seed", "1", "--num-steps"], "--num-steps needs a value: an integer."),
        (["--seed", "--num-steps", "1"], "--seed needs a value: an integer."),
        (
            ["--model.num-heads", "5"],
            "model.embed_dim=768 must be a multiple of model.num_heads=5.",
        ),
        (["--optimizer.b1", "2"], "--optimizer.b1 2 must lie in [0, 1)."),
        (["--optimizer.learning-rate", "abc"], "--optimizer.learning-rate abc must be a number."),
        (["--num-steps", "1e3"], "--num-steps 1e3 must be an integer; write 1000."),
        (["--num-steps", "-5"], "--num-steps -5 must be greater than zero."),
        (["--mesh.fsdp", "0"], "--mesh.fsdp 0 must be greater than zero."),
        (["--optimizer.eps", "nan"], "--optimizer.eps nan must be a finite number."),
        (["--seed", "1", "--seed=2"], "--seed is given twice, as 1 and 2; give it once."),
        (["--model.remat", "atention"], "(did you mean `attention`?)"),
        (
            ["--checkpoint.best-metric", "eval/los"],
            "--checkpoint.best-metric eval/los must be eval/loss, which checkpoints have.",
        ),
        (["--name", "-x"], "--name needs a value: text; write --name=-x if that is it."),
        (
            ["--schedule.warmup-steps", "9", "--schedule.decay-steps", "5"],
            "--schedule.warmup-steps 9 --schedule.decay-steps 5: schedule.warmup_steps=9 must not",
        ),
        (["--num-microbatches", "3"], "global_batch_size=8 must be a multiple of num_microbatches"),
    ],
)
def test_a_wrong_override_is_one_line(write, capsys, overrides, message):
    error = error_of(parse_config, write(CHOICES), overrides, "maxmars train")
    assert message in error
    assert "\n" not in error
    assert capsys.readouterr() == ("", "")


OWN = """
def get_config():
    options = dict(rate=None, more=[], betas=[0.9, 0.99], names=["a"], mixed=[1, 0.5])
    return make(optimizer=OptaxConfig(make="own.py:make", learning_rate=0.1, options=options))
"""


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rate 3", "the config file gives None, which does not say a type; give it a value of its"),
        ("more 3", "the config file gives (), which does not say a type; give it a value of its"),
        ("more None", "the config file gives (), which does not say a type"),
        ("betas 0.9 x", "--optimizer.options.betas x must be a number."),
        ("mixed 0.5 1", "--optimizer.options.mixed 0.5 must be an integer."),
        ("betas", "--optimizer.options.betas needs a value: one or more values."),
    ],
)
def test_an_option_of_the_users_code_has_the_type_that_the_config_gives(write, override, message):
    name, *values = override.split()
    arguments = [f"--optimizer.options.{name}", *values]
    assert message in error_of(parse_config, write(OWN), arguments, "maxmars train")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rate None", None),
        ("betas 0.8 0.9", (0.8, 0.9)),
        ("names b c", ("b", "c")),
        ("mixed 2 3", (2, 3.0)),
    ],
)
def test_options_of_the_users_code_may_be_several_values(write, override, value):
    name, *values = override.split()
    arguments = [f"--optimizer.options.{name}", *values]
    config = parse_config(write(OWN), arguments, "maxmars train")
    assert config.optimizer.options[name] == value


def test_several_options_of_several_values_each_keep_their_own(write):
    words = "--name x --optimizer.options.betas 0.8 0.9 --optimizer.options.mixed -2 3 --seed 1"
    config = parse_config(write(OWN), words.split(), "maxmars train")
    assert (config.name, config.seed) == ("x", 1)
    assert config.optimizer.options["betas"] == (0.8, 0.9)
    assert config.optimizer.options["mixed"] == (-2, 3.0)


@dataclasses.dataclass(frozen=True)
class OwnOptions:
    run: tyro.conf.Positional[str]
    seed: int = 0
    greedy: bool = False
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a", "--sed", "1"], "`maxmars x` has no option --sed (did you mean `--seed`?); see"),
        (["a", "--greedy", "--seed", "x"], "--seed x must be an integer."),
        (["a", "--greedy", "--seed"], "--seed needs a value: an integer."),
        (["a", "--mesh.fsdp", "x"], "--mesh.fsdp x must be an integer or None."),
        (["a", "--mesh.fsdp", "0"], "--mesh.fsdp 0 must be greater than zero."),
        (["a", "b"], "`maxmars x` takes no argument 'b'; see"),
        (["a", "--greedy=True"], "--greedy takes no value; write --greedy or nothing."),
        (["a", "--greedy", "--no-greedy"], "--no-greedy is given twice, as --greedy and"),
        (
            ["a", "--promt", "b"],
            "`maxmars x` has no option --promt (did you mean `--prompt`?); see",
        ),
        (["--greedy", "--prompt", "b"], "`maxmars x` needs RUN; see `maxmars x --help`."),
    ],
)
def test_a_command_without_a_config_has_the_same_errors(argv, message):
    assert parse_options(OwnOptions, ["a", "--greedy"], prog="x") == OwnOptions("a", greedy=True)
    with pytest.raises(UsageError) as error:
        parse_options(OwnOptions, argv, prog="maxmars x")
    assert message in str(error.value)


def flags(config, prefix="--"):
    for field in dataclasses.fields(config):
        if field.name == "asked":  # which a run sets itself
            continue
        name, value = prefix + field.name.replace("_", "-"), getattr(config, field.name)
        yield from flags(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]


def test_help_explains_every_field(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    spec = write(CHOICES) + ":optimizer=mars"
    with pytest.raises(SystemExit) as exit_info:
        parse_config(spec, ["--help-all"], "maxmars train")
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    config = load_config(spec)
    assert isinstance(config, TrainConfig)
    for flag in flags(config):
        assert f"{flag} " in printed
    # One of each kind of class: a docstring must be shown, not only the flag.
    for words in ("Number of transformer blocks", "Strength of the variance", "Steps between"):
        assert words in printed
