"""Commands as a user gives them, on one finished run."""

import json

import pytest
from hellaswag_questions import write_questions_file
from refusals import stopped

from maxmars.cli import main

# Without it, JAX would look for the cluster of the run, which is too late in this process.
ALONE = ("--num-processes", "1")
TINY = """--global-batch-size 8 --model.num-layers 2 --model.num-heads 2
    --model.embed-dim 32 --model.max-seq-len 32 --model.scan-unroll 1
    --model.compute-dtype float32 --eval.num-windows 16 --eval.batch-size 8 --log.every 1"""


@pytest.mark.seconds
@pytest.mark.smoke
def test_train_in_the_default_workdir_from_weights_and_again(
    finished_run, byte_tokens, tmp_path, monkeypatch, capsys
):
    config = json.loads((finished_run / "config.json").read_text())
    assert config["data"]["path"] == str(byte_tokens)
    monkeypatch.chdir(tmp_path)
    words = ["train", f"quickstart:data={byte_tokens}", *ALONE, *TINY.split()]
    words += ["--eval.every", "None"]
    main([*words, "--init-from", str(finished_run), "--num-steps", "2"])
    printed = capsys.readouterr().out
    assert "schedule.warmup_steps=50 exceeds num_steps=2" in printed
    assert "finished" in printed
    changed = ["--optimizer.learning-rate", "0.1", "--num-steps", "3"]
    with stopped(1, "learning_rate", "runs/quickstart-tokens"):
        main([*words, *changed])
    main([*words, *changed, "--resume-overrides", "optimizer.learning-rate, num-steps"])
    assert "continuing from step 2" in capsys.readouterr().out
    assert (tmp_path / "runs" / "quickstart-tokens" / "checkpoints" / "3").is_dir()


@pytest.mark.smoke
@pytest.mark.seconds
def test_an_export_is_scored_like_the_run(finished_run, byte_tokens, tmp_path, capsys):
    exported = str(tmp_path / "hf")
    main(["export", str(finished_run), exported])
    assert capsys.readouterr().out.splitlines()[-1] == f"next: hf upload OWNER/NAME {exported}"
    questions = str(write_questions_file(tmp_path / "q.jsonl"))
    given = ["--hellaswag.path", questions, "--data.path", str(byte_tokens)]
    output = tmp_path / "scores.json"
    scores = []
    for target in (str(finished_run), exported):
        main(["eval", target, *given, "--data.num-windows", "16", "--output", str(output), *ALONE])
        fields = json.loads(output.read_text())
        scores.append((fields["loss"], fields["hellaswag"]))
    assert scores[0] == scores[1]
    rows = map(json.loads, (finished_run / "metrics.jsonl").read_text().splitlines())
    loss = [row["eval/loss"] for row in rows if "eval/loss" in row][-1]
    assert f"{loss:.4f}" in capsys.readouterr().out
    main(["generate", exported, "--prompt", "the ", "--max-new-tokens", "3"])
    assert "the " in capsys.readouterr().out
    with stopped(2, "--data.path"):
        main(["eval", exported, "--tasks", "loss", *ALONE])
