"""Every README: its Python runs, its commands have the flags that it names, its links exist.

So do the links of the pages in tools/examples, whose code `tests/tools/test_pages.py` runs, and the
flags of the commands there that need what is not at hand.
"""

import dataclasses
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from markdown_pages import anchors_of, blocks_of, is_run, links_of
from refusals import stopped
from running import gpus_for_jax

from maxmars.cli import COMMANDS, main
from maxmars.cli.parse import parse_arguments
from maxmars.cli.train import TrainArguments
from maxmars.config import GPT2Config, load_config

ROOT = Path(__file__).resolve().parents[1]
ROOMS = sorted((ROOT / "maxmars").glob("*/README.md"))
RESULTS = [p for p in [ROOT / ".github" / "results" / "README.md"] if p.exists()]  # not in an sdist
TRACK3 = ROOT / "tools" / "examples" / "track3" / "README.md"
ABOUT = sorted((ROOT / ".github").glob("*.md"))  # not in an sdist
READMES = [ROOT / "README.md", ROOT / "tools" / "README.md", TRACK3, *RESULTS, *ABOUT, *ROOMS]
EXAMPLES = sorted((ROOT / "tools" / "examples").glob("*.md"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [*READMES, *EXAMPLES]}


def command_lines(name: str, text: str) -> list[list[str]]:
    """The commands that nothing runs."""
    script = "".join(
        block.code
        for block in blocks_of(text)
        if block.language == "sh" and not (ROOT / name in EXAMPLES and is_run(block))
    ).replace("\\\n", " ")
    return [words for line in script.splitlines() if (words := shlex.split(line, comments=True))]


PYTHON = [
    pytest.param(name, block.code, id=name, marks=() if name == "README.md" else pytest.mark.slow)
    for name, text in TEXTS.items()
    if ROOT / name in READMES
    for block in blocks_of(text)
    if block.language == "python"
]
LINES = {(name, *line): line for name, text in TEXTS.items() for line in command_lines(name, text)}
SMALL = GPT2Config(num_layers=1, num_heads=2, embed_dim=32, max_seq_len=32, vocab_size=257)
MAXMARS = {key: line[1:] for key, line in LINES.items() if line[0] == "maxmars"}


@pytest.fixture
def place(finished_run, byte_tokens, tmp_path, monkeypatch):
    """The current directory: a checkout with a finished run and prepared tokens in it."""
    links = {"runs/quickstart": finished_run, "data/mine": byte_tokens}
    for name, target in (links | {name: ROOT / name for name in ("configs", "tools")}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    (tmp_path / "fetch.sh").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.seconds
@pytest.mark.parametrize(("name", "code"), PYTHON)
def test_python_runs(name, code, place):
    code = re.sub(r"num_steps=\d+", "num_steps=2", code)
    if "model=" not in code:  # the quickstart's own takes long to compile
        code = code.replace("num_steps=2", "num_steps=2, model=SMALL")
    exec(compile(code, name, "exec"), {"__name__": "readme", "SMALL": SMALL})


def flags_of(words: list[str]) -> dict[str, list[str]]:
    """The options of a command line before `--`, each with its values."""
    flags: dict[str, list[str]] = {}
    for word in itertools.takewhile(lambda word: word != "--", words):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flags[flag] = [value] if equals else []
        elif flags:
            flags[[*flags][-1]].append(word)
    return flags


def test_commands_have_these_flags(place, tmp_path, monkeypatch, capsys):
    """Commands of one kind have the same options, which are looked at once: it takes a second."""
    flags: dict[tuple[str, ...], dict[str, list[str]]] = {}
    shown: dict[tuple[str, ...], list[str]] = {}  # of a kind, its words before the options
    for (name, *_), (command, *rest) in MAXMARS.items():
        for block in blocks_of(TEXTS[name]):
            if file := block.said("file"):
                Path(file).write_text(block.code)
        assert command in COMMANDS, name
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), rest))
        # Words after these need not exist: `data prepare FILES`, `generate RUN`.
        words = words[
            : {"launch": 2, "data": 1, "plan": 1, "train": 1, "compare": 1}.get(command, 0)
        ]
        kind = (command, *words)
        if command in ("train", "plan", "compare") and words != ["verify"]:
            file = words[0].partition(":")[0]
            # What stands behind the file may be for its `get_comparison`.
            config = load_config(file if command == "compare" else words[0])
            parts = (config.model, config.optimizer, config.data)
            kind = (command, file, *(type(part).__name__ for part in parts))
        elif command == "launch" and words[1] not in ("status", "logs", "stop", "delete"):
            kind = (command, *rest)
        shown.setdefault(kind, words)
        flags[kind] = flags.get(kind, {}) | flags_of(rest)
    for (command, *rest), options in flags.items():
        options = {k: v for k, v in options.items() if k not in ("--help", "--help-all")}
        words = shown[command, *rest]
        if command == "train":
            words = [*words, *itertools.chain(*([flag, *v] for flag, v in options.items()))]
            assert parse_arguments(TrainArguments, words, prog="maxmars train").config.name
        elif command == "launch" and rest != words:
            with monkeypatch.context() as patch:
                gpus_for_jax(tmp_path, patch)
                main([command, rest[0], "--dry-run", *rest[1:]])
            assert "maxmars train" in capsys.readouterr().out
        else:
            with stopped(0):
                main([command, *words, "--help-all"])
            printed = capsys.readouterr().out
            assert [flag for flag in options if flag not in printed] == [], (command, *words)


def test_fine_tuning_trains_the_model_of_the_hubs_weights():
    (words,) = [
        w[1:] for w in MAXMARS.values() if w[0] == "train" and "hf:openai-community/gpt2" in w
    ]
    model = parse_arguments(TrainArguments, words, prog="maxmars train").config.model
    assert dataclasses.replace(model, remat=None) == GPT2Config.small()


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_are_named_exist(name):
    text, here = TEXTS[name], (ROOT / name).parent
    for link in links_of(text):
        path, _, anchor = link.partition("#")
        target = here / path if path else ROOT / name
        if not RESULTS and ".github" in path:
            continue
        assert link.startswith("http") or target.exists(), link
        assert not anchor or link.startswith("http") or anchor in anchors_of(target.read_text())
    in_text = re.findall(r"`((?:tests|tools|configs|maxmars|\.github|\.ci)/[\w/.]*\w)`", text)
    in_commands = [w for key, line in LINES.items() if key[0] == name for w in line]
    in_commands = [w for w in in_commands if re.match(r"(tests|tools|configs|\.ci)/", w)]
    for path in [*in_text, *in_commands]:
        assert (ROOT / path.partition(":")[0]).exists(), path


def test_the_first_page_is_short_and_names_every_room():
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 180
    for path in ROOMS:
        assert f"](maxmars/{path.parent.name}/README.md)" in text


def test_one_address_of_the_repository_stands_everywhere():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    repository = urls["Repository"]
    assert all(url.startswith(repository) for url in urls.values())
    text = TEXTS["README.md"]
    assert f"git clone {repository} " in text
    assert f"pip install git+{repository} " in text
    assert set(re.findall(r"https://[^\s/]+/[^\s/]+/maxmars\b", text)) == {repository}
