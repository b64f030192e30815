"""Data, an optimizer and an evaluation of the user's own, which a run records: their options have
names like those of credentials, and their code runs only from the copies that the run keeps."""

import json
import shutil
import timeit

import optax
import pytest
from refusals import stopped

from maxmars.checkpoint.reader import checksum
from maxmars.cli import main
from maxmars.config import OptaxConfig, from_dict, to_dict

OWN = """
import grain, numpy, optax

def windows(*, split, length, text_key, answer_token):
    assert (text_key, answer_token) == ("question", "<answer>"), (text_key, answer_token)
    tokens = numpy.random.default_rng(0).integers(0, 256, (64, length + 1))
    return grain.MapDataset.source(tokens.astype(numpy.int32))

def optimizer(learning_rate, *, rng_key, signature):
    assert (rng_key, signature) == ("7", ("a", "b")), (rng_key, signature)
    return optax.adam(learning_rate)

def count(trained):
    return {"of tokens": trained.tokenizer.num_text_ids}
"""
CONFIG = """
from maxmars.config import *

def get_config(author: str = "") -> TrainConfig:
    return TrainConfig(
        name="honest", num_steps=2, global_batch_size=8,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=257),
        data=GrainConfig(
            source="own.py:windows", tokenizer="byte",
            options={"text_key": "", "answer_token": "<answer>"},
        ),
        optimizer=OptaxConfig(
            make="own.py:optimizer", learning_rate=1e-3,
            options={"rng_key": "7", "signature": ["a", "b"]},
        ),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=4),
        eval=EvalConfig(every=2, num_windows=8, batch_size=8, own=("own.py:count",)),
        checkpoint=CheckpointConfig(every=1, keep_last=9),
    )
"""
COMMANDS = {
    "sources": ["eval", "RUN", "--num-processes", "1", "--tasks", "loss"],
    "sources/optimizer": ["audit", "RUN", "--replay", "1"],
    "sources/eval": ["eval", "RUN", "--num-processes", "1", "--tasks", "own"],
}


def train(run, *more):
    config = f"{run.parent / 'config.py'}:author=me"
    words = ["train", config, "--workdir", str(run), "--num-processes", "1"]
    main([*words, "--data.options.text-key", "question", *more])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    (folder / "config.py").write_text(CONFIG)
    train(folder / "run")
    return folder / "run"


@pytest.mark.slow
def test_a_run_with_honest_options_continues_and_is_evaluated_and_replayed(run, capsys):
    train(run, "--num-steps", "4")
    options = json.loads((run / "config.json").read_text())["data"]["options"]
    assert options == {"text_key": "question", "answer_token": "<answer>"}
    for command in COMMANDS.values():
        main([str(run) if word == "RUN" else word for word in command])
    printed = capsys.readouterr().out
    assert "the same digest" in printed
    assert "of tokens" in printed


@pytest.mark.seconds
@pytest.mark.parametrize("folder", COMMANDS)
def test_code_runs_only_from_the_copy_that_the_run_recorded(run, folder, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    kept = copy / folder / "own.py"
    command = [str(copy) if word == "RUN" else word for word in COMMANDS[folder]]
    for change in (lambda: kept.write_text("print('it ran')\n" + OWN), kept.unlink):
        change()  # own.py is still where it was in training
        capsys.readouterr()
        with stopped(1) as errors:
            main(command)
        assert str(kept) in errors.lines[-1]
        assert f"--init-from {copy}" in errors.lines[-1]
        assert "it ran" not in capsys.readouterr().out


@pytest.mark.seconds
def test_what_runs_no_recorded_code_needs_none(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "sources")
    main(["generate", str(copy), "--prompt", "a", "--max-new-tokens", "1"])
    main(["audit", str(copy)])
    printed = capsys.readouterr().out
    assert "one trajectory" in printed
    assert all(str(copy / folder / "own.py") in printed for folder in COMMANDS)
    train(run, "--workdir", str(tmp_path / "new"), "--init-from", str(copy))


FOREIGN = """
import pathlib

pathlib.Path(__file__).with_name("it ran").touch()

def make(*args, **options):
    raise ValueError("it ran")
"""
QUESTION = {"ind": 0, "activity_label": "A", "ctx_a": "B.", "ctx_b": "c", "ctx": "B. c"}
QUESTION |= {"endings": ["d", "e", "f", "g"], "label": 0, "split": "val", "source_id": "a"}


def record(run, change):
    """Change the config in a run's config.json and checkpoints, which its journal would tell of."""
    (run / "journal.jsonl").unlink()
    for path in [run / "config.json", *run.glob("checkpoints/*/meta/data.json")]:
        fields = json.loads(path.read_text())
        if path.name == "config.json":
            change(fields)
        else:
            change(fields["config"])
            fields["checksum"] = checksum(fields)
        path.write_text(json.dumps(fields))


@pytest.mark.seconds
@pytest.mark.parametrize("way", ["text", "missing text", "link", "model", "optimizer"])
def test_no_command_runs_a_file_that_only_a_record_names(run, way, tmp_path):
    foreign, copy = tmp_path / "foreign.py", shutil.copytree(run, tmp_path / "run")
    foreign.write_text(FOREIGN)
    source = {"type": "Source", "file": str(foreign), "function": "make", "sha256": None}
    command = ["eval", str(copy), "--num-processes", "1", "--tasks", "own"]
    if way == "text":
        record(copy, lambda config: config["eval"].update(own=[f"{foreign}:make"]))
    elif way == "missing text":
        record(copy, lambda config: config["eval"].update(own=[source]))
    elif way == "link":
        (copy / "sources" / "eval" / "own.py").rename(foreign)
        (copy / "sources" / "eval" / "own.py").symlink_to(foreign)
    elif way == "model":
        model = {"type": "ModuleConfig", "make": source, "vocab_size": 257, "max_seq_len": 16}
        record(copy, lambda config: config.update(model=model))
        (tmp_path / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
        command[-1:] = ["hellaswag", "--hellaswag.path", str(tmp_path / "questions.jsonl")]
    else:
        record(copy, lambda config: config["optimizer"].update(make=source, options={}))
        command = ["export", str(copy), str(tmp_path / "out")]
    if way == "optimizer":  # whose record alone stands in the card
        main(command)
    else:
        with stopped(1) as errors:
            main(command)
        named = foreign if way == "text" else copy / "sources"
        assert str(named) in errors.lines[-1]
    assert not (tmp_path / "it ran").exists()


@pytest.mark.seconds
def test_an_export_needs_no_file_of_before(run, tmp_path):
    moved = shutil.copytree(run, tmp_path / "run")
    own = run.parent / "own.py"
    own.rename(tmp_path / "own.py")
    try:
        main(["export", str(moved), str(tmp_path / "out")])
    finally:
        (tmp_path / "own.py").rename(own)
    assert "own.py" in (tmp_path / "out" / "README.md").read_text()


def test_of_installed_packages_a_record_runs_optax_alone():
    config = OptaxConfig(make="optax:adam", learning_rate=1e-3)
    assert from_dict(to_dict(config)).make.load(field="optimizer.make") is optax.adam
    config = OptaxConfig(make="timeit:timeit", learning_rate=1e-3)
    assert config.make.load(field="optimizer.make") is timeit.timeit
    with pytest.raises(ValueError, match=r"timeit:timeit.*record"):
        from_dict(to_dict(config)).make.load(field="optimizer.make")
