"""What holds for every command: help, errors in one line, exit codes. `test_commands.py` runs each
on a trained model."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from refusals import refused

import maxmars
from maxmars import cli
from maxmars.config.errors import about, in_words
from maxmars.data.metadata import read_metadata

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[2]
MAXMARS = [sys.executable, "-m", "maxmars"]


def exit_code(*arguments):
    try:
        cli.main(list(map(str, arguments)))
    except SystemExit as stop:
        return stop.code
    return 0


def test_help_lists_every_command(capsys):
    cli.main(["--help"])
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name}" in printed
        assert command.help in printed


def test_help_answers_in_half_a_second():
    def seconds():
        start = time.monotonic()
        subprocess.run([*MAXMARS, "--help"], capture_output=True, check=True, cwd=ROOT)
        return time.monotonic() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"maxmars {maxmars.__version__}\n"


def test_no_command_is_wrong_usage(capsys):
    assert exit_code() == 2
    assert "usage: maxmars COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("-h", "--help", "--help-all"):
        assert exit_code(name, flag) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"usage: maxmars {name}")
        assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prepare", ["openwebtext", "imitation", "--tasks"]),
        ("inspect", ["--compare", "--no-verify"]),
    ],
)
def test_data_help_names_the_arguments(capsys, name, words):
    assert exit_code("data", name, "--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


QUICKSTART = str(ROOT / "configs" / "quickstart.py")
# In this process it is too late to look for others.
TRAIN = f"train {QUICKSTART} --num-processes 1"
SLURM = "launch slurm quickstart --name a --workdir b"
ERRORS = [
    (2, "trian", "there is no command `trian`. Did you mean `train`?"),
    (2, "train --num-steps 3", "maxmars train needs a config: `maxmars train quickstart`, for"),
    (2, "train quickstart --batch-size 8", "(did you mean `--global-batch-size`?)"),
    (2, "train gpt2 --optimizer adamw", "`maxmars train gpt2:optimizer=adamw`"),
    (2, "train gpt2:size=xl --optimizer=adamw", "gpt2:size=xl,optimizer=adamw`"),
    (2, "train gpt2:optimizer=mars --optimizer.name muon", "gpt2:optimizer=muon`"),
    (2, "train gpt2 adamw", "`maxmars train gpt2:optimizer=adamw`"),
    (2, "plan gpt2 --size xl", "`maxmars plan gpt2:size=xl`"),
    (2, "train quickstart --data tokens", "`maxmars train quickstart:data=tokens`"),
    (2, "train quickstart --optimizer adamw", "quickstart:optimizer=adamw`"),
    (2, f"{SLURM} --nodes 1 --gpus-per-node 1 --num-steps 3", "-- --num-steps"),
    (2, f"{SLURM} --nodes 1 --gpus-per-node 1 --data x", "quickstart:data=x`"),
    (2, "train gpt2 --optimizer.learning 1", "(did you mean `--optimizer.learning-rate`?)"),
    (2, "verify-resume quickstart --steps 1", "--steps 1 must be at least 2."),
    (2, f"{TRAIN} --num-microbatches 9999", "multiple of num_microbatches=9999"),
    (2, f"{TRAIN} --init-optimizer-state True", "needs --init-from PATH"),
    (
        1,
        f"{TRAIN} --workdir gs:/bucket/run",
        "gs:/bucket/run must be a path on a disk",
    ),
    (1, f"{TRAIN} --workdir gs:///run", "gs:///run must be a path on a disk"),
    (
        1,
        f"{TRAIN} --workdir s3://b/run",
        "must be a path on a disk, or gs://BUCKET",
    ),
    (1, f"{TRAIN} --workdir EMPTY/x", "Not a directory"),
    (2, "generate x", "--prompt TEXT"),
    (2, "generate x --prompt a --prompt-file FILE", "either by --prompt"),
    (2, "generate x --prompt a --interactive", "or by --interactive"),
    (2, "generate x --prompt-file FILE --interactive", "or by --interactive"),
    (2, "generate x --prompt a --json --output o", "--output o does not go with --json"),
    (2, "generate x --interactive --output o", "--output o does not go with --interactive"),
    (2, "generate x --prompt \udcff", "is not UTF-8 text"),
    (1, "generate x --prompt-file EMPTY", "has no prompt"),
    (1, "generate x --prompt-file BINARY", "not UTF-8"),
    (1, "generate x --prompt-file MISSING", "MISSING: No such file"),
    (2, "generate x --prompt a --output MISSING/out.jsonl", "does not exist"),
    (2, "generate x --prompt a --output .", "is a directory"),
    (2, "generate x --prompt a --top-p 2", "--top-p 2.0 must lie in (0, 1]"),
    (1, "generate x --prompt a", "x does not exist; name the working directory of a run"),
    (2, "eval x --backend lm-eval", "needs --tasks"),
    (2, "eval x --backend lm-eval --tasks ,", "needs --tasks"),
    (2, "eval x --backend lm-eval --tasks a --against y", "--against belongs to"),
    (2, "eval x --lm-eval.limit 3", "belongs to --backend lm-eval, not to native"),
    (2, "eval x --tasks piqa", "there is no task 'piqa'"),
    (1, "export x out", "x does not exist"),
    (1, "import EMPTY out", "is neither a run"),
    (2, "data", "needs one of prepare, inspect"),
    (2, "data prepare", "needs SOURCE, OUT"),
    (2, "data prepare python", "needs OUT"),
    (2, "data prepare python out --wokers 2", "did you mean `--workers`?"),
    (2, "plan", "maxmars plan needs a config"),
    (2, "launch slurm quickstart --name a", "needs --workdir DIR"),
    (2, "launch gke stop --name a", "gke has no action stop; its actions are status, logs, delete"),
    (2, "launch slurm logs --name a", "slurm has no action logs; its actions are status, stop"),
    (2, "launch tpu-vm start --name a", "tpu-vm has no action start; its actions are status"),
    (2, f"{SLURM} -- --dry-run", "after --: `maxmars train quickstart` has no option --dry-run"),
    (1, "data prepare *.text out", "*.text"),
    (1, "data prepare openwebtxt out", "Did you mean the source openwebtext?"),
    (1, "data prepare pyhton out", "Did you mean the source python?"),
    (1, "data prepare nope.txt out", "'nope.txt'; check the path or the pattern.\n"),
    (1, "data prepare . out", ". is a directory; name its files"),
    (2, "data prepare EMPTY.txt out --tasks=1", "0 <= I < N"),
    (2, "data prepare EMPTY.txt out --tasks=2/2", "0 <= I < N"),
    (2, "data prepare EMPTY.txt out --tasks=-1/2", "0 <= I < N"),
    (2, "data prepare EMPTY.txt out --workers=-1", "--workers -1 must not be negative"),
    (1, "data prepare EMPTY.txt s3://b/out", "must be a path on a disk, or gs://BUCKET"),
    (1, "data prepare DEEP.jsonl out", "DEEP.jsonl, line 1: it is nested too deeply"),
    (1, "data prepare HUGE.txt out", "need about 17.6TB, but the disk has"),
    (1, "data prepare EMPTY.txt /proc/out", "/proc/out"),
    (1, "train quickstart --workdir NOT-\udcff-UTF-8", "not-\\xff-utf-8 is not utf-8"),
    (1, "data inspect MISSING", "MISSING does not exist"),
]


@pytest.mark.parametrize(("code", "words", "message"), ERRORS, ids=[row[1] for row in ERRORS])
def test_an_error_is_one_line(code, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "EMPTY.txt").write_text("text " * 50)
    (tmp_path / "BINARY").write_bytes(b"ab\xff\xfe")
    (tmp_path / "DEEP.jsonl").write_text("[" * 200_000)
    with (tmp_path / "HUGE.txt").open("wb") as file:
        file.truncate(1 << 43)  # without blocks on the disk
    before = set(tmp_path.iterdir())
    assert exit_code(*words.split()) == code
    error = capsys.readouterr().err
    assert error.startswith("maxmars: error: ")
    assert message.lower() in error.lower()
    assert error.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


@pytest.mark.seconds
def test_a_wrong_flag_names_the_one_that_was_meant(capsys):
    assert exit_code("train", QUICKSTART, "--model.num-layer", "3") == 2
    assert "--model.num-layers" in capsys.readouterr().err


def test_the_environment_asks_for_the_traceback(monkeypatch):
    monkeypatch.setenv("MAXMARS_TRACEBACK", "1")
    with refused(FileNotFoundError, "runs/no-such-run"):
        cli.main(["generate", "runs/no-such-run", "--prompt", "a"])


OWN_DATA = """
from maxmars.config import AdamWConfig, GPT2Config, GrainConfig, TrainConfig

def get_config():
    return TrainConfig(
        name="own",
        num_steps=1,
        global_batch_size=8,
        model=GPT2Config(num_layers=1, num_heads=1, embed_dim=8, max_seq_len=8, vocab_size=16),
        data=GrainConfig(source="own.py:windows"),
        optimizer=AdamWConfig(),
    )
"""


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("raise ValueError('there are no books')", "there are no books"),
        ("raise KeyError('name')", "'name'"),
        ("raise RuntimeError", None),
        ("raise TypeError('a bug')", None),
        ("import json; json.loads('{')", "line 1 column 2"),
        ("import no_such_module", "no_such_module"),
        ("import os; os.listdir('/nowhere/at/all')", "/nowhere/at/all"),
    ],
)
def test_errors_of_libraries_are_one_line_and_bugs_are_not(raised, told, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"def windows(*, split, length):\n    {raised}\n")
    (tmp_path / "config.py").write_text(OWN_DATA)
    words = ["train", str(tmp_path / "config.py"), "--num-processes", "1"]
    if told is None:
        with pytest.raises((TypeError, RuntimeError)):
            cli.main(words)
        return
    assert exit_code(*words) == 1
    # The user's own file and its line come first.
    assert re.fullmatch(rf"maxmars: error: own.py:2: .*{told}.*\n", capsys.readouterr().err)


def test_an_error_is_told_behind_what_it_is_about():
    with pytest.raises(KeyError) as raised, about("runs/a"), about("meta.json"):
        {}["splits"]
    assert in_words(raised.value).endswith(": runs/a: meta.json: there is no 'splits'")


@pytest.mark.parametrize(
    "allocate",
    ["import numpy; numpy.zeros(2**62, bool)", "import jax; jax.numpy.zeros(2**45).sum()"],
)
def test_too_little_memory_is_one_line(allocate, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"def windows(*, split, length):\n    {allocate}\n")
    (tmp_path / "config.py").write_text(OWN_DATA)
    words = ["train", tmp_path / "config.py", "--workdir", tmp_path / "run"]
    assert exit_code(*words, "--num-processes", "1") == 1
    assert re.fullmatch(r"maxmars: error: out of memory \(.*\): .*\.\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--prompt-file", "waits"], "this command does not continue: run again"),
        (["train", "config.py"], "run the same command again to continue\n"),
    ],
)
def test_ctrl_c_is_one_line_and_says_whether_the_command_continues(words, message, tmp_path):
    os.mkfifo(tmp_path / "waits")  # reading it waits until somebody writes
    (tmp_path / "config.py").write_text("open('waits').read()\n")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [*MAXMARS, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    writer = os.open(tmp_path / "waits", os.O_WRONLY)  # waits until it is read
    process.send_signal(signal.SIGINT)
    os.close(writer)  # ends a read that began just after the signal had come
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert error.startswith(f"\ninterrupted; {message}")
    assert error.count("\n") == 2


@pytest.mark.slow
def test_libtpu_says_nothing_on_a_machine_without_a_tpu():
    pytest.importorskip("libtpu")
    env = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    command = [*MAXMARS, "generate", "nowhere", "--prompt", "a"]  # starts JAX, then looks for it
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert "nowhere" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--help", "train --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_into_a_closed_pipe_is_quiet(arguments, unbuffered):
    result = subprocess.run(
        f'"{sys.executable}" -m maxmars {arguments} | :',
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    assert result.stderr == ""


@pytest.mark.seconds
def test_data_prepare_and_inspect(tmp_path, capsys):
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(f'{{"body": "{i} text "}}\n' * 40)
    source = str(tmp_path / "*.jsonl")
    options = ["--text-field", "body", "--workers", "0", "--task-bytes", "700"]
    cli.main(["data", "prepare", source, str(tmp_path / "whole"), *options])
    written = capsys.readouterr().out
    assert f"to {tmp_path / 'whole'}" in written
    assert written.endswith(f"next: maxmars train quickstart:data={tmp_path / 'whole'}\n")
    shared = str(tmp_path / "shared")
    for i in (2, 0, 1, 1):
        cli.main(["data", "prepare", source, shared, "--tasks", f"{i}/3", *options])
    waiting, following = capsys.readouterr().out, f"next: maxmars train quickstart:data={shared}\n"
    assert waiting.startswith(f"the tasks 2/3 of {shared} ")
    assert waiting.count(f"to {shared}\n{following}") == 1
    # The job that comes again when all is done has written nothing.
    assert re.search(rf"\n{shared} was complete: [\d,]+ tokens .*\n{following}$", waiting)
    for path in (tmp_path / "whole").iterdir():
        if path.name != "meta.json":  # which holds the command
            assert path.read_bytes() == (tmp_path / "shared" / path.name).read_bytes()
    cli.main(["data", "inspect", shared, "--compare", str(tmp_path / "whole")])
    assert "same tokens" in capsys.readouterr().out
    command = read_metadata(shared).command
    said = "--tokenizer byte --validation-fraction 0.1 --text-field body"
    assert command == f"maxmars data prepare '{source}' {shared} {said} --task-bytes 700"
    other = str(tmp_path / "other")
    options = ["--text-field", "body", "--workers", "0", "--validation-fraction", "0.5"]
    cli.main(["data", "prepare", source, other, *options])
    assert exit_code("data", "inspect", shared, "--compare", other) == 1
    assert exit_code("data", "inspect", tmp_path / "none") == 1


HELPS = [
    *("train", "train quickstart", "verify-resume", "compare", "plan", "plan gpt2:optimizer=muon"),
    *("eval", "generate", "export", "import", "audit", "report", "data prepare", "data inspect"),
    *("launch tpu-vm", "launch tpu-vm logs", "launch gke", "launch gke status", "launch slurm"),
    "compare verify",
]


@pytest.mark.parametrize("words", HELPS)
def test_help_begins_with_at_most_ten_options_and_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(*words.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert exit_code(*words.split(), "--help-all") == 0
    everything = capsys.readouterr().out
    usage, what, examples, *_ = shown.split("\n\n")
    assert usage.startswith(f"usage: maxmars {words}")
    assert re.match(r"[A-Z].*", what)
    assert examples.startswith(f"  maxmars {words.split()[0]} ")
    assert max(map(len, [*shown.splitlines(), *everything.splitlines()])) <= 80
    flags = re.findall(r"^  (--\w[\w.-]*)", everything, re.MULTILINE)
    assert len(set(flags)) == len(flags)
    first = re.findall(r"^  (--\w[\w.-]*)", shown, re.MULTILINE)
    assert set(first) <= set(flags)
    if len(first) < len(flags):
        assert len(first) <= 10
        assert f"--help-all` explains all {len(flags)} options" in " ".join(shown.split())


def test_help_of_a_file_called_like_a_group_is_that_of_the_file(capsys):
    assert exit_code("train", "--help", "./model.py") == 2
    assert "'./model.py'" in capsys.readouterr().err


def test_help_of_one_group(capsys):
    assert exit_code("train", "quickstart", "--help", "schedule") == 0
    printed = capsys.readouterr().out
    assert "--schedule.warmup-steps" in printed
    assert "--model.num-layers" not in printed


def run_in_shell(line, *arguments):
    """Exit code and standard error of `line`, a bash command in which `"$@"` is maxmars."""
    words = ["bash", "-o", "pipefail", "-c", line, "bash", *MAXMARS, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ('"$@" | true', 141, ""),
        ('"$@" 2>&1 | true', 141, ""),
        ('"$@" > /dev/full', 1, "No space left"),
        ('"$@" > /dev/full 2> /dev/full', 1, ""),
        ('"$@" >&-', 0, ""),
        ('"$@" >&- 2>&- <&-', 0, ""),
    ],
)
def test_output_that_nobody_can_read(line, code, told):
    found, errors = run_in_shell(line, "--help")
    assert found == code
    assert told in errors
    assert errors.count("\n") == bool(told)  # no traceback, also not of Python's last flush


@pytest.mark.seconds
@pytest.mark.parametrize(
    "line",
    [
        '"$@" | head -2',
        pytest.param('"$@" 2>&1 | head -2', marks=pytest.mark.slow),
        pytest.param('"$@" > /dev/full', marks=pytest.mark.slow),
        pytest.param('"$@" >&- 2>&-', marks=pytest.mark.slow),
    ],
)
def test_no_reader_of_its_output_ends_a_run(byte_tokens, tmp_path, line):
    train = ["train", f"quickstart:data={byte_tokens}", "--workdir", tmp_path / "run"]
    options = """--num-steps 3 --global-batch-size 8 --model.num-layers 1 --model.embed-dim 16
        --model.num-heads 2 --log.every 1 --schedule.warmup-steps 0 --eval.every None"""
    code, errors = run_in_shell(line, *train, *options.split())
    assert code == 0
    assert "Traceback" not in errors
    assert errors.count("standard output") <= 1
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("train/loss" in row for row in rows) == 3
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()
