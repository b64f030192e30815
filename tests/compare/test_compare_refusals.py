"""What `maxmars compare`, `compare verify` and `report` refuse."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from made_up import change_comparison, change_rows
from refusals import stopped

from maxmars import cli
from maxmars.compare.trials import read_comparison, read_rows, write_row

TINY = str(Path(__file__).parents[2] / "configs" / "compare_tiny.py")
SOPHIA = str(Path(__file__).parents[2] / "tools" / "examples" / "sophia.py:sophia")
TO = ("--workdir", "nowhere")
OPTIMIZERS = ("--optimizers", "adamw", "lion")
CONTINUE = ("compare", "{config}", "--num-steps", "4", "--workdir")
START = (*CONTINUE, "new", *OPTIMIZERS, "--start-from")
VERIFY = ("compare", "verify", "{kept}")


def tuned_over_b1(kept):
    """Its best setting was left by an earlier search over more fields."""
    for trial, result in read_rows(read_comparison(kept), kept).items():
        if (trial.contender, trial.setting) == ("lion", (("learning_rate", 4e-3),)):
            better = dataclasses.replace(trial, setting=(*trial.setting, ("b1", 0.8)))
            write_row(dataclasses.replace(result, trial=better, loss=1.0), kept)


def first_version(kept):
    fields = json.loads((kept / "compare.json").read_text())
    del fields["format"]
    (kept / "compare.json").write_text(json.dumps(fields))


def other_tokens(kept):
    """Lion, whose rows are gone, would read other tokens than AdamW did."""
    change_rows(kept, lambda row: row | {"tokens": "0" * 64}, "adamw")
    change_rows(kept, lambda row: None)


def plain_attention(kept):
    def change(fields):
        for config in fields["configs"].values():
            config["model"]["attention"] = "plain"

    change_comparison(kept, change)


CHANGES = {
    "plain": plain_attention,
    "more": tuned_over_b1,
    "old": first_version,
    "before": lambda kept: change_comparison(kept, lambda fields: fields.update(format=5)),
    "damaged": lambda kept: (kept / "compare.json").write_text('{"format": 6, "conf'),
    "lost": lambda kept: change_comparison(kept, lambda size: size.update(baseline="sgd")),
    "tokens": other_tokens,
    "unfinished": lambda kept: change_rows(kept, lambda row: None),
    "empty": lambda kept: (kept / "rows.jsonl").unlink(),
}

REFUSED = [
    (["compare"], 2, "a config"),
    (["compare", "quickstart"], 2, "--workdir"),
    (["compare", *TO, "quickstart"], 2, "a config"),
    (["compare", "quickstart", "--workdir", "gs://bucket/x"], 2, "--workdir gs://bucket/x"),
    (["compare", "quickstart", *TO, "--optimizers", "adamw", "marss"], 2, "'optimizer=marss'"),
    (["compare", "quickstart", *TO, "--optimizers", "mars", "mars"], 2, "--optimizers mars mars"),
    (["compare", "quickstart", *TO, "--optimizers", ""], 2, "--optimizers"),
    (["compare", "quickstart", *TO, "--optimizers", "adamw,mars"], 2, "adamw,mars"),
    (["compare", "quickstart", *TO, "--optimizers", "no.py:make"], 2, "no.py"),
    (["compare", f"{TINY}:optimizer=mars", *TO, "--optimizers", "muon"], 2, "'optimizer=muon'"),
    (["compare", TINY, "quickstart", *TO], 2, "--optimizers A B"),
    (["compare", TINY, *TO, "--optimizers"], 2, "--optimizers"),
    (["compare", TINY, *TO, "--optimizers", SOPHIA, f"/{SOPHIA}"], 2, "'sophia.sophia'"),
    (["compare", TINY, *TO, *OPTIMIZERS, "--baseline", "muon"], 2, "baseline: 'muon'"),
    (["compare", "quickstart", *TO, "--learning-rates", "fast"], 2, "fast"),
    (["compare", "quickstart", *TO, "--learning-rates", "1e-3", "0"], 2, "learning_rate=0"),
    (["compare", "quickstart", *TO, "--tune", "b1", "--learning-rates", "1"], 2, "learning_rate"),
    (["compare", "quickstart", *TO, "--tune", "learning_rate", "beta"], 2, "'beta'"),
    (["compare", "quickstart", *TO, "--tune", "learning_rate,b1"], 2, "learning_rate,b1"),
    (["compare", "quickstart", *TO, "--confirm", "4"], 2, "confirm=4"),
    ([*START, "no/such"], 2, "no/such "),
    ([*START, "{unfinished}"], 2, "{unfinished}"),
    ([*START, "{kept}", "--tune", "weight_decay"], 2, "learning_rate too"),
    ([*START, "{more}", "--tune", "learning_rate"], 2, "b1 too"),
    # What cannot be continued.
    ([*CONTINUE, "{kept}", "--gradient-clip-norm", "0.5"], 1, "gradient_clip_norm (1.0 there, 0.5"),
    ([*CONTINUE, "{kept}", "--num-steps", "8", "--dry-run"], 1, "num_steps (4 there, 8 here"),
    ([*CONTINUE, "{plain}"], 1, "model.attention (plain there, auto here)"),
    ([*CONTINUE, "{old}"], 1, "format 1"),
    ([*CONTINUE, "{before}"], 1, "format 5"),
    ([*CONTINUE, "{damaged}"], 1, "{damaged}/compare.json"),
    ([*CONTINUE, "{tokens}"], 1, "lion and adamw have other tokens with seed 0"),
    # What cannot be repeated.
    ([*VERIFY[:2]], 2, "DIR"),
    ([*VERIFY, "--contender", "sgd"], 1, "sgd"),
    ([*VERIFY, "--seed", "7"], 1, "--seed 7"),
    ([*VERIFY, "--data", "{kept}/x"], 1, "{kept}/x"),
    ([*VERIFY[:2], "none"], 1, "none "),
    # What cannot be drawn.
    (["report"], 2, "RUN"),
    (["report", "one", "two"], 2, "--out"),
    (["report", "one", "one", "--out", "out"], 2, "RUN"),
    (["report", "nowhere"], 1, "nowhere "),
    (["report", "{lost}"], 1, "{lost}/compare.json"),
    (["report", "{empty}"], 1, "{empty}"),
    (["report", "{kept}", "--out", "{report}"], 1, "{report} holds report.md"),
]


@pytest.mark.parametrize(("words", "code", "named"), REFUSED)
def test_what_is_refused(words, code, named, compare_command, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"kept": made, "config": compare_command[1], "report": tmp_path / "report"}
    for name, change in CHANGES.items():
        names[name] = tmp_path / name
        if f"{{{name}}}" in words:
            change(shutil.copytree(made, tmp_path / name))
    if "{report}" in words:
        names["report"].mkdir()
        (names["report"] / "report.md").write_text("my own")
    with stopped(code, named.format(**names)):
        cli.main([word.format(**names) for word in words])
    assert not (tmp_path / "nowhere").exists()
