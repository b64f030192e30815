"""The card of an export: what the run says, in Markdown and YAML that the hub reads."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import scipy.stats
import yaml
from hellaswag_questions import write_questions_file
from hf_models import hf_arrays, hf_fields, write_hf
from tiny import MODEL, values_of

from maxmars.checkpoint import read
from maxmars.checkpoint.journal import read_journal
from maxmars.cli import main


def export(run, out, *options):
    """The YAML fields of the card, its text, and its sections by title."""
    main(["export", str(run), str(out), *map(str, options)])
    text = (out / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), text, dict(re.findall(r"## (.*?)\n(.*?)(?=\n## |\Z)", body, re.S))


@pytest.mark.seconds
def test_the_card_of_a_run(finished_run, byte_tokens, tmp_path, capsys):
    fields, text, sections = export(finished_run, tmp_path / "mine")
    assert fields["library_name"] == "transformers"
    assert fields["pipeline_tag"] == "text-generation"
    assert {"gpt2", "mars"} <= set(fields["tags"])
    assert "license" not in fields
    assert "datasets" not in fields
    (entry,) = fields["model-index"]
    (result,) = entry["results"]
    assert entry["name"] == "mine"
    assert result["metrics"][0]["value"] == values_of(finished_run, "eval/loss")[6]
    assert f"validation loss {values_of(finished_run, 'eval/loss')[6]:.4f} nats a token" in text

    meta = json.loads((byte_tokens / "meta.json").read_text())
    train = meta["splits"]["train"]
    assert f"| {train['num_tokens']:,} | {train['num_documents']:,} |" in sections["Training data"]
    stored = read(finished_run / "checkpoints")
    assert stored.data_digest in sections["Training data"]
    assert f"| tokens | {6 * 8 * 32:,} |" in sections["Training"]
    assert "Not chosen yet" in sections["License"]
    assert "mars-adamw for" in sections["Training"]
    assert f"| {values_of(finished_run, 'train/loss')[6]:.4f} |" in sections["Loss"]
    assert "](loss_curve.png)" in sections["Loss"]
    assert (tmp_path / "mine" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "8 x cpu" in sections["Hardware and versions"]
    assert "**one trajectory**, steps 0 to 6" in sections["Audit"]
    assert stored.digest in sections["Audit"]
    assert "maxmars train quickstart:data=tokens --workdir run" in sections["How it was made"]
    assert 'from_pretrained("mine")' in sections["Use"]
    assert "not tuned to follow instructions" in sections["Limits"]

    assert "Not measured" in sections["HellaSwag"]
    assert f"maxmars eval {stored.path} --output scores.json" in capsys.readouterr().out
    for private in (str(tmp_path), str(finished_run.parent), str(byte_tokens.parent)):
        assert private not in text


@pytest.mark.parametrize("source", ["hf:/home/me/books:train", "tfds:a --dir=/home/me/books"])
def test_no_path_of_the_machine_is_in_the_card(finished_run, tmp_path, source):
    run = shutil.copytree(finished_run, tmp_path / "run")
    data = json.loads((run / "data.json").read_text())
    data["parts"][0]["source"] = source
    (run / "data.json").write_text(json.dumps(data))
    fields, text, sections = export(run, tmp_path / "out")
    assert "/home/me" not in text
    assert "books" in sections["Training data"]
    assert "datasets" not in fields


def test_a_checkpoint_tells_the_losses_of_its_step(finished_run, tmp_path):
    _, text, sections = export(finished_run / "checkpoints" / "4", tmp_path / "out")
    assert "step 4 of 6" in text
    assert f"| {values_of(finished_run, 'train/loss')[4]:.4f} |" in sections["Loss"]
    assert f"| {values_of(finished_run, 'eval/loss')[3]:.4f} (at step 3) |" in sections["Loss"]
    assert read(finished_run / "checkpoints", 4).digest in sections["Audit"]


@pytest.mark.seconds
def test_scores_of_a_report(finished_run, byte_tokens, tmp_path, capsys):
    questions = str(write_questions_file(tmp_path / "q.jsonl"))
    target, report = finished_run / "checkpoints" / "6", tmp_path / "scores.json"
    options = ["--hellaswag.path", questions, "--output", str(report), "--num-processes", "1"]
    main(["eval", str(target), "--data.num-windows", "4", *options])
    fields, _, sections = export(finished_run, tmp_path / "out", "--report", report)
    measured = json.loads(report.read_text())
    for protocol, summary in measured["hellaswag"].items():
        share, count = summary["acc_norm"], summary["num_questions"]
        test = scipy.stats.binomtest(round(share * count), count)
        interval = test.proportion_ci(0.95, method="wilson")
        assert (
            f"| {protocol} | acc_norm | {100 * share:.2f} % | {100 * interval.low:.2f} % to "
            f"{100 * interval.high:.2f} % | {count} |"
        ) in sections["HellaSwag"]
    assert f"loss {measured['loss']:.4f} nats a token, over 128 tokens" in sections["Loss"]
    hellaswag = fields["model-index"][0]["results"][1]
    assert hellaswag["dataset"]["type"] == "Rowan/hellaswag"
    assert len(hellaswag["metrics"]) == 4

    capsys.readouterr()
    with pytest.raises(SystemExit):
        export(finished_run / "checkpoints" / "4", tmp_path / "other", "--report", report)
    assert "these are scores of run, step 6, and not of run, step 4" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    report.write_text('{"name": 5}')
    with pytest.raises(SystemExit):
        export(finished_run, tmp_path / "other", "--report", report)
    error = capsys.readouterr().err
    assert "is no report of `maxmars eval" in error
    assert error.count("\n") == 1


BOOKKEEPING = (
    "config.json",
    "data.json",
    "environment.json",
    "metrics.jsonl",
    "journal.jsonl",
    "summary.json",
)


def test_a_card_says_what_was_not_recorded(finished_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    for name in BOOKKEEPING:
        (run / name).unlink()
    fields, text, sections = export(run, tmp_path / "out")
    assert fields["library_name"] == "transformers"
    assert "| layers | 2 |" in text
    assert "mars-adamw for" in sections["Training"]
    assert "8 x cpu" in sections["Hardware and versions"]
    assert "**broken**" in sections["Audit"]
    assert "The command was not recorded" in sections["How it was made"]
    assert "| not recorded |" in sections["Loss"]
    assert not (tmp_path / "out" / "loss_curve.png").exists()
    (run / "data.json").write_text("{")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        export(run, tmp_path / "other")
    assert str(run / "data.json") in capsys.readouterr().err


def test_cards_of_other_models(tmp_path, capsys):
    hf = write_hf(tmp_path / "gpt2", hf_fields(MODEL), hf_arrays(MODEL))
    fields, text, sections = export(hf, tmp_path / "first")
    assert "from the Hugging Face model `gpt2`. Of its training nothing is known here." in text
    assert "model-index" not in fields
    assert {"Training", "Loss", "Audit"}.isdisjoint(sections)
    assert "tuned" not in text  # it may be
    assert "That of the original, which is not recorded here" in sections["License"]
    (hf / "README.md").write_text("---\nlicense: mit\n---\n# theirs\n")
    fields, _, sections = export(hf, tmp_path / "second")
    assert fields["license"] == "mit"
    assert "which says `mit`" in sections["License"]
    assert (tmp_path / "second" / "SOURCE_README.md").read_text().endswith("# theirs\n")
    assert str(tmp_path) not in text


@pytest.mark.slow
def test_the_first_weights_are_named_without_their_place(finished_run, byte_tokens, tmp_path):
    start = f"""train quickstart:data={byte_tokens} --num-processes 1 --num-steps 1
        --global-batch-size 8 --model.num-layers 2 --model.num-heads 2 --model.embed-dim 32
        --model.max-seq-len 32 --model.scan-unroll 1 --eval.every None""".split()
    main(["export", str(finished_run), str(tmp_path / "hf")])
    for source, name in ((finished_run, "`run/checkpoints/6`"), (tmp_path / "hf", "`hf`")):
        workdir = tmp_path / f"from_{source.name}"
        main([*start, "--workdir", str(workdir), "--init-from", str(source)])
        _, text, sections = export(workdir, tmp_path / f"out_{source.name}")
        assert f"| first weights | those of {name} (digest" in sections["Training"]
        assert str(tmp_path) not in text
        assert "tuned" not in text


def test_what_changed_on_the_way_is_told(finished_run, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    lines = read_journal(run)
    began = json.loads(json.dumps(lines[0])) | {"step": 4}
    began["config"]["optimizer"]["learning_rate"] = 0.5
    at = next(i for i, line in enumerate(lines) if (line["kind"], line["step"]) == ("saved", 4))
    lines.insert(at + 1, began)
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's way to say: not installed
    _, _, sections = export(run, tmp_path / "out")
    row = "| changed at step 4 | optimizer.learning_rate 0.006 -> 0.5 |"
    assert row in sections["Training"]
    _, _, sections = export(run / "checkpoints" / "4", tmp_path / "other")
    assert row not in sections["Training"]
    assert "loss_curve.png" not in sections["Loss"]


def test_scores_of_the_harness(finished_run, tmp_path):
    report = {"name": "run, step 6", "digest": read(finished_run / "checkpoints").digest}
    report |= {"environment": {}, "harness": "lm-eval 0.4.9", "num_fewshot": {"piqa": 0}}
    report |= {"results": {"piqa": {"acc": 0.5, "acc_stderr": 0.01}}}
    (tmp_path / "piqa.json").write_text(json.dumps(report))
    _, _, sections = export(finished_run, tmp_path / "out", "--report", tmp_path / "piqa.json")
    assert "| piqa | 0 | acc | 0.5000 ± 0.0100 |" in sections["lm-evaluation-harness"]
    assert "Not measured" in sections["HellaSwag"]


@pytest.mark.slow
def test_an_imported_model_has_an_honest_card(finished_run, tmp_path):
    export(finished_run, tmp_path / "first")
    main(["import", str(tmp_path / "first"), str(tmp_path / "imported")])
    fields, text, sections = export(tmp_path / "imported", tmp_path / "second")
    assert "`imported, step 0`, which was made by `maxmars import` from `first`." in text
    assert "model-index" not in fields
    # What it says of devices and limits would be of the import, or a guess.
    unknown = {"Training", "Loss", "How it was made", "Hardware and versions", "Limits"}
    assert unknown.isdisjoint(sections)
    assert read(tmp_path / "imported" / "checkpoints").digest in sections["Audit"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]


def test_the_hub_reads_the_card(finished_run, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    export(finished_run, tmp_path / "out")
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    (result,) = card.data.eval_results
    assert result.metric_type == "loss"
    assert np.isfinite(result.metric_value)
