"""Every hint of a refusal names something that exists: what it suggests is typed, and parsed."""

import re
import shlex

import pytest
from refusals import stopped

from maxmars import cli
from maxmars.cli.parse import FOREIGN_OPTIONS, parse_arguments
from maxmars.cli.train import TrainArguments
from maxmars.config.load import choices_of, named_configs


@pytest.fixture
def said(tmp_path, monkeypatch):
    """What a command line that is wrong prints, with one blank between words."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "own.py").write_text("def make(learning_rate, weight_decay): ...\n")

    def said(words):
        with stopped(2) as errors:
            cli.main(shlex.split(words))
        return " ".join(errors.getvalue().split())

    return said


def options_of(words, capsys):
    with stopped(0):
        cli.main([*words.split(), "--help-all"])
    return re.findall(r"^  (--\w[\w.-]*)", capsys.readouterr().out, re.MULTILINE)


def parse(words):
    return parse_arguments(TrainArguments, words, prog="maxmars train")


@pytest.mark.parametrize("word", sorted({word for word, *_ in FOREIGN_OPTIONS}))
def test_an_option_of_another_program_is_told_ours(word, said):
    line = said(f"train quickstart --{word} 1")
    (ours,) = re.findall(r"it is (--\S+) here", line)
    assert ours != f"--{word}"
    parse(["quickstart", ours, "1"])
    for other in re.findall(r"(--[\w.-]+)", line.partition(" here")[2]):
        parse(["quickstart", other, "1"])


@pytest.mark.smoke
def test_ours_is_told_only_where_a_command_has_it(said):
    assert "it is --num-steps" not in said("audit x --steps 3")
    assert "it is --global-batch-size here" in said("train quickstart --batchsize=8")
    launch = "launch slurm quickstart --name a --workdir /w"
    assert "it is --workdir here" in said(f"{launch} --output-dir /w")
    assert "it is --gpus-per-node here" in said(f"{launch} --gpus 8")
    (option,) = re.findall(r"-- (--\S+) VALUE", said(f"{launch} --lr 1"))
    parse(["quickstart", option, "1"])
    (after,) = re.findall(r"-- (--[^`]*)`", said(f"{launch} --init-optimizer-state"))
    parse(["quickstart", "--init-from", "x", *after.split()])


CHOICES = [
    (config, name, words[0] if words else "runs")
    for config in named_configs()
    for name, words in choices_of(config).items()
]


@pytest.mark.parametrize("choice", CHOICES, ids=":".join)
def test_a_choice_of_a_config_that_is_typed_as_an_option(choice, said):
    config, name, word = choice
    (command,) = re.findall("`(maxmars [^`]*:[^`]*)`", said(f"train {config} --{name} {word}"))
    assert shlex.split(command)[2] == f"{config}:{name}={word}"
    if name != "data":
        assert parse(shlex.split(command)[2:]).config


@pytest.mark.parametrize(
    "words",
    [
        "train gpt2:size=tiny,optimizer=mars --optimizer.name muon",
        "train gpt2:optimizer=mars,size=tiny --optimizer=muon",
        "train gpt2:size=tiny muon",
        "train gpt2:size=tiny optimizer=muon",
    ],
)
def test_the_other_choices_of_a_config_stay(words, said):
    _, command = re.findall("`(maxmars train [^`]*:[^`]*)`", said(words))
    config = parse(shlex.split(command)[2:]).config
    assert config.model.num_layers == parse(["gpt2:size=tiny"]).config.model.num_layers
    assert config.optimizer == parse(["gpt2:size=tiny,optimizer=muon"]).config.optimizer


@pytest.mark.smoke
def test_a_choice_that_only_other_configs_have(said, tmp_path):
    text = "from maxmars.config import *\ndef get_config():\n    return TrainConfig(name='a', "
    text += "num_steps=9, global_batch_size=8, model=GPT2Config.small(), "
    text += "data=PythonSourcesConfig(), optimizer=AdamWConfig())\n"
    (tmp_path / "my.py").write_text(text)
    commands = re.findall("`(maxmars train [^`]*:[^`]*)`", said("train my.py --optimizer soap"))
    assert len(commands) > 1
    for command in commands:
        parse(shlex.split(command)[2:])


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("train quickstart", "--optimizer.learnin-rate 1"),
        ("train quickstart", "--model.numlayers 1"),
        ("train quickstart", "--warmup-steps 1"),
        ("plan quickstart", "--topologie cpu:8"),
        ("eval x", "--num-question 1"),
        ("generate x", "--max-tokens 1"),
        ("data prepare x y", "--validaton-fraction 0.1"),
        ("launch slurm quickstart --name a --workdir /w", "--partitoin a"),
    ],
)
def test_tyro_names_similar_options(command, wrong, said, capsys):
    printed = said(f"{command} {wrong}")
    shown = re.findall(r"--\w[\w.-]+", printed.partition("Perhaps you meant:")[2])
    assert shown[:-1]  # the last is --help
    assert shown[0] in options_of(command, capsys)


@pytest.mark.smoke
@pytest.mark.parametrize("command", ["train", "plan", "compare"])
def test_a_command_without_config_names_one_that_works(command, said):
    (config,) = re.findall(f"`maxmars {command} (\\w+)`", said(f"{command} --num-steps 3"))
    assert config in named_configs()


@pytest.mark.smoke
def test_help_names_groups_that_have_help(said, capsys):
    line = said("train quickstart --help x")
    groups = line.partition("groups of options are ")[2].rstrip(".").split(", ")
    assert len(groups) > 5
    for group in groups:
        with stopped(0):
            cli.main(["train", "quickstart", "--help", group])
        assert f"--{group}." in capsys.readouterr().out
