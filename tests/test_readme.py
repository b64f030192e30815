"""The README's code runs, and its commands parse."""

import re
import shlex
from pathlib import Path

import pytest

from maxmars.cli import COMMANDS, main
from maxmars.cli.config_file import parse_arguments
from maxmars.cli.train import TrainArguments

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BASH = "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
COMMAND_LINES = [shlex.split(line, comments=True) for line in BASH.splitlines()]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code):
    exec(code, {})


def test_commands_exist():
    names = {line[1] for line in COMMAND_LINES if line and line[0] == "maxmars"}
    assert names
    assert names <= set(COMMANDS)
    for line in COMMAND_LINES:
        if line and line[0] == "bash":
            assert (ROOT / line[1]).is_file()


TRAIN = [line[2:] for line in COMMAND_LINES if line[:2] == ["maxmars", "train"]]


@pytest.mark.parametrize("arguments", TRAIN, ids=" ".join)
def test_train_commands_parse(arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    if "--help" in arguments:
        with pytest.raises(SystemExit) as stop:
            parse_arguments(TrainArguments, arguments, prog="maxmars train")
        assert stop.value.code == 0
        assert "--num-steps" in capsys.readouterr().out
    else:
        assert parse_arguments(TrainArguments, arguments, prog="maxmars train").config.name


LAUNCH = [line[1:] for line in COMMAND_LINES if line[:2] == ["maxmars", "launch"]]


@pytest.mark.parametrize("arguments", LAUNCH, ids=" ".join)
def test_launch_commands_parse(arguments, monkeypatch, capsys, tmp_path):
    setup = tmp_path / "fetch.sh"
    setup.touch()
    monkeypatch.chdir(ROOT)
    arguments = [str(setup) if word == setup.name else word for word in arguments]
    main([*arguments[:2], "--dry-run", *arguments[2:]])
    assert "maxmars train" in capsys.readouterr().out


def test_the_layout_names_every_module():
    tree = TEXT[TEXT.index("## Layout") : TEXT.index("## Development")]
    for path in (ROOT / "maxmars").glob("*.py"):
        if not path.name.startswith("__"):
            assert path.name in tree, f"{path.name} is not in the README's layout"
    assert len(TEXT.splitlines()) < 500  # one page for each command is too many
