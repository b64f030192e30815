"""Validation on several named sets: `--eval.data`, `keep_best_of`, and `maxmars eval`."""

import json
import os
import shutil

import numpy as np
import pytest
from refusals import stopped
from running import train_here, write_config
from tiny import values_of
from token_directories import write_shards

from maxmars.checkpoint import list_steps
from maxmars.cli import main
from maxmars.config import ValidationSet
from maxmars.data.prepare import prepare_validation_text
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.distributed.files import resolve
from maxmars.train.metrics import read_metrics

OWN = """
import numpy as np, grain

def windows(*, split, length):
    assert split == "val"
    tokens = np.random.default_rng(7).integers(0, 200, (9, length + 1))
    return grain.MapDataset.source(tokens)
"""
NAMES = ("mine", "prose", "windows")
NEVER = ("--eval.every", "None")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config of six steps, and sets of three kinds."""
    folder = tmp_path_factory.mktemp("sets")
    rng = np.random.default_rng(0)
    write_shards(folder / "mine", *(rng.integers(0, 200, n) for n in (400, 700)), vocab_size=257)
    (folder / "prose.txt").write_text("It was a bright cold day in April. " * 40)
    (folder / "own.py").write_text(OWN)
    arguments = (
        "optimizer=ADAMW, schedule=ScheduleConfig(warmup_steps=0), "
        "eval=EvalConfig(every=1, num_windows=20, batch_size=8), "
        "checkpoint=CheckpointConfig(every=2, keep_last=9)"
    )
    return write_config(folder, arguments)


def sets(folder):
    own = folder / "own.py:windows"
    return ["--eval.data", f"mine={folder / 'mine'}", folder / "prose.txt", own]


def evaluations(workdir):
    rows = read_metrics(workdir)
    found = {(r["step"], k): v for r in rows for k, v in r.items() if k.startswith("eval/")}
    assert len(found) == sum(k.startswith("eval/") for r in rows for k in r)  # each once
    return found


@pytest.fixture(scope="module")
def finished(folder):
    """An undisturbed run with all sets, on eight devices."""
    train_here(folder, "finished", *sets(folder))
    return folder / "finished"


def test_each_set_has_its_metrics_and_its_digest(finished):
    found = evaluations(finished)
    metrics = {"eval/loss", "eval/bits_per_byte"}
    metrics |= {f"eval/{name}/{key}" for name in NAMES for key in ("loss", "bits_per_byte")}
    assert found.keys() == {(step, key) for step in range(7) for key in metrics}
    log = (finished / "logs" / "host_000.log").read_text()
    for name in NAMES:
        assert f"of {name} {found[6, f'eval/{name}/loss']:.4f}" in log
    recorded = json.loads((finished / "config.json").read_text())["eval"]["data"]
    assert [one["name"] for one in recorded] == list(NAMES)
    assert all(len(one["digest"]) == 64 for one in recorded)
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["eval/prose/loss"] == found[6, "eval/prose/loss"]


@pytest.mark.seconds
@pytest.mark.usefixtures("without_figures")
def test_eval_finds_what_the_loop_found(folder, finished, tmp_path, capsys):
    found, output = evaluations(finished), tmp_path / "scores.json"

    def score(*options):
        words = ["eval", finished, "--tasks", "loss", "--output", output, "--num-processes", 1]
        main([*map(str, [*words, *options])])
        return json.loads(output.read_text())

    whole = score()
    assert whole["loss"] == pytest.approx(found[6, "eval/loss"], abs=1e-6)
    for name in NAMES:
        for key in ("loss", "bits_per_byte"):
            recorded = found[6, f"eval/{name}/{key}"]
            assert whole[f"{name}/{key}"] == pytest.approx(recorded, abs=1e-5), (name, key)
    assert "prose loss" in capsys.readouterr().out
    # A place alone is the validation loss; what is named, or one of several, has its name.
    one = score("--data.path", folder / "prose.txt")
    assert one["loss"] == pytest.approx(found[6, "eval/prose/loss"], abs=1e-6)
    named = score("--data.path", f"prose={folder}/prose.txt")
    assert "loss" not in named
    assert named["prose/loss"] == one["loss"]
    two = score("--data.path", folder / "mine", f"text={folder}/prose.txt", "--against", finished)
    assert "loss" not in two
    assert two["text/loss"] == pytest.approx(found[6, "eval/prose/loss"], abs=1e-6)
    assert two["against"]["mine/loss"] == pytest.approx(found[6, "eval/mine/loss"], abs=1e-6)
    assert two["difference"]["mine/loss"] == 0
    main(["export", str(finished), str(tmp_path / "hf"), "--report", str(output)])
    card = (tmp_path / "hf" / "README.md").read_text()
    prose = f"{found[6, 'eval/prose/loss']:.4f}"
    assert f"| prose | loss, nats a token | {prose} | at most 20 windows |" in card
    assert f"| text | loss, nats a token | {two['text/loss']:.4f} |" in card
    main(["report", str(finished)])
    assert "eval/mine/loss" in (finished / "report" / "curves.csv").read_text()


@pytest.mark.seconds
def test_eval_needs_only_what_it_scores(folder, finished, tmp_path):
    lost, alone = tmp_path / "lost", tmp_path / "alone"
    shutil.copytree(finished, lost)
    shutil.rmtree(lost / "sources" / "eval")
    shutil.copytree(finished / "checkpoints", alone / "checkpoints")
    shutil.copytree(finished / "tokenizer", alone / "tokenizer")
    for run in (lost, alone):
        words = ["eval", run, "--tasks", "loss", "--data.path", folder / "mine"]
        main([*map(str, [*words, "--num-processes", 1, "--output", tmp_path / "scores.json"])])
        scores = json.loads((tmp_path / "scores.json").read_text())
        # As many windows as in training.
        loss = evaluations(finished)[6, "eval/mine/loss"]
        assert scores["loss"] == pytest.approx(loss, abs=1e-6)
    with stopped(1, "own.py"):
        main(["eval", str(lost), "--tasks", "loss", "--num-processes", "1"])


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("data/fineweb-v1.1", "fineweb-v1.1"),
        ("wiki.jsonl.gz", "wiki"),
        ("a.b/My.TXT", "My"),
        ("gs://bucket/tokens/", "tokens"),
        ("own.py:windows", "windows"),
    ],
)
def test_the_name_of_a_place(place, name):
    assert ValidationSet.parse(place).name == name


@pytest.mark.seconds
def test_a_run_goes_on_on_another_mesh(folder, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for step in ("4", "6"):  # as a kill leaves it
        shutil.rmtree(run / "checkpoints" / step)
    train_here(folder, run, *sets(folder), "--mesh.fsdp", 2)
    ours, theirs = evaluations(run), evaluations(finished)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, abs=2e-5), key


@pytest.mark.seconds
def test_a_changed_set_is_refused_and_another_name_is_not(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one " * 100)
    train_here(folder, tmp_path / "run", "--num-steps", 1, "--eval.data", text)
    text.write_text("two " * 100)
    # A session without evaluations keeps the digest.
    train_here(folder, tmp_path / "run", "--num-steps", 2, "--eval.data", text, *NEVER)
    with stopped(1):
        train_here(folder, tmp_path / "run", "--num-steps", 3, "--eval.data", text)
    train_here(folder, tmp_path / "run", "--num-steps", 3, "--eval.data", f"other={text}")
    # The step that it went on from lacked this one.
    assert values_of(tmp_path / "run", "eval/other/loss").keys() == {2, 3}


def test_files_of_one_name_size_and_time_in_two_folders(tmp_path):
    places = []
    for word in ("one ", "two "):
        file = tmp_path / word.strip() / "text.txt"
        file.parent.mkdir()
        file.write_text(word * 9)
        os.utime(file, (1e9, 1e9))
        places.append(prepare_validation_text(resolve(file), ByteTokenizer()))
    assert places[0] != places[1]


@pytest.mark.seconds
def test_the_best_by_a_set(folder, tmp_path):
    options = ["--checkpoint.every", 1, "--checkpoint.keep-last", 1, "--checkpoint.keep-best", 1]
    # The model learns English text, so random tokens become unlikely.
    options += ["--optimizer.learning-rate", 0.01, "--eval.data", folder / "own.py:windows"]
    train_here(folder, tmp_path / "run", *options, "--checkpoint.keep-best-of", "windows")
    losses = values_of(tmp_path / "run", "eval/windows/loss")
    best = min(range(1, 7), key=losses.__getitem__)
    assert list_steps(tmp_path / "run" / "checkpoints") == sorted({best, 6})
    assert best != 6
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    least = min(losses, key=losses.__getitem__)
    assert summary["best"] == {"eval/windows/loss": losses[least], "step": least}
    main(["audit", str(tmp_path / "run")])


@pytest.mark.seconds
def test_data_without_a_validation_split_of_their_own(folder, tmp_path):
    write_shards(tmp_path / "tokens", np.arange(900) % 200, vocab_size=257)
    write_config(tmp_path, "data=TokenShardsConfig(path=str(TOKENS)), optimizer=ADAMW")
    options = ["--num-steps", 1, "--eval.data", folder / "prose.txt"]
    with stopped(1, "keep_best_of"):
        train_here(tmp_path, "run", *options, "--checkpoint.keep-best", 1)
    train_here(tmp_path, "run", *options)
    assert "`val`" in (tmp_path / "run" / "logs" / "host_000.log").read_text()
    assert {key for _, key in evaluations(tmp_path / "run")} == {
        "eval/prose/loss",
        "eval/prose/bits_per_byte",
    }


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        ("--eval.data a=nowhere", 1, "nowhere"),
        ("--eval.data a=nowhere.py:f", 1, "nowhere.py"),
        ("--eval.data gpt2", 1, "gpt2"),
        ("--eval.data short.txt", 1, "too few"),
        ("--eval.data a=mine a=prose.txt", 2, "a"),
        ("--eval.data windows=mine own.py:windows", 2, "windows"),
        ("--eval.data =mine", 2, "NAME=PLACE"),
        ("--eval.data mine --checkpoint.keep-best-of mine", 2, "keep_best"),
        ("--checkpoint.keep-best 1 --checkpoint.keep-best-of prose --eval.data mine", 2, "prose"),
    ],
)
def test_wrong_use(folder, tmp_path, monkeypatch, options, code, named):
    monkeypatch.chdir(folder)
    (folder / "short.txt").write_text("hi")
    small = np.arange(100)
    if not (folder / "gpt2").exists():
        write_shards(folder / "gpt2", small, small, vocab_size=257, tokenizer="gpt2")
    with stopped(code, named):
        train_here(folder, tmp_path / "run", *options.split())
    assert not (tmp_path / "run" / "config.json").exists()
