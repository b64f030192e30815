"""What holds for every command: help, errors of the world outside, exit codes, standard streams.
`test_words.py` has what is wrong on a command line, `test_commands.py` real runs."""

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused
from running import exit_code, run_python, write_config

import maxmars
from maxmars import cli
from maxmars.config.errors import about, in_words
from maxmars.data.metadata import read_metadata
from maxmars.data.open_corpus import PRESETS

ROOT = Path(__file__).resolve().parents[2]
MAXMARS = [sys.executable, "-m", "maxmars"]


def test_help_lists_every_command_and_takes_half_a_second():
    def answer():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*MAXMARS, "--help"], capture_output=True, check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return seconds, done.stdout.decode()

    seconds, printed = min(answer() for _ in range(3))
    assert seconds < 0.5  # of the processor, however busy it is
    assert all(f"  {name}" in printed for name in cli.COMMANDS)


@pytest.mark.smoke
def test_version_and_no_command(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"maxmars {maxmars.__version__}\n"
    assert exit_code() == 2
    assert "usage: maxmars COMMAND" in capsys.readouterr().err


@pytest.mark.smoke
def test_the_environment_asks_for_the_traceback(monkeypatch):
    monkeypatch.setenv("MAXMARS_TRACEBACK", "1")
    with refused(FileNotFoundError, "runs/no-such-run"):
        cli.main(["generate", "runs/no-such-run", "--prompt", "a"])


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        # The user's own file and its line come first.
        ("raise ValueError('there are no books')", "own.py:2: there are no books.*"),
        ("raise KeyError('name')", "own.py:2: .*'name'.*"),
        ("import json; json.loads('{')", "own.py:2: .*line 1 column 2.*"),
        ("import no_such_module", "own.py:2: .*no_such_module.*"),
        ("import os; os.listdir('/nowhere/at/all')", "own.py:2: .*/nowhere/at/all.*"),
        ("import numpy; numpy.zeros(2**62, bool)", r"out of memory \(.*\): .*"),
        ("import jax; jax.numpy.zeros(2**45).sum()", r"out of memory \(.*\): .*"),
        ("raise RuntimeError", None),
    ],
)
def test_errors_of_libraries_are_one_line_and_bugs_are_not(raised, told, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"def windows(*, split, length):\n    {raised}\n")
    write_config(tmp_path, "data=GrainConfig(source='own.py:windows')")
    words = ["train", tmp_path / "config.py", "--workdir", tmp_path / "run", "--num-processes", "1"]
    if told is None:
        with pytest.raises(RuntimeError):
            exit_code(*words)
        return
    assert exit_code(*words) == 1
    assert re.fullmatch(f"maxmars: error: {told}\n", capsys.readouterr().err)


def test_an_error_is_told_behind_what_it_is_about():
    with pytest.raises(KeyError) as raised, about("runs/a"), about("meta.json"):
        {}["splits"]
    assert in_words(raised.value).endswith(": runs/a: meta.json: there is no 'splits'")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "config.py", "--topology", "cpu:1"], "this command does not continue: run again"),
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


def test_ctrl_c_while_jax_is_loaded_is_not_lost():
    program = (
        "import os, signal\n"
        "from maxmars.distributed.progress import loading_jax\n"
        "with loading_jax():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        pass  # as a callback within an import would\n"
        "print('went on')\n"
    )
    result = run_python("-c", program, code=130)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1


CUDA_PLUGIN = """
import os

def initialize():  # as JAX's own, where CUDA's libraries are missing
    if "cuda" in os.environ.get("JAX_PLATFORMS", "cuda"):
        raise RuntimeError("Unable to load cuFFT. Is it installed?")
"""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
@pytest.mark.seconds
def test_compilers_for_absent_chips_say_nothing(tmp_path):
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(CUDA_PLUGIN)
    env = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    command = [*MAXMARS, "train", "quickstart", "--mesh.fsdp", "77"]  # refused by JAX's devices
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert "fsdp=77" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.smoke
@pytest.mark.seconds
def test_data_prepare_in_shares(tmp_path, capsys):
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
    command = read_metadata(shared).command
    said = "--tokenizer byte --validation-fraction 0.1 --text-field body"
    assert command == f"maxmars data prepare '{source}' {shared} {said} --task-bytes 700"


HELPS = [
    *("train", "train quickstart", "rewind", "compare", "plan", "plan gpt2:optimizer=muon"),
    *("eval", "generate", "export", "audit", "report", "data prepare", "data inspect"),
    *("launch tpu-vm", "launch tpu-vm logs", "launch gke", "launch gke status", "launch slurm"),
    "compare verify",
]


@pytest.mark.smoke
@pytest.mark.parametrize("words", HELPS)
def test_help_begins_with_at_most_ten_options_and_fits_80_columns(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(*words.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert exit_code(*words.split(), "--help-all") == 0
    everything = capsys.readouterr().out
    assert re.match(r"[A-Z].*", shown)
    assert f"\n  maxmars {words.split()[0]} " in shown.partition("usage:")[0]
    assert f"\nusage: maxmars {words}" in shown
    lines = [
        line for line in [*shown.splitlines(), *everything.splitlines()] if line[:6] != "usage:"
    ]
    assert max(map(len, lines)) <= 80
    flags = re.findall(r"^  (--\w[\w.-]*)", everything, re.MULTILINE)
    assert len(set(flags)) == len(flags)
    first = re.findall(r"^  (--\w[\w.-]*)", shown, re.MULTILINE)
    assert set(first) <= set(flags)
    if len(first) < len(flags):
        assert len(first) <= 10
        assert "--help-all` explains every option" in " ".join(shown.split())


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("data -h", ["prepare", "inspect"]),
        ("launch --help", ["tpu-vm", "gke", "slurm"]),
        ("data prepare --help", [*PRESETS, "imitation", "--tasks"]),
        ("data inspect --help", ["SHA-256", "--no-verify"]),
        ("train quickstart --help schedule", ["--schedule.warmup-steps"]),  # one group
    ],
)
def test_help_names(words, told, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(*words.split()) == 0
    printed = capsys.readouterr().out
    assert f"usage: maxmars {words.split()[0]}" in printed
    assert max(len(line) for line in printed.splitlines() if line[:6] != "usage:") <= 80
    assert [word for word in told if word not in printed] == []
    assert "--model.num-layers" not in printed


def run_in_shell(line, *arguments):
    """Exit code and standard error of `line`, a bash command in which `"$@"` is this Python."""
    words = ["bash", "-o", "pipefail", "-c", line, "bash", sys.executable, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ('"$@" | true', 141, ""),
        ('PYTHONUNBUFFERED=1 "$@" | true', 141, ""),
        ('"$@" 2>&1 | true', 141, ""),
        ('"$@" > /dev/full', 1, "No space left"),
        ('"$@" > /dev/full 2> /dev/full', 1, ""),
        ('"$@" >&-', 0, ""),
        ('"$@" >&- 2>&- <&-', 0, ""),
    ],
)
def test_output_that_nobody_can_read(line, code, told):
    ended, errors = run_in_shell(line, "-m", "maxmars", "--help")
    assert ended == code
    assert told in errors
    assert errors.count("\n") == bool(told)  # no traceback, also not of Python's last flush


# As `maxmars train` prints, which must not end because nobody reads it.
GOES_ON = """
import pathlib, sys, time
from maxmars.cli.output import standard_streams
with standard_streams(keep_going=True):
    for step in range(3):
        print("step", step, flush=True)
        print("also", step, file=sys.stderr, flush=True)
        time.sleep(0.03)
    pathlib.Path(sys.argv[1]).touch()
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('"$@" 2>&1 | true', ""),
        ('"$@" > /dev/full', "standard output: No space left"),
        ('"$@" > /dev/full 2> /dev/full', ""),
        ('"$@" >&- 2>&-', ""),
    ],
)
def test_no_reader_of_its_output_ends_a_run(tmp_path, line, told):
    code, errors = run_in_shell(line, "-c", GOES_ON, tmp_path / "done")
    assert code == 0
    assert (tmp_path / "done").exists()
    assert told in errors
    assert errors.count("standard output") == bool(told)


@pytest.mark.seconds
def test_train_goes_on_without_a_reader(byte_tokens, tmp_path):
    options = f"""train quickstart:data={byte_tokens} --workdir {tmp_path / "run"}
        --num-steps 3 --global-batch-size 8 --model.num-layers 1 --model.embed-dim 16
        --model.num-heads 2 --log.every 1 --schedule.warmup-steps 0 --eval.every None"""
    code, errors = run_in_shell('"$@" | head -2', "-m", "maxmars", *options.split())
    assert code == 0
    assert "Traceback" not in errors
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("train/loss" in row for row in rows) == 3
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()


# What stands for no module is to Python a package that is not installed.
WITHOUT_TYRO = """
import sys
sys.modules["tyro"] = None
from maxmars import cli
for command in cli.COMMANDS:
    try:
        cli.main([command])
    except SystemExit as stop:
        print(stop.code)
"""


def test_the_optimizers_alone_answer_a_command_in_one_line():
    done = run_python("-c", WITHOUT_TYRO)
    assert done.stdout.split() == ["1"] * len(cli.COMMANDS)
    errors = done.stderr.splitlines()
    assert len(errors) == len(cli.COMMANDS)
    assert all(line.startswith("maxmars: error: ") and "tyro" in line for line in errors)
