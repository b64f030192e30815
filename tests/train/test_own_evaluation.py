"""Evaluations of the user's own: made while a run trains, made up after a kill, and refused."""

import json
import math
import re
import shutil

import pytest
from refusals import refused, stopped
from running import write_config
from tiny import trained_model
from trees import mesh_of

from maxmars.checkpoint import list_steps
from maxmars.cli import main
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import EvalConfig
from maxmars.config.user_code import Source
from maxmars.eval.own_evaluation import OwnEvaluation
from maxmars.train.metrics import read_metrics

CONFIG = """
    num_microbatches=1,
    optimizer=ADAMW,
    model=dataclasses.replace(MODEL, num_layers=1),
    eval=EvalConfig(every=2, num_windows=16, batch_size=16, own=("mine.py:rhyme",)),
"""
MINE = """
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from maxmars.eval.generate import generate_texts

def entropy(logits):
    return -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()

def rhyme(trained):
    tokens = trained.tokenizer.encode("def f")[None]
    return {"entropy": entropy(trained.logits(tokens)), "length": tokens.shape[1]}

def spoken(trained):
    texts = generate_texts(trained, ["a", "b"], max_new_tokens=3)
    return {"letters": len(texts), "none": jnp.nan, "in $": 1}

def said(trained):
    return {"texts": 2, "none": jnp.nan, "in $": 1}

def seen(trained):
    # The newest checkpoint that a kill within the evaluation would leave.
    time.sleep(1.0)  # it is written in the background
    saved = [int(path.name) for path in Path("run/checkpoints").glob("[0-9]*")]
    return {"saved": max(saved, default=0)}

calls = []

def fails(trained):
    calls.append(trained.name)
    return {"share": 1 / (2 - len(calls))}

def leaves(trained):
    sys.exit(0)

def divided(trained):
    return {"share": 1 / 0}

def needs_two(trained, tokenizer):
    return {"share": 0.5}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with a config file and the functions beside it."""
    write_config(tmp_path, CONFIG)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(name, *options):
    # Without the last two, JAX would look for other processes, which it does only when it starts.
    main(["train", "config.py", "--workdir", name, *options, "--num-processes", "1"])


def scores(workdir):
    """Numbers of evaluations by step and name."""
    return {
        (row["step"], key): row[key]
        for row in read_metrics(workdir)
        for key in row
        if key.startswith("eval/")
    }


@pytest.mark.seconds
@pytest.mark.usefixtures("without_figures")
def test_its_numbers_are_those_of_eval_and_it_may_be_changed_or_added_to(folder, capsys):
    train("run", "--num-steps", "2")
    changed = MINE.replace('"length": ', '"tokens": 2 * ')
    (folder / "mine.py").write_text(changed)
    train("run", "--log.tensorboard", "True")
    before = scores(folder / "run")
    assert [step for step, key in before if key == "eval/rhyme/entropy"] == [0, 2, 4, 6]
    assert 0 < before[6, "eval/rhyme/entropy"] < math.log(257)
    lengths = {key[0]: before[key] for key in before if key[1] == "eval/rhyme/length"}
    assert lengths == {0: 5, 2: 5}
    assert before[6, "eval/rhyme/tokens"] == 10
    assert "2 * " in (folder / "run" / "sources" / "eval" / "mine.py").read_text()
    began = map(json.loads, (folder / "run" / "journal.jsonl").read_text().splitlines())
    digests = [b["config"]["eval"]["own"][0]["sha256"] for b in began if b["kind"] == "began"]
    assert len(set(digests)) == 2
    printed = capsys.readouterr().out
    assert "  rhyme      entropy " in printed.partition("done: 6 steps")[2]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["eval/rhyme/entropy"] == before[6, "eval/rhyme/entropy"]

    def report(*words):
        words = [*words, "--output", "scores.json", "--num-processes", "1"]
        main(["eval", "run", "--tasks", "own", *words])
        return json.loads((folder / "scores.json").read_text())

    (folder / "mine.py").write_text("raise NotImplementedError")  # the run keeps it
    entropy = report()["own"]["rhyme"]["entropy"]
    assert entropy == pytest.approx(before[6, "eval/rhyme/entropy"], rel=1e-5)
    main(["audit", "run", "--replay", "2"])  # which makes no evaluation
    (folder / "mine.py").write_text(changed)
    other = report("--own", "mine.py:spoken", "--against", "run/checkpoints/4")
    assert other["own"]["spoken"] == {"letters": 2, "none": "NaN", "in $": 1}
    assert other["difference"]["own"]["spoken"]["letters"] == 0

    train("run", "--eval.own", "mine.py:rhyme", "mine.py:spoken")
    spoken = {(6, f"eval/spoken/{n}"): v for n, v in other["own"]["spoken"].items()}
    assert scores(folder / "run") == before | spoken
    train("run", "--eval.own", "mine.py:said")
    said = {(6, "eval/said/texts"): 2, (6, "eval/said/none"): "NaN", (6, "eval/said/in $"): 1}
    assert scores(folder / "run") == before | spoken | said
    main(["audit", "run"])
    main(["report", "run"])
    assert "said/texts" in (folder / "run" / "report" / "curves.csv").read_text()
    assert report()["own"].keys() == {"said"}


@pytest.mark.seconds
def test_what_is_due_is_saved_before_an_evaluation(folder):
    train("run", "--num-steps", "4", "--eval.own", "mine.py:seen")
    saved = {step: value for (step, key), value in scores(folder / "run").items() if "seen" in key}
    assert saved == {0: 0, 2: 2, 4: 4}
    shutil.rmtree(folder / "run")
    with stopped(1, "ZeroDivisionError"):
        train("run", "--eval.own", "mine.py:fails")
    assert list_steps(folder / "run" / "checkpoints") == [2]
    train("run", "--num-steps", "4")  # with the other function
    assert (2, "eval/rhyme/length") in scores(folder / "run")
    main(["audit", "run"])


@pytest.mark.seconds
def test_sys_exit_in_own_code_is_an_error_in_a_line(folder):
    with stopped(1) as errors:
        train("run", "--eval.own", "mine.py:leaves")
    assert re.search(r"mine.py:\d+: .*sys.exit", errors.getvalue())
    (folder / "config.py").write_text("import sys\nsys.exit()\n")
    for command in (["train"], ["plan"]):
        with stopped(1, "config.py:2: "):
            main([*command, "config.py"])


LINE = MINE[: MINE.index("1 / 0")].count("\n") + 1


@pytest.mark.parametrize(
    ("own", "code", "named", "begun"),
    [
        ("mine.py", 2, ["'mine.py' must", "my_eval.py:rhyme"], False),
        ("none.py:rhyme", 1, ["none.py"], False),
        ("mine.py:needs_two", 1, ["mine.py:needs_two", "tokenizer"], False),
        ("mine.py:divided", 1, [f"mine.py:{LINE}", "ZeroDivision"], True),
    ],
)
def test_a_wrong_function_is_refused_before_the_first_step(folder, own, code, named, begun):
    with stopped(code, "eval.own", *named):
        train("run", "--eval.own", own)
    assert (folder / "run").exists() == begun
    assert not begun or not any("train/loss" in row for row in read_metrics(folder / "run"))


@pytest.mark.parametrize(
    ("result", "named"),
    [
        ("0.5", ["0.5"]),
        ("{}", ["{}"]),
        ("{'share': '0.5'}", ["share", "'0.5'"]),
        ("{'share': jnp.zeros(3)}", ["share", "[3]"]),
        ("{'share': {}}", ["share", "{}"]),
        ("{1: 0.5}", ["1"]),
    ],
)
def test_what_is_no_dict_of_numbers_by_name_is_refused(tmp_path, result, named):
    (tmp_path / "own.py").write_text(f"import jax.numpy as jnp\nwrong = lambda _: {result}\n")
    source = f"{tmp_path}/own.py:wrong"
    with refused(ValueError, "eval.own", source, *named):
        OwnEvaluation(source)(trained_model(mesh_of()))


def test_names_that_clash_are_refused(folder):
    shutil.copy("mine.py", "other.py")
    with refused(ValueError, "rhyme"):
        EvalConfig(own=("mine.py:rhyme", "other.py:rhyme"))


def test_the_command_line_names_others_or_none(folder):
    def parsed(*words):
        return parse_arguments(ConfigArguments, ["config.py", *words], prog="maxmars train").config

    assert parsed().eval.own == (Source.parse("mine.py:rhyme"),)
    assert parsed("--eval.own", "mine.py:spoken", "mine.py:rhyme").eval.own == (
        Source.parse("mine.py:spoken"),
        Source.parse("mine.py:rhyme"),
    )
    assert parsed("--eval.own", "None").eval.own is None
