import errno
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import maxmars
from maxmars import cli, distributed
from maxmars.config import GPT2Config
from maxmars.data.sources import read_metadata
from maxmars.sampling import Sampling

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[2]

CONFIG_FILE = """
from maxmars.config import GPT2Config, TrainConfig
from maxmars.data_config import PythonSourcesConfig
from maxmars.optimizer_config import AdamWConfig

def get_config():
    return TrainConfig(
        name="tiny",
        num_steps=3000,
        global_batch_size=8,
        model=GPT2Config.small(),
        optimizer=AdamWConfig(),
        data=PythonSourcesConfig(),
    )
"""


@pytest.fixture
def run_as(monkeypatch):
    """Runs a function as the command `stub`."""

    def run_as(function):
        monkeypatch.setitem(sys.modules, "stub_command", types.SimpleNamespace(run=function))
        monkeypatch.setitem(cli.COMMANDS, "stub", cli.Command("stub_command", "a stub"))
        cli.main(["stub", "argument"])

    return run_as


@pytest.fixture
def calls(monkeypatch):
    """What the command `train` would run."""
    calls = []

    def train(config, workdir, **options):
        calls.append((config, workdir, options))
        return True

    stub = types.SimpleNamespace(train=train)
    monkeypatch.setitem(sys.modules, "maxmars.train", stub)
    monkeypatch.setattr(distributed, "initialize", lambda *arguments, **_: calls.append(arguments))
    return calls


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG_FILE)
    return str(path)


def exit_code(call, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        call(*arguments)
    return exit_info.value.code


def raising(error):
    def run(argv):
        raise error

    return run


def test_help_lists_every_command(capsys):
    cli.main(["--help"])
    printed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name}" in printed
        assert command.help in printed


def test_help_answers_in_half_a_second():
    def seconds():
        start = time.monotonic()
        command = [sys.executable, "-m", "maxmars", "--help"]
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
        return time.monotonic() - start

    assert min(seconds() for _ in range(3)) < 0.5


def test_version(capsys):
    cli.main(["--version"])
    assert capsys.readouterr().out == f"maxmars {maxmars.__version__}\n"


def test_no_command_is_wrong_usage(capsys):
    assert exit_code(cli.main, []) == 2
    assert "usage: maxmars COMMAND" in capsys.readouterr().err


def test_unknown_command_suggests_the_closest(capsys):
    assert exit_code(cli.main, ["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("maxmars: error: there is no command `trian`. Did you mean `train`?")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name, capsys):
    assert exit_code(cli.main, [name, "--help"]) == 0
    assert f"usage: maxmars {name}" in capsys.readouterr().out


def test_a_command_gets_its_arguments_and_says_its_exit_code(run_as):
    seen = []
    run_as(lambda argv: seen.extend(argv) or 0)
    assert seen == ["argument"]
    assert exit_code(run_as, lambda argv: 3) == 3


def test_an_error_that_maxmars_reports_is_one_line(run_as, capsys):
    assert exit_code(run_as, lambda argv: GPT2Config(num_heads=5)) == 1
    assert capsys.readouterr().err == (
        "maxmars: error: model.embed_dim=768 must be a multiple of model.num_heads=5.\n"
    )


def test_the_environment_asks_for_the_traceback(run_as, monkeypatch):
    monkeypatch.setenv("MAXMARS_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"embed_dim=768"):
        run_as(lambda argv: GPT2Config(num_heads=5))


@pytest.mark.parametrize("error", [ValueError("deep in a library"), FileNotFoundError("x")])
def test_an_error_of_another_library_keeps_its_traceback(run_as, error):
    with pytest.raises(type(error)):
        run_as(raising(error))


def test_our_own_bugs_keep_their_traceback(run_as, monkeypatch):
    with pytest.raises(TypeError):
        run_as(lambda argv: GPT2Config(layers=5))
    monkeypatch.setitem(sys.modules, "maxmars.train", types.ModuleType("maxmars.train"))
    with pytest.raises(ImportError, match="cannot import name"):
        cli.main(["train", str(ROOT / "configs" / "quickstart.py")])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_what_the_machine_refuses_is_one_line(run_as, capsys, number):
    error = OSError(number, os.strerror(number), "/full/disk")
    assert exit_code(run_as, raising(error)) == 1
    assert capsys.readouterr().err == f"maxmars: error: /full/disk: {os.strerror(number)}\n"


def test_ctrl_c_says_how_to_continue(run_as, capsys):
    assert exit_code(run_as, raising(KeyboardInterrupt())) == 130
    assert "run the same command again to continue" in capsys.readouterr().err


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


def test_train_loads_the_config_and_trains(calls, config_file):
    cli.main(["train", "--num-steps", "3000", config_file, "--model.num_layers", "3"])
    (initialized, (config, workdir, options)) = calls
    assert initialized == (None, None, None)
    assert config.model.num_layers == 3
    assert workdir == "runs/tiny"
    assert options == {"init_from": None, "resume_overrides": [], "profile": None}


def test_train_starts_from_weights(calls, config_file, capsys):
    from maxmars.init_from import InitFrom

    cli.main(["train", config_file, "--init-from", "gs://b/run", "--init-optimizer-state", "True"])
    assert calls[1][2]["init_from"] == InitFrom(path="gs://b/run", optimizer_state=True)
    arguments = ["train", config_file, "--init-optimizer-state", "True"]
    assert exit_code(cli.main, arguments) == 2
    assert "--init-optimizer-state needs --init-from PATH" in capsys.readouterr().err


def test_train_changes_fields_on_purpose(calls, config_file):
    cli.main(["train", config_file, "--resume-overrides", "optimizer.learning-rate, schedule,"])
    assert calls[1][2]["resume_overrides"] == ["optimizer.learning_rate", "schedule"]


def test_train_takes_a_workdir_and_processes(calls, config_file):
    processes = ["--coordinator", "localhost:1234", "--num-processes", "2", "--process-id", "1"]
    cli.main(["train", config_file, "--workdir", "elsewhere", *processes])
    (initialized, (_, workdir, _)) = calls
    assert initialized == ("localhost:1234", 2, 1)
    assert workdir == "elsewhere"


def test_a_start_that_misses_hosts_ends_and_counts_them(config_file, capsys):
    processes = ["--coordinator", "localhost:47611", "--num-processes", "3", "--process-id", "0"]
    assert exit_code(cli.main, ["train", config_file, *processes, "--start-timeout-s", "0.3"]) == 1
    error = capsys.readouterr().err
    assert "1 of 3 processes came to localhost:47611 within 0.3 s; missing: 1-2" in error


def test_train_finds_its_place_in_a_cluster(monkeypatch):
    """Both the flags and the cluster lead to the same call of JAX."""
    joined = []
    monkeypatch.setattr(distributed, "roll_call", lambda *arguments: joined.append(arguments))
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *a, **k: joined.append(k))
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "a1", "NTASKS": "2", "PROCID": "1", "LOCALID": "1"}
    for name, value in (slurm | {"STEP_TASKS_PER_NODE": "2"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    distributed.initialize(None, 1, None)
    assert joined == []  # alone, whatever the cluster says
    distributed.initialize(None, None, None, timeout_s=7.0)
    assert joined[0] == ("a1:61441", 2, 1, 7.0)
    assert joined[1]["local_device_ids"] == (1,)
    assert joined[1]["cluster_detection_method"] == "deactivate"


def test_a_run_that_was_stopped_asks_to_be_started_again(calls, config_file, monkeypatch):
    monkeypatch.setattr(sys.modules["maxmars.train"], "train", lambda *_, **__: False)
    assert exit_code(cli.main, ["train", config_file]) == 75


def test_train_without_a_config_says_what_is_missing(capsys):
    assert exit_code(cli.main, ["train", "--num-steps", "3"]) == 2
    assert "maxmars train needs a config file" in capsys.readouterr().err


def test_train_suggests_the_flag_that_was_meant(calls, config_file, capsys):
    assert exit_code(cli.main, ["train", config_file, "--model.num-layer", "3"]) == 2
    assert "--model.num-layers" in capsys.readouterr().err
    assert calls == []


def test_train_rejects_wrong_values_in_one_line(calls, config_file, capsys):
    assert exit_code(cli.main, ["train", config_file, "--num-microbatches", "9999"]) == 2
    error = capsys.readouterr().err
    assert "must be a multiple of num_microbatches=9999" in error
    assert error.count("\n") == 1


@pytest.fixture
def generator(monkeypatch):
    """Stands for the model; holds what it was called with."""
    seen = {}

    def open_trained_model(target, mesh):
        seen.update(target=target, mesh=dict(mesh.shape))
        return "a model"

    def generate_texts(model, prompts, **options):
        assert model == "a model"
        seen.update(options, prompts=prompts)
        return [prompt.upper() for prompt in prompts]

    for name, function in [("trained_model", open_trained_model), ("generate", generate_texts)]:
        stub = types.SimpleNamespace(**{function.__name__: function})
        monkeypatch.setitem(sys.modules, f"maxmars.{name}", stub)
    return seen


def test_generate_prints_the_prompt_and_what_follows(generator, capsys):
    arguments = ["--prompt", "def ", "--top-k", "None", "--seed", "3", "--mesh.tensor", "2"]
    cli.main(["generate", "runs/tiny", *arguments])
    assert capsys.readouterr().out == "def DEF \n"
    assert generator == {
        "target": "runs/tiny",
        "mesh": {"data": 4, "fsdp": 1, "tensor": 2},
        "prompts": ["def "],
        "max_new_tokens": 200,
        "sampling": Sampling(temperature=0.8, top_k=None),
        "seed": 3,
        "batch_size": 16,
    }


def test_generate_continues_many_prompts(generator, tmp_path, capsys):
    cli.main(["generate", "x", "--prompt", "ab", "--prompt", "c"])
    assert capsys.readouterr().out == "abAB\n---------------\ncC\n"
    (tmp_path / "prompts").write_text("ä b\r\n\n c\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    cli.main(["generate", "x", "--prompt-file", str(tmp_path / "prompts"), "--output", str(output)])
    assert output.read_text(encoding="utf-8") == (
        '{"prompt": "ä b", "continuation": "Ä B"}\n{"prompt": " c", "continuation": " C"}\n'
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt TEXT"),
        (["--prompt", "a", "--prompt-file", "FILE"], "either by --prompt"),
        (["--prompt-file", "EMPTY"], "has no prompt"),
        (["--prompt-file", "BINARY"], "not UTF-8"),
        (["--prompt-file", "MISSING"], "No such file"),
        (["--prompt", "a", "--output", "MISSING/out.jsonl"], "does not exist"),
        (["--prompt", "a", "--top-p", "2"], "top_p=2"),
    ],
    ids=str,
)
def test_generate_rejects_wrong_arguments_in_one_line(
    generator, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BINARY").write_bytes(b"ab\xff\xfe")
    assert exit_code(cli.main, ["generate", "x", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not generator


def test_eval_runs_tasks_of_the_harness(monkeypatch, tmp_path, capsys):
    seen = {}

    def run_lm_eval(model, tasks, **options):
        seen.update(options, tasks=tasks)
        return {
            "results": {"piqa": {"acc": 0.5, "acc_stderr": 0.25}},
            "num_fewshot": {"piqa": 2},
            "harness": "lm-eval 0",
        }

    monkeypatch.setitem(
        sys.modules, "maxmars.lm_eval_adapter", types.SimpleNamespace(run_lm_eval=run_lm_eval)
    )
    model = types.SimpleNamespace(name="run, step 3")
    monkeypatch.setattr("maxmars.trained_model.open_trained_model", lambda target, mesh: model)
    arguments = ["--tasks", "piqa, boolq", "--backend", "lm-eval", "--lm-eval.num-fewshot", "2"]
    cli.main(["eval", "runs/x", *arguments, "--output", str(tmp_path / "found.json")])
    assert seen == {
        "tasks": ["piqa", "boolq"],
        "limit": None,
        "num_fewshot": 2,
        "include_path": None,
        "batch_size": None,
        "seed": 1234,
    }
    printed = capsys.readouterr().out
    assert "0.5000 ± 0.2500" in printed
    assert "run, step 3" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["target"] == "runs/x"
    assert found["results"] == {"piqa": {"acc": 0.5, "acc_stderr": 0.25}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "lm-eval"], "needs --tasks"),
        (["--backend", "lm-eval", "--tasks", "a", "--against", "y"], "--against belongs to"),
        (["--lm-eval.limit", "3"], "belongs to --backend lm-eval, not to native"),
        (["--tasks", "piqa"], "there is no task 'piqa'"),
    ],
    ids=str,
)
def test_eval_rejects_options_of_the_other_backend(capsys, arguments, message):
    assert exit_code(cli.main, ["eval", "x", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_data_prepare_writes_token_shards(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one line of text\n" * 100)
    out = tmp_path / "tokens"
    cli.main(["data", "prepare", str(tmp_path / "*.txt"), str(out)])
    assert (out / "meta.json").is_file()
    assert f"to {out}" in capsys.readouterr().out


def test_data_prepare_says_which_pattern_matches_nothing(tmp_path, capsys):
    pattern = str(tmp_path / "*.text")
    assert exit_code(cli.main, ["data", "prepare", pattern, str(tmp_path / "tokens")]) == 1
    assert pattern in capsys.readouterr().err


def test_data_prepare_parts_and_merge(tmp_path, capsys):
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text(f'{{"body": "{i} text "}}\n' * 40)
    source, parts = str(tmp_path / "*.jsonl"), [str(tmp_path / f"part{i}") for i in range(2)]
    options = ["--text-field", "body", "--workers", "0"]
    cli.main(["data", "prepare", source, str(tmp_path / "whole"), *options])
    for i, part in enumerate(parts):
        cli.main(["data", "prepare", source, part, "--part", f"{i}/2", *options])
    cli.main(["data", "merge", *parts, "--out", str(tmp_path / "merged")])
    cli.main(["data", "inspect", str(tmp_path / "merged"), "--compare", str(tmp_path / "whole")])
    assert "hold the same tokens" in capsys.readouterr().out
    assert exit_code(cli.main, ["data", "inspect", parts[0], "--compare", parts[1]]) == 1
    command = read_metadata(tmp_path / "part0").command
    said = "--tokenizer byte --validation-fraction 0.1 --text-field body --part 0/2 --format shards"
    assert command == f"maxmars data prepare '{source}' {parts[0]} {said}"


@pytest.mark.parametrize("part", ["1", "2/2", "a/2", "-1/2"])
def test_data_prepare_rejects_a_part(tmp_path, capsys, part):
    (tmp_path / "a.txt").write_text("text " * 50)
    out = str(tmp_path / "out")
    command = ["data", "prepare", str(tmp_path / "a.txt"), out, f"--part={part}"]
    assert exit_code(cli.main, command) == 1
    assert "0 <= i < n" in capsys.readouterr().err.lower()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prepare", ["openwebtext", "imitation", "--part"]),
        ("merge", ["PART", "--out"]),
        ("inspect", ["--compare", "--no-verify"]),
    ],
)
def test_data_help_names_the_arguments(capsys, name, words):
    assert exit_code(cli.main, ["data", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


def test_a_workdir_in_a_bucket_stays_what_it_is(calls, config_file):
    cli.main(["train", config_file, "--workdir", "gs://bucket/run"])
    assert calls[1][1] == "gs://bucket/run"


@pytest.mark.parametrize("workdir", ["gs:/bucket/run", "gs:///run", "s3://bucket/run"])
def test_what_is_no_workdir_is_no_local_folder(config_file, workdir, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(cli.main, ["train", config_file, "--workdir", workdir]) == 1
    assert f"{workdir} must be a path on a disk, or gs://BUCKET/PATH" in capsys.readouterr().err
    assert list(tmp_path.glob("*:")) == []
