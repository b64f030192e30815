"""`maxmars eval` and scores in the loop, on two short runs."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from hellaswag_questions import SHORT, fields_of, write_questions_file
from tiny import ADAMW, tiny_config
from token_directories import write_shards, write_tfds

from maxmars.cli import main
from maxmars.config import EvalConfig, MeshConfig, TokenShardsConfig
from maxmars.data.token_files import TokenShards
from maxmars.distributed.sharding import make_mesh
from maxmars.eval.report import score_models
from maxmars.train import train

METRICS = ("acc", "acc_norm")


def run_eval(*arguments):
    # Without the last two, JAX would look for other processes, which it does only when it starts.
    main(["eval", *map(str, arguments), "--num-processes", "1"])


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions_file(tmp_path_factory.mktemp("questions") / "questions.jsonl")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokens") / "tokens"
    rng = np.random.default_rng(0)
    write_shards(directory, rng.integers(0, 257, 2000), rng.integers(0, 257, 500), vocab_size=257)
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory, questions, tokens):
    """A run of two steps that scores HellaSwag at every step."""
    workdir = tmp_path_factory.mktemp("runs") / "seed0"
    scoring = EvalConfig(every=2, num_windows=10, hellaswag_every=1, hellaswag_path=str(questions))
    data = TokenShardsConfig(path=str(tokens))
    config = tiny_config(num_steps=2, num_microbatches=1, optimizer=ADAMW, eval=scoring, data=data)
    train(config, workdir)
    return workdir


def recorded(workdir, key):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def report(run, finished_run, questions, tmp_path_factory):
    """The JSON of `maxmars eval` with --against, and its directory."""
    path = tmp_path_factory.mktemp("out") / "new" / "scores.json"
    options = ["--hellaswag.path", questions, "--output", path]
    run_eval(run, "--against", finished_run, *options)
    return json.loads(path.read_text()), path.parent


@pytest.mark.seconds
def test_the_command_finds_what_the_loop_found(run, report):
    scores, _ = report
    assert scores["name"] == "seed0, step 2"
    assert scores["loss"] == pytest.approx(recorded(run, "eval/loss")[2], abs=1e-6)
    assert scores["loss_tokens"] == 160
    for protocol, prefix in (("lm_eval", "hellaswag"), ("completion", "hellaswag_completion")):
        for metric in METRICS:
            values = recorded(run, f"eval/{prefix}_{metric}")
            assert values.keys() == {0, 1, 2}
            assert scores["hellaswag"][protocol][metric] == values[2]
    assert all(seconds > 0 for seconds in recorded(run, "perf/hellaswag_time").values())
    assert scores["environment"]["num_devices"] == 8
    assert " of 5 questions" in (run / "logs" / "host_000.log").read_text()


def test_a_model_with_a_longer_context_is_scored_on_the_same_windows(finished_run, report):
    scores = report[0]["against"]
    assert scores["name"] == f"{finished_run.name}, step 6"
    assert scores["loss_tokens"] == 160
    assert scores["hellaswag"]["lm_eval"]["num_questions"] == 5


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
            found = scores["difference"]["hellaswag"][protocol][metric]
            assert found["difference"] == pytest.approx(np.mean(right[0]) - np.mean(right[1]))
            assert found["only_first"] == sum(a and not b for a, b in zip(*right, strict=True))
            assert found["interval_95"][0] <= found["difference"] <= found["interval_95"][1]
    loss = scores["loss"] - scores["against"]["loss"]
    assert scores["difference"]["loss"] == pytest.approx(loss)


def test_the_table(run, questions, capsys):
    run_eval(run / "checkpoints" / "2", "--hellaswag.path", questions)
    table = capsys.readouterr().out
    assert "seed0, step 2" in table
    assert re.search(
        r"^hellaswag completion .*\n  acc  .*\n  acc_norm  +[\d.]+ ± [\d.]+ ", table, re.MULTILINE
    )
    assert "HellaSwag: 5 questions" in table
    assert "160 tokens" in table


def test_questions_that_are_too_long_are_counted(run, finished_run, tmp_path, capsys):
    rows = [fields_of(number, *question) for number, question in enumerate(SHORT)]
    rows[2] |= {"ctx_a": "They.", "ctx": "They.", "activity_label": "C"}  # the only one for 16
    for row in rows[2:]:
        row["endings"] = [ending[:4] for ending in row["endings"]]
    questions = write_questions_file(tmp_path / "q.jsonl", rows)
    output = tmp_path / "scores.json"
    options = ["--tasks", "hellaswag", "--hellaswag.path", questions, "--output", output]
    run_eval(finished_run, *options)
    assert re.search(r"5 questions \(\d cut \(lm_eval\), \d cut \(comp", capsys.readouterr().out)
    assert json.loads(output.read_text())["hellaswag_left_out"] == 0
    leaving_out = ["--hellaswag.too-long", "leave_out"]
    run_eval(finished_run, *options, "--against", run, *leaving_out)
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 question (4 left out" in printed
    scores = json.loads(output.read_text())
    assert scores["hellaswag_left_out"] == 4
    assert scores["against"]["hellaswag"]["completion"]["num_questions"] == 1
    assert json.loads((tmp_path / "scores.hellaswag.jsonl").read_text())["ind"] == 2


def test_the_mesh_and_the_batch_size_do_not_show(run, questions, report):
    expected = report[0]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    found = score_models([run], mesh, hellaswag_path=questions, batch_size=1).fields
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["hellaswag"] == expected["hellaswag"]


@pytest.mark.seconds
def test_a_loss_on_other_tokens(run, tokens, tmp_path):
    write_shards(tmp_path / "other", np.arange(100), np.arange(100), vocab_size=257)
    mesh = make_mesh(MeshConfig())
    tasks = ("loss",)
    other = TokenShardsConfig(path=str(tmp_path / "other"))
    one = score_models([run], mesh, tasks=tasks, data=other)
    assert one.fields["loss_tokens"] == 96
    assert "hellaswag" not in one.fields
    few = score_models([run], mesh, tasks=tasks, num_windows=2)
    assert few.fields["loss_tokens"] == 32
    own = score_models([run], mesh, tasks=tasks)
    same = TokenShardsConfig(path=str(tokens))
    named = score_models([run], mesh, tasks=tasks, data=same)  # as many windows
    assert named.fields["loss"] == own.fields["loss"]
    assert named.fields["loss_tokens"] == own.fields["loss_tokens"]


def test_tokens_of_another_program_are_named(run, tmp_path, capsys):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "val.bin").write_bytes(bytes(range(100)) * 40)
    options = ["--tasks", "loss", "--data.num-windows", 4]
    named = ["--data.tokenizer", "byte", "--data.dtype", "uint8"]
    run_eval(run, *options, "--data.path", tmp_path / "raw", *named)
    assert "loss" in capsys.readouterr().out
    for wrong in (["--data.path", tmp_path / "raw"], named):
        with pytest.raises(SystemExit):
            run_eval(run, *options, *wrong)
        assert "--data.tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["shards", "tfds"])
def test_a_damaged_shard_is_not_scored(run, tokens, tmp_path, capsys, format):
    directory = tmp_path / "copy"
    shutil.copytree(tokens, directory)
    shard = directory / "val_00000.bin"
    if format == "tfds":
        splits = {name: TokenShards(tokens, name) for name in ("train", "val")}
        records = {n: [s.read(i, 100) for i in range(0, 300, 100)] for n, s in splits.items()}
        own = splits["val"].metadata
        named = {"tokenizer": own.tokenizer, "vocab_size": own.vocab_size}
        directory = write_tfds(tmp_path, records, num_shards=1, **named)
        (shard,) = directory.glob("tokens-val.array_record-00000-*")
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(SystemExit):
        run_eval(run, "--tasks", "loss", "--data.path", directory)
    error = capsys.readouterr().err
    assert str(shard) in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tasks", "loss,arc"], "'arc'"),
        (["--tasks", ","], "no task is named"),
        (["--data.num-windows", "0"], "--data.num-windows 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--hellaswag.num-questions", "0"], "--hellaswag.num-questions 0"),
        (["--against", "nowhere"], "nowhere"),
        (["--data.path", "nowhere"], "--tasks hellaswag"),
        (["--output", "gs://bucket/a.json"], "--output gs:/bucket/a.json"),
        (["--output", "."], "--output ."),
        (["--output", "/dev/null/new/a.json"], "/dev/null"),
    ],
)
def test_clear_errors(run, questions, capsys, arguments, named):
    with pytest.raises(SystemExit):
        run_eval(run, "--hellaswag.path", questions, *arguments)
    assert named in capsys.readouterr().err


def test_tokens_of_another_tokenizer(run, reference_dir, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    small = np.arange(100)  # a vocabulary that fits
    write_shards(tmp_path / "gpt2", small, small, vocab_size=257, tokenizer="gpt2")
    with pytest.raises(SystemExit):
        run_eval(run, "--tasks", "loss", "--data.path", tmp_path / "gpt2")
    assert "gpt2" in capsys.readouterr().err


def test_a_hugging_face_directory_has_no_validation_data(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit):
        run_eval(tmp_path, "--tasks", "loss")
    assert "--data.path DIR" in capsys.readouterr().err
