"""The card of an export: what the run says, in Markdown and YAML that the hub reads."""

import json
import re
import shutil

import pytest
import yaml
from hellaswag_questions import write_questions_file
from hf_models import hf_arrays, hf_fields, write_hf
from refusals import stopped
from tiny import MODEL, values_of

from maxmars.checkpoint import read
from maxmars.cli import main


def export(run, out, *options):
    """The YAML fields of the card, its text, and its sections by title."""
    main(["export", str(run), str(out), *map(str, options)])
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), text, dict(re.findall(r"## (.*?)\n(.*?)(?=\n## |\Z)", body, re.S))


def results_of(fields):
    """The values in the `model-index`, by data set and name."""
    (entry,) = fields["model-index"]
    return {
        (result["dataset"]["name"], metric["name"]): metric["value"]
        for result in entry["results"]
        for metric in result["metrics"]
    }


@pytest.mark.seconds
def test_the_card_of_a_run(finished_run, byte_tokens, tmp_path, capsys):
    fields, text, sections = export(finished_run, tmp_path / "mine")
    assert fields["library_name"] == "transformers"
    assert fields["pipeline_tag"] == "text-generation"
    assert {"gpt2", "mars"} <= set(fields["tags"])
    assert "license" not in fields
    loss = values_of(finished_run, "eval/loss")[6]
    bits = values_of(finished_run, "eval/bits_per_byte")[6]
    assert results_of(fields) == {
        ("tokens", "loss, nats a token"): loss,
        ("tokens", "bits_per_byte"): bits,
    }
    assert f"| {loss:.4f} |" in sections["Scores"]

    meta = json.loads((byte_tokens / "meta.json").read_text())
    stored, training = read(finished_run / "checkpoints"), sections["Training"]
    assert f"{meta['splits']['train']['num_tokens']:,} tokens" in training
    assert f"6 of 6, {6 * 8 * 32:,} tokens" in training
    assert f"| {values_of(finished_run, 'train/loss')[6]} |" in training
    for part in ("mars-adamw for", "8 x cpu", stored.data_digest, stored.digest, "random"):
        assert part in training
    assert "`maxmars train quickstart:data=tokens --workdir run" in training
    assert "run: one trajectory, steps 0 to 6" in sections["Audit"]
    assert 'from_pretrained("mine")' in sections["Use"]
    assert "follows no instructions" in sections["Limits"]
    assert "Not chosen yet" in sections["License"]
    command = f"maxmars eval {finished_run} --output scores.json"
    assert command in capsys.readouterr().out
    for private in (str(tmp_path), str(finished_run.parent), str(byte_tokens.parent)):
        assert private not in text


@pytest.mark.parametrize("source", ["hf:/home/me/books:train", "tfds:a --dir=/home/me/books"])
def test_no_path_of_the_machine_is_in_the_card(finished_run, tmp_path, source):
    run = shutil.copytree(finished_run, tmp_path / "run")
    data = json.loads((run / "data.json").read_text())
    data["parts"][0]["source"] = source
    (run / "data.json").write_text(json.dumps(data))
    _, text, sections = export(run, tmp_path / "out")
    assert "/home/me" not in text
    assert "books" in sections["Training"]


def test_a_checkpoint_tells_the_losses_of_its_step(finished_run, tmp_path):
    fields, _, sections = export(finished_run / "checkpoints" / "4", tmp_path / "out")
    assert "4 of 6" in sections["Training"]
    assert f"| {values_of(finished_run, 'train/loss')[4]} |" in sections["Training"]
    assert "model-index" not in fields  # it was evaluated at steps 3 and 6
    assert read(finished_run / "checkpoints", 4).digest in sections["Training"]


@pytest.mark.seconds
def test_scores_of_a_report(finished_run, byte_tokens, tmp_path, capsys):
    questions = str(write_questions_file(tmp_path / "q.jsonl"))
    target, report = finished_run / "checkpoints" / "6", tmp_path / "scores.json"
    options = ["--hellaswag.path", questions, "--output", str(report), "--num-processes", "1"]
    main(["eval", str(target), "--data.num-windows", "4", *options])
    fields, _, sections = export(finished_run, tmp_path / "out", "--report", report)
    measured = json.loads(report.read_text())
    results = results_of(fields)
    for protocol, summary in measured["hellaswag"].items():
        for metric in ("acc", "acc_norm"):
            share, error = summary[metric], summary[f"{metric}_stderr"]
            row = f"| {metric} ({protocol}) | {share:.4f} ± {error:.4f} | 5 questions"
            assert row in sections["Scores"]
            assert results["Rowan/hellaswag", f"{metric} ({protocol})"] == share
    assert f"| {measured['loss']:.4f} | 128 tokens |" in sections["Scores"]

    capsys.readouterr()
    with stopped(1, "scores of run, step 6, and not of run, step 4"):
        export(finished_run / "checkpoints" / "4", tmp_path / "other", "--report", report)
    assert not (tmp_path / "other").exists()
    report.write_text('{"name": 5}')
    with stopped(1, "is no report of `maxmars eval") as errors:
        export(finished_run, tmp_path / "other", "--report", report)
    assert len(errors.lines) == 1


def test_a_card_says_what_was_not_recorded(finished_run, tmp_path, capsys):
    run = shutil.copytree(finished_run, tmp_path / "run")
    names = ("config", "data", "environment", "summary")
    for name in (*(f"{name}.json" for name in names), "metrics.jsonl", "journal.jsonl"):
        (run / name).unlink()
    fields, text, sections = export(run, tmp_path / "out")
    assert fields["library_name"] == "transformers"
    assert "mars-adamw for" in sections["Training"]
    assert "8 x cpu" in sections["Training"]
    assert "broken" in sections["Audit"]
    assert text.count("| not recorded |") == 2  # the loss and the first weights
    (run / "data.json").write_text("{")
    capsys.readouterr()
    with stopped(1, str(run / "data.json")):
        export(run, tmp_path / "other")


def test_the_card_of_a_hugging_face_model_keeps_its_license(tmp_path):
    hf = write_hf(tmp_path / "gpt2", hf_fields(MODEL), hf_arrays(MODEL))
    fields, text, sections = export(hf, tmp_path / "first")
    assert "written by maxmars from gpt2." in text
    assert "model-index" not in fields
    assert {"Training", "Scores", "Audit"}.isdisjoint(sections)
    assert "Not chosen yet" in sections["License"]
    (hf / "README.md").write_text("---\nlicense: mit\n---\n# theirs\n")
    fields, text, sections = export(hf, tmp_path / "second")
    assert fields["license"] == "mit"
    assert "says `mit`" in sections["License"]
    assert (tmp_path / "second" / "SOURCE_README.md").read_text().endswith("# theirs\n")
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_the_first_weights_are_named_without_their_place(finished_run, byte_tokens, tmp_path):
    start = f"""train quickstart:data={byte_tokens} --num-processes 1 --num-steps 1
        --global-batch-size 8 --model.num-layers 2 --model.num-heads 2 --model.embed-dim 32
        --model.max-seq-len 32 --model.scan-unroll 1 --eval.every None""".split()
    main(["export", str(finished_run), str(tmp_path / "hf")])
    for source, name in ((finished_run, "run, step 6"), (tmp_path / "hf", "hf")):
        workdir = tmp_path / f"from_{source.name}"
        main([*start, "--workdir", str(workdir), "--init-from", str(source)])
        _, text, sections = export(workdir, tmp_path / f"out_{source.name}")
        assert f"| first weights | {name} |" in sections["Training"]
        assert str(tmp_path) not in text
        assert "Limits" not in sections


def test_scores_of_the_harness(finished_run, tmp_path):
    report = {"name": "run, step 6", "digest": read(finished_run / "checkpoints").digest}
    report |= {"environment": {}, "harness": "lm-eval 0.4.9", "num_fewshot": {"piqa": 0}}
    report |= {"results": {"piqa": {"acc": 0.5, "acc_stderr": 0.01}}}
    (tmp_path / "piqa.json").write_text(json.dumps(report))
    fields, _, sections = export(finished_run, tmp_path / "out", "--report", tmp_path / "piqa.json")
    row = "| piqa | acc | 0.5000 ± 0.0100 | 0 examples, lm-eval 0.4.9 |"
    assert row in sections["Scores"]
    assert results_of(fields)["piqa", "acc"] == 0.5


def test_the_hub_reads_the_card(finished_run, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    export(finished_run, tmp_path / "out")
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    result, bits = card.data.eval_results
    assert (result.metric_type, bits.metric_type) == ("loss", "bits_per_byte")
    assert result.metric_value == values_of(finished_run, "eval/loss")[6]
