"""Evaluations of the user's own: made while a run trains, made up after a kill, and refused."""

import json
import math
import re
import shutil

import pytest
from refusals import refused, stopped
from running import finish_well, start, start_two, write_config

from maxmars.checkpoint import list_steps
from maxmars.cli import main
from maxmars.cli.parse import ConfigArguments, parse_arguments
from maxmars.config import EvalConfig, from_dict, to_dict
from maxmars.config.user_code import Source
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

def number(trained):
    return 0.5

def empty(trained):
    return {}

def text(trained):
    return {"share": "0.5"}

def several(trained):
    return {"share": jnp.zeros(3)}

def numbered(trained):
    return {1: 0.5}

def needs_two(trained, tokenizer):
    return {"share": 0.5}

constant = 1
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
def test_its_numbers_are_those_of_eval_on_the_finished_run(folder, capsys):
    train("run", "--log.tensorboard", "True")
    scored = scores(folder / "run")
    assert [step for step, key in scored if key == "eval/rhyme/entropy"] == [0, 2, 4, 6]
    assert scored[6, "eval/rhyme/length"] == 5
    assert 0 < scored[6, "eval/rhyme/entropy"] < math.log(257)
    printed = capsys.readouterr().out
    assert "  rhyme      entropy " in printed.partition("done: 6 steps")[2]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["eval/rhyme/entropy"] == scored[6, "eval/rhyme/entropy"]

    (folder / "mine.py").unlink()  # the run keeps it
    main(["eval", "run", "--tasks", "own", "--output", "scores.json", "--num-processes", "1"])
    entropy = json.loads((folder / "scores.json").read_text())["own"]["rhyme"]["entropy"]
    assert entropy == pytest.approx(scored[6, "eval/rhyme/entropy"], rel=1e-5)
    assert "entropy" in capsys.readouterr().out
    (folder / "mine.py").write_text("raise NotImplementedError")
    main(["audit", "run", "--replay", "2"])  # which makes no evaluation


@pytest.mark.seconds
def test_another_function_may_score_a_finished_run_or_be_added_to_it(folder):
    train("run")
    words = ["--tasks", "own", "--own", "mine.py:spoken", "--against", "run/checkpoints/4"]
    main(["eval", "run", *words, "--output", "scores.json", "--num-processes", "1"])
    report = json.loads((folder / "scores.json").read_text())
    assert report["own"]["spoken"] == {"letters": 2, "none": "NaN", "in $": 1}
    assert report["difference"]["own"]["spoken"]["letters"] == 0

    before = scores(folder / "run")
    train("run", "--eval.own", "mine.py:rhyme", "mine.py:spoken")
    added = {(6, "eval/spoken/letters"): 2, (6, "eval/spoken/none"): "NaN"}
    added[6, "eval/spoken/in $"] = 1
    assert scores(folder / "run") == before | added

    changed = MINE.replace('"letters"', '"texts"')
    (folder / "mine.py").write_text(changed.replace("def spoken", "def said"))
    train("run", "--eval.own", "mine.py:said")
    assert scores(folder / "run") == before | added | {
        (6, "eval/said/texts"): 2,
        (6, "eval/said/none"): "NaN",
        (6, "eval/said/in $"): 1,
    }
    main(["audit", "run"])
    main(["report", "run"])
    assert "said/texts" in (folder / "run" / "report" / "curves.csv").read_text()
    main(["eval", "run", "--tasks", "own", "--output", "scores.json", "--num-processes", "1"])
    assert json.loads((folder / "scores.json").read_text())["own"].keys() == {"said"}


@pytest.mark.seconds
def test_a_changed_function_goes_on_and_is_recorded(folder):
    train("run", "--num-steps", "2")
    (folder / "mine.py").write_text(MINE.replace('"length": ', '"tokens": 2 * '))
    train("run", "--num-steps", "4")
    scored = scores(folder / "run")
    assert (2, "eval/rhyme/length") in scored
    assert (2, "eval/rhyme/tokens") not in scored
    assert scored[4, "eval/rhyme/tokens"] == 10
    assert "2 * " in (folder / "run" / "sources" / "eval" / "mine.py").read_text()
    began = map(json.loads, (folder / "run" / "journal.jsonl").read_text().splitlines())
    digests = [b["config"]["eval"]["own"][0]["sha256"] for b in began if b["kind"] == "began"]
    assert len(set(digests)) == 2
    main(["audit", "run"])


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


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_call_it_together(folder):
    options = ["--eval.own", f"{folder}/mine.py:rhyme", f"{folder}/mine.py:spoken"]
    finish_well(start_two(folder, "two", *options))
    together = scores(folder / "two")
    assert together[6, "eval/spoken/letters"] == 2
    finish_well([start(folder, "one", *options)])
    for key, value in scores(folder / "one").items():
        assert float(together[key]) == pytest.approx(float(value), rel=1e-3, nan_ok=True), key


LINE = MINE[: MINE.index("1 / 0")].count("\n") + 1


@pytest.mark.parametrize(
    ("own", "code", "named", "begun"),
    [
        ("mine.py", 2, ["'mine.py' must", "my_eval.py:rhyme"], False),
        ("none.py:rhyme", 1, ["none.py"], False),
        ("mine.py:constant", 1, ["'constant'"], False),
        ("mine.py:needs_two", 1, ["mine.py:needs_two", "tokenizer"], False),
        ("mine.py:divided", 1, [f"mine.py:{LINE}", "ZeroDivision"], True),
        ("mine.py:number", 1, ["mine.py:number", "0.5"], True),
        ("mine.py:empty", 1, ["mine.py:empty", "{}"], True),
        ("mine.py:text", 1, ["mine.py:text", "share", "'0.5'"], True),
        ("mine.py:several", 1, ["mine.py:several", "share", "[3]"], True),
        ("mine.py:numbered", 1, ["mine.py:numbered", "1"], True),
    ],
)
def test_a_wrong_function_is_refused_before_the_first_step(folder, own, code, named, begun):
    with stopped(code, "eval.own", *named):
        train("run", "--eval.own", own)
    assert (folder / "run").exists() == begun
    assert not begun or not any("train/loss" in row for row in read_metrics(folder / "run"))


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


def test_a_record_of_before_has_none(folder):
    config = EvalConfig(own=("mine.py:rhyme",))
    record = json.loads(json.dumps(to_dict(config)))
    assert from_dict(record) == config
    del record["own"]
    assert from_dict(record) == EvalConfig()
