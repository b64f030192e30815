"""`maxmars eval` and scores in the loop, on two short runs."""

import json
import re
import shutil

import numpy as np
import pytest
from hellaswag_questions import SHORT, fields_of, write_questions_file
from refusals import stopped
from tiny import short_config, values_of
from token_directories import write_shards

from maxmars.cli import main
from maxmars.config import EvalConfig
from maxmars.train import train


def run_eval(*arguments):
    # Without the last two, JAX would look for other processes, which it does only when it starts.
    main(["eval", *map(str, arguments), "--num-processes", "1"])


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """Five questions, and one with endings that are longer than the context of the first run."""
    rows = [fields_of(number, *question) for number, question in enumerate(SHORT)]
    rows.append(rows[0] | {"ind": 5, "endings": [f"{'very ' * 5}{end}" for end in "abcd"]})
    return write_questions_file(tmp_path_factory.mktemp("questions") / "questions.jsonl", rows)


@pytest.fixture(scope="module")
def scoring_run(tmp_path_factory, questions):
    """A run of two steps that scores HellaSwag at every step, beside its `tokens`."""
    folder = tmp_path_factory.mktemp("runs")
    scoring = EvalConfig(every=2, num_windows=10, hellaswag_every=1, hellaswag_path=str(questions))
    train(short_config(folder / "tokens", eval=scoring), folder / "seed0")
    return folder / "seed0"


@pytest.fixture(scope="module")
def report(scoring_run, finished_run, questions, tmp_path_factory):
    """The JSON of `maxmars eval` with --against, and its directory."""
    path = tmp_path_factory.mktemp("out") / "new" / "scores.json"
    options = ["--hellaswag.path", questions, "--output", path]
    run_eval(scoring_run, "--against", finished_run, *options)
    return json.loads(path.read_text()), path.parent


@pytest.mark.seconds
def test_the_command_finds_what_the_loop_found(scoring_run, finished_run, report):
    scores, _ = report
    assert scores["name"] == "seed0, step 2"
    assert scores["loss"] == pytest.approx(values_of(scoring_run, "eval/loss")[2], abs=1e-6)
    assert scores["loss_tokens"] == 160
    for protocol, prefix in (("lm_eval", "hellaswag"), ("completion", "hellaswag_completion")):
        for metric in ("acc", "acc_norm"):
            values = values_of(scoring_run, f"eval/{prefix}_{metric}")
            assert values.keys() == {0, 1, 2}
            assert scores["hellaswag"][protocol][metric] == values[2]
    assert all(seconds > 0 for seconds in values_of(scoring_run, "perf/hellaswag_time").values())
    assert scores["environment"]["num_devices"] == 8
    log = (scoring_run / "logs" / "host_000.log").read_text()
    assert re.search(r" of 5 questions \(.*1 left out", log)
    assert scores["hellaswag_left_out"] == 1
    other = scores["against"]  # with a longer context: on the same windows
    assert (other["name"], other["loss_tokens"]) == (f"{finished_run.name}, step 6", 160)
    assert other["hellaswag"]["lm_eval"]["num_questions"] == 5


def test_the_comparison_is_that_of_the_questions(report):
    scores, directory = report
    both = [
        [json.loads(line) for line in (directory / name).read_text().splitlines()]
        for name in ("scores.hellaswag.jsonl", "scores.against.hellaswag.jsonl")
    ]
    assert [len(rows) for rows in both] == [5, 5]
    for protocol in ("lm_eval", "completion"):
        for metric, choice in (("acc", "choice"), ("acc_norm", "choice_norm")):
            right = [[row[protocol][choice] == row["label"] for row in rows] for rows in both]
            paired = scores["difference"]["hellaswag"][protocol][metric]
            assert paired["difference"] == pytest.approx(np.mean(right[0]) - np.mean(right[1]))
            assert paired["only_first"] == sum(a and not b for a, b in zip(*right, strict=True))
            assert paired["interval_95"][0] <= paired["difference"] <= paired["interval_95"][1]
    loss = scores["loss"] - scores["against"]["loss"]
    assert scores["difference"]["loss"] == pytest.approx(loss)


@pytest.mark.seconds
def test_the_table_counts_questions_that_are_too_long(
    scoring_run, finished_run, questions, tmp_path, capsys
):
    output = tmp_path / "scores.json"
    options = ["--tasks", "hellaswag", "--hellaswag.path", questions, "--output", output]
    run_eval(finished_run / "checkpoints" / "4", *options)
    table = capsys.readouterr().out
    assert f"{finished_run.name}, step 4" in table
    assert re.search(
        r"^hellaswag completion .*\n  acc  .*\n  acc_norm  +[\d.]+ ± [\d.]+ ", table, re.MULTILINE
    )
    assert re.search(r"6 questions \(\d cut \(lm_eval\), \d cut \(comp", table)
    assert json.loads(output.read_text())["hellaswag_left_out"] == 0
    # What the one leaves out, the other does not score either.
    run_eval(finished_run, *options, "--against", scoring_run)
    assert re.search(r"5 questions \(.*1 left out", " ".join(capsys.readouterr().out.split()))
    scores = json.loads(output.read_text())
    assert scores["hellaswag_left_out"] == 1
    assert scores["against"]["hellaswag"]["completion"]["num_questions"] == 5
    rows = (tmp_path / "scores.hellaswag.jsonl").read_text().splitlines()
    assert [json.loads(row)["ind"] for row in rows] == [0, 1, 2, 3, 4]


@pytest.mark.seconds
def test_a_loss_on_other_tokens_devices_and_batches(scoring_run, report, tmp_path):
    write_shards(tmp_path / "other", np.arange(100), np.arange(100), vocab_size=257)
    output = tmp_path / "scores.json"

    def score(*options):
        run_eval(scoring_run, "--tasks", "loss", "--batch-size", 1, "--output", output, *options)
        return json.loads(output.read_text())

    one = score("--data.path", tmp_path / "other")
    assert one["loss_tokens"] == 96
    assert "hellaswag" not in one
    assert score("--data.num-windows", 2, "--mesh.fsdp", 8)["loss_tokens"] == 32
    named = score("--data.path", scoring_run.parent / "tokens")  # as many windows
    assert named["loss"] == pytest.approx(report[0]["loss"], abs=1e-6)
    assert named["loss_tokens"] == 160


@pytest.fixture(scope="module")
def directories(scoring_run, tmp_path_factory):
    """Tokens that cannot be scored as they are."""
    folder = tmp_path_factory.mktemp("directories")
    (folder / "a.txt").write_text("a text " * 40)
    (folder / "raw").mkdir()
    (folder / "raw" / "val.bin").write_bytes(bytes(range(100)) * 40)
    shutil.copytree(scoring_run.parent / "tokens", folder / "damaged")
    shard = folder / "damaged" / "val_00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    small = np.arange(100)  # a vocabulary that fits
    write_shards(folder / "gpt2", small, small, vocab_size=257, tokenizer="gpt2")
    return folder


def test_tokens_of_another_program_are_named(scoring_run, directories, capsys):
    options = ["--tasks", "loss", "--data.num-windows", 4, "--data.path", directories / "raw"]
    run_eval(scoring_run, *options, "--data.tokenizer", "byte", "--data.dtype", "uint8")
    assert "loss" in capsys.readouterr().out


UNKNOWN = "--data.tokenizer unknown --data.vocab-size 257 --data.dtype uint8"


@pytest.mark.parametrize(
    ("code", "arguments", "named"),
    [
        (1, "--against nowhere", "nowhere"),
        (1, "--data.path nowhere", "--tasks hellaswag"),
        (2, "--output gs://bucket/a.json", "--output gs:/bucket/a.json"),
        (2, "--output .", "--output ."),
        (2, "--output /dev/null/new/a.json", "/dev/null"),
        (1, "--tasks loss --data.path raw", "--data.tokenizer"),
        (2, "--tasks loss --data.tokenizer byte --data.dtype uint8", "--data.tokenizer"),
        (1, "--tasks loss --data.path damaged", "damaged/val_00000.bin"),
        (1, "--tasks loss --data.path gpt2", "gpt2"),
        (2, "--tasks loss --data.path a.txt --data.tokenizer byte", "--data.tokenizer"),
        (1, f"--tasks loss --data.path raw {UNKNOWN}", "--data.tokenizer"),
    ],
)
def test_clear_errors(
    scoring_run, questions, directories, tiktoken_cache, monkeypatch, code, arguments, named
):
    monkeypatch.chdir(directories)
    with stopped(code, named):
        run_eval(scoring_run, "--hellaswag.path", questions, *arguments.split())
