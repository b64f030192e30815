"""Every command, as a user gives it, on one finished run."""

import json
import shutil

import pytest
from hellaswag_questions import write_questions_file

from maxmars.cli import main

# Without it, JAX would look for the cluster of the run, which is too late in this process.
ALONE = ("--num-processes", "1")
TINY = """--global-batch-size 8 --model.num-layers 2 --model.num-heads 2
    --model.embed-dim 32 --model.max-seq-len 32 --model.scan-unroll 1
    --model.compute-dtype float32 --eval.num-windows 16 --eval.batch-size 8 --log.every 1"""


def test_train_continues_and_starts_from_weights(finished_run, byte_tokens, tmp_path, capsys):
    config = json.loads((finished_run / "config.json").read_text())
    assert config["data"]["path"] == str(byte_tokens)
    workdir = str(tmp_path / "new")
    new = ["train", f"quickstart:data={byte_tokens}", "--workdir", workdir, *ALONE, *TINY.split()]
    main([*new, "--init-from", str(finished_run), "--num-steps", "2"])
    assert "finished" in capsys.readouterr().out
    changed = ["--optimizer.learning-rate", "0.1", "--num-steps", "3"]
    main([*new, *changed, "--resume-overrides", "optimizer.learning-rate, num-steps"])
    assert (tmp_path / "new" / "checkpoints" / "3").is_dir()


@pytest.mark.seconds
def test_the_default_workdir_and_a_warmup_that_is_longer_than_the_run(
    byte_tokens, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["train", f"quickstart:data={byte_tokens}", *ALONE, *TINY.split(), "--num-steps"]
    main([*words, "2"])
    assert "schedule.warmup_steps=50 exceeds num_steps=2" in (capsys.readouterr().out)
    main([*words, "3"])
    assert "continuing from step 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "3", "--seed", "1"])
    error = capsys.readouterr().err
    assert "seed" in error
    assert "runs/quickstart-tokens" in error


def test_eval(finished_run, tmp_path, capsys):
    output = tmp_path / "scores.json"
    main(["eval", str(finished_run), "--tasks", "loss", *ALONE, "--output", str(output)])
    rows = map(json.loads, (finished_run / "metrics.jsonl").read_text().splitlines())
    loss = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
    assert f"{loss:.4f}" in capsys.readouterr().out
    assert output.is_file()


def test_generate(finished_run, tmp_path, capsys):
    short = ["--max-new-tokens", "3"]
    main(["generate", str(finished_run), "--prompt", "the ", "--prompt", "a", *short])
    first, second = capsys.readouterr().out.split("\n---------------\n")
    assert first.startswith("the ")
    assert second.startswith("a")
    (tmp_path / "prompts").write_text("ä b\r\n\n c\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    prompts = ["--prompt-file", str(tmp_path / "prompts")]
    main(["generate", str(finished_run), *prompts, "--output", str(output), *short])
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in found] == ["ä b", " c"]
    assert all(row["continuation"] for row in found)


@pytest.mark.seconds
def test_an_imported_export_is_scored_like_the_run(finished_run, byte_tokens, tmp_path, capsys):
    main(["export", str(finished_run), str(tmp_path / "hf")])
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    imported = str(tmp_path / "imported")
    main(["import", str(tmp_path / "hf"), imported])
    assert (tmp_path / "imported" / "checkpoints" / "0").is_dir()
    questions = str(write_questions_file(tmp_path / "q.jsonl"))
    given = ["--data.path", str(byte_tokens), "--data.num-windows", "16"]
    scores = []
    for target in (str(finished_run), imported):
        output = tmp_path / "scores.json"
        options = ["--hellaswag.path", questions, *given, "--output", str(output)]
        main(["eval", target, *options, *ALONE])
        fields = json.loads(output.read_text())
        scores.append((fields["loss"], fields["hellaswag"]))
    assert scores[0] == scores[1]
    main(["generate", imported, "--prompt", "the ", "--max-new-tokens", "3"])
    assert "the " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["eval", imported, "--tasks", "loss", *ALONE])
    error = capsys.readouterr().err
    assert "--data.path" in error
    assert error.count("\n") == 1


@pytest.mark.seconds
def test_report(finished_run, tmp_path, capsys):
    shutil.copytree(finished_run, tmp_path / "other")
    out = tmp_path / "report"
    main(["report", str(finished_run), str(tmp_path / "other"), "--out", str(out)])
    assert "report:" in capsys.readouterr().out
    assert {"report.md", "report.json"} <= {path.name for path in out.iterdir()}


@pytest.mark.slow
def test_audit_writes_into_a_new_directory(finished_run, tmp_path, capsys):
    output = tmp_path / "new" / "audit.json"
    main(["audit", str(finished_run), "--output", str(output)])
    found = json.loads(output.read_text())
    assert found["verdict"] in capsys.readouterr().out
    assert found["problems"] == []


@pytest.mark.slow
def test_verify_resume(byte_tokens, tmp_path, capsys):
    config = f"quickstart:data={byte_tokens}"
    main(["verify-resume", config, *TINY.split(), "--steps", "4", "--out", str(tmp_path / "out")])
    assert "identical" in capsys.readouterr().out


@pytest.mark.seconds
def test_plan(tmp_path, capsys):
    main(
        [
            "plan",
            "gpt2:size=small,optimizer=adamw",
            "--topology",
            "cpu:8",
            "--num-microbatches",
            "1",
            *TINY.split(),
        ]
    )
    assert "parameters" in capsys.readouterr().out
