"""Curves, figures and reports of runs that are made up."""

import html
import json
import math
import re
import sys

import pytest
from refusals import refused
from tiny import tiny_config

from maxmars import cli
from maxmars.compare.curves import Curve, Line, Logged, norms_by_component, read_run
from maxmars.compare.figures import (
    draw_every_run,
    draw_losses,
    draw_rates_and_norms,
    draw_speed_ups,
    draw_training_losses,
    draw_tuning,
)
from maxmars.compare.report import write_run_report
from maxmars.compare.statistics import Interval
from maxmars.config import to_dict

PNG = b"\x89PNG"


def write_run(path, losses, key="eval/loss", **changes):
    """The working directory of a run, as far as a report reads it."""
    config = tiny_config(name=path.name, **changes)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_dict(config)))
    lines = [{"step": 10 * i, key: loss} for i, loss in enumerate(losses)]
    lines += [{"step": 10, "perf/step_time": t} for t in (0.1, 0.2, 9.0)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text + '{"step": 50, "eval')  # a line under way
    return path


def line(name, losses, step_time_s=0.1, **series):
    curve = Curve(
        loss_of="validation loss",
        steps=tuple(range(len(losses))),
        tokens=tuple(range(0, 100 * len(losses), 100)),
        losses=tuple(losses),
        step_time_s=step_time_s,
    )
    logged = {f"train/{key}": list(enumerate(values, 1)) for key, values in series.items()}
    tokens = {step: 100 * step for values in logged.values() for step, _ in values}
    return Line(name=name, curves=(curve,), logged=(Logged(tokens=tokens, series=logged),))


def test_the_curve_of_a_run(tmp_path):
    (curve,) = read_run(write_run(tmp_path / "one", [5.0, 4.0, 3.0]), "one").curves
    assert curve.tokens == (0, 10 * 256, 20 * 256)
    assert curve.losses == (5.0, 4.0, 3.0)
    assert curve.step_time_s == 0.2
    assert curve.loss_of == "validation loss"
    assert Line(name="one", curves=(curve,)).seconds_per_step == 0.2


def test_a_run_without_evaluations_has_its_training_loss(tmp_path):
    run = read_run(write_run(tmp_path / "one", [5.0, "NaN"], key="train/loss"), "one")
    (curve,) = run.curves
    assert curve.loss_of == "training loss"
    assert math.isnan(curve.losses[1])
    assert run.logged[0].series["train/loss"][0] == (0, 5.0)


def test_seeds_are_drawn_as_far_as_all_of_them_go():
    first, second = line("a", [3.0, 2.0]).curves[0], line("a", [4.0, 3.0, 2.0]).curves[0]
    tokens, losses = Line(name="a", curves=(second, first)).points
    assert tokens.tolist() == [0, 100]
    assert losses.tolist() == [[4.0, 3.0], [3.0, 2.0]]


@pytest.mark.seconds
def test_figures_are_png_and_the_same_figure_is_the_same_file(tmp_path):
    logged = {"loss": [5.0, math.inf, 2.4], "grad_norm": [9.0, 0.0, 0.3], "param_norm": [1, 1, 1]}
    lines = [line("a", [5.0, 3.0, 2.5], **logged), line("b", [5.0, math.nan], step_time_s=None)]
    grids = {"a": {1e-3: [2.0, 2.1], 2e-3: [math.inf], 4e-3: []}}
    drawn = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert draw_losses(lines, folder / "tokens.png", against="tokens")
        assert draw_losses(lines, folder / "time.png", against="time")
        assert draw_losses(lines, folder / "steps.png", against="steps")
        assert draw_training_losses(lines, folder / "training.png", against="tokens")
        names = {"train/grad_norm": "gradient", "train/param_norm": "parameters"}
        assert draw_rates_and_norms(lines, folder / "norms.png", names)
        every = {one.name: one.curves for one in lines}
        assert draw_every_run(every, {"a": lines[0]}, folder / "every.png")
        others = {"a": [(8e-3, [9.0, math.inf]), (4e-3, [2.2])]}
        assert draw_tuning(grids, folder / "rates.png", "learning_rate", others)
        decays = {"a": {0.8: [2.0], 0.9: [1.9], 0.95: [2.2]}}
        assert draw_tuning(decays, folder / "b1.png", "b1")
        assert draw_tuning({"a": {0: [2.0], 0.1: [1.9]}}, folder / "decay.png", "weight_decay")
        gains = {"a": [(10**6, Interval(mean=1.5, low=1.2, high=1.8))], "b": []}
        assert draw_speed_ups(gains, folder / "gains.png", "b")
        drawn.append([path.read_bytes() for path in sorted(folder.iterdir())])
    assert drawn[0] == drawn[1]
    assert {content[:4] for content in drawn[0]} == {PNG}
    for ending, begin in (("pdf", b"%PDF"), ("svg", b"<?xml")):
        paths = [tmp_path / name / f"tokens.{ending}" for name in ("one", "two")]
        for path in paths:
            draw_losses(lines, path, against="tokens", note="838k parameters, 3 seeds")
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert paths[0].read_bytes().startswith(begin)


def colors_of(names, path):
    """The colours of contenders in a figure, by name."""
    draw_losses([line(n, [5.0, 3.0, 2.5]) for n in names], path, against="tokens")
    found = re.findall(r"stroke: (#\w{6}); stroke-width: 1.6", path.read_text())
    return dict(zip(names, dict.fromkeys(found), strict=True))


def test_a_contender_keeps_its_colour_whatever_the_order_of_contenders(tmp_path):
    first = colors_of(["muon", "mine", "adamw", "yours"], tmp_path / "0.svg")
    assert colors_of(["adamw", "yours", "muon", "mine"], tmp_path / "1.svg") == first
    alone = colors_of(["muon", "mars"], tmp_path / "2.svg")
    assert alone["muon"] == first["muon"]


def test_norms_of_sound_runs_stay_in_the_figure(tmp_path):
    """Some optimizers let parameters grow more than others do."""
    ends = {"a": 38.0, "b": 38.5, "c": 70.0, "d": 9e9}
    lines = [line(name, [5.0, 3.0], param_norm=[37.0, end]) for name, end in ends.items()]
    draw_rates_and_norms(lines, tmp_path / "x.svg", {"train/param_norm": "norm"})
    ticks = [float(t) for t in re.findall(r"<!-- ([\d.]+) -->", (tmp_path / "x.svg").read_text())]
    assert 60 < max(ticks) < 1e5


def test_a_figure_of_runs_without_evaluations_on_the_way_shows_their_whole_range(tmp_path):
    """Not their ends alone: between these lines would leave the figure."""
    ends = [("a", [9.0, 2.50]), ("b", [9.0, 2.51]), ("c", [9.0, 2.8])]
    draw_losses([line(*end) for end in ends], tmp_path / "x.svg", against="tokens")
    text = (tmp_path / "x.svg").read_text()
    assert [loss for loss in ("3", "5", "8") if f"<!-- {loss} -->" not in text] == []


def test_what_there_is_nothing_to_draw_of(tmp_path):
    untimed = line("b", [5.0, 3.1], step_time_s=None)
    assert not draw_losses([untimed], tmp_path / "none.png", against="time")
    assert not draw_training_losses([untimed], tmp_path / "none.png", against="tokens")
    assert not draw_rates_and_norms([untimed], tmp_path / "none.png", {"train/grad_norm": "norm"})
    assert not draw_every_run({"b": []}, {}, tmp_path / "none.png")
    diverged = {"a": {2e-3: [math.inf], 4e-3: []}}
    assert not draw_tuning(diverged, tmp_path / "none.png", "learning_rate")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverged_does_not_flatten_the_others(tmp_path):
    pictures = []
    for number, lost in enumerate((30.0, 9e9)):  # both are above the figure
        lines = [line("a", [9.0, 3.0, 2.5]), line("b", [9.0, lost, lost])]
        draw_losses(lines, tmp_path / f"{number}.png", against="tokens")
        pictures.append((tmp_path / f"{number}.png").read_bytes())
    assert pictures[0] == pictures[1]
    draw_losses(lines[:1], tmp_path / "alone.png", against="tokens")
    assert pictures[0] != (tmp_path / "alone.png").read_bytes()


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's way to say: not installed
    with refused(ImportError, "'.[report]'"):
        draw_losses([line("a", [3.0, 2.0])], tmp_path / "x.png", against="tokens")


def test_a_name_shows_as_it_is(tmp_path):
    name = "_|`a`\n[x](http://y) <b> *c* & $\\d$"
    run = write_run(tmp_path / name.replace("/", ":"), [3.0, 2.0])
    write_run_report([line(name, [3.0, 2.0])], tmp_path / "out", {name: run})
    text = (tmp_path / "out" / "report.md").read_text()
    heading, *_, row = text[: text.index("Losses in nats")].strip().splitlines()
    for where in (heading, row.split(" | ")[0]):
        assert name.replace("\n", " ") in html.unescape(where)
        assert not re.search(r"[`\[\]<>*\\]|://", where)
    assert row.count("|") == 7
    assert (tmp_path / "out" / "figures" / "loss_tokens.png").is_file()


def test_the_report_of_two_runs_from_the_command_line(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [5.0, 4.0, 3.0]) for name in ("one", "two")]
    seconds = {"steps": 90.0, "checkpoint": 10.0}
    line = {"kind": "began", "step": 0, "start": 0.0, "command": None, "before": None}
    lines = [line | {"seconds": {}}, line | {"kind": "ended", "step": 20, "seconds": seconds}]
    (runs[1] / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cli.main(["report", *map(str, runs), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert str(tmp_path / "out" / "report.md") in printed
    assert re.search(r"^two +5,120 +– +3.0000 +3.0000 +200.0", printed, re.MULTILINE)
    text = (tmp_path / "out/report.md").read_text()
    assert "| two | 5,120 | – | 3.0000 | 3.0000 | 200.0 |" in text
    assert "| share of the time | two |\n| --- | ---: |\n| time | 1:40 |" in text
    assert "| steps that count | 90.0% |\n| checkpoints | 10.0% |\n" in text
    assert (tmp_path / "out" / "figures" / "loss_time.png").is_file()
    cli.main(["report", str(runs[0])])
    assert (runs[0] / "report" / "report.md").is_file()


def test_only_a_report_of_the_same_runs_is_written_anew(tmp_path, capsys):
    one, two = (str(write_run(tmp_path / name, [5.0, 4.0])) for name in ("one", "two"))
    out = ["--out", str(tmp_path / "out")]
    cli.main(["report", one, two, *out])
    cli.main(["report", two, one, *out])
    before = (tmp_path / "out" / "report.md").read_bytes()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "report.md").write_text("my own")
    for words in ([one, *out], [one, "--out", str(tmp_path / "notes")], [one, one, *out]):
        with pytest.raises(SystemExit):
            cli.main(["report", *words])
    errors = capsys.readouterr().err.splitlines()
    assert "out holds report.md and report.json" in errors[0]
    assert "notes holds report.md" in errors[1]
    assert "RUN" in errors[2]
    assert (tmp_path / "notes" / "report.md").read_text() == "my own"
    assert (tmp_path / "out" / "report.md").read_bytes() == before


def test_a_run_with_one_point_and_one_without_timed_steps_are_drawn(tmp_path):
    one = write_run(tmp_path / "one", [5.0], key="train/loss")
    two = write_run(tmp_path / "two", [5.0, 4.0])
    (two / "metrics.jsonl").write_text(
        "".join(f"{text}\n" for text in (two / "metrics.jsonl").read_text().splitlines()[:2])
    )
    three = write_run(tmp_path / "three", [5.0, 4.0])
    cli.main(["report", *map(str, (one, two, three)), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| one | 0 | 5.0000 | – | – | 200.0 |" in text
    assert "| two | 2,560 | – | 4.0000 | 4.0000 | – |" in text
    assert "not drawn: one." in text
    assert "timed: two." in text


def test_what_a_run_logged_is_drawn_and_what_it_did_not_is_said(tmp_path, capsys):
    names = ["one", "a-name-that-is-much-longer-than-any-column-of-a-table-in-80-columns-can-be"]
    runs = [write_run(tmp_path / name, [5.0, 4.0, 3.0]) for name in names]
    for run, norm in zip(runs, (True, False), strict=True):
        rows = [{"step": n, "train/loss": 9.0 - n, "train/learning_rate": 0.1} for n in (1, 2, 3)]
        norms = {"train/grad_norm": 1.0, "train/grad_norm/mlp": 0.6, "train/grad_norm/vector": 0.8}
        rows = [row | norms if norm else row for row in rows]
        (run / "metrics.jsonl").write_text(
            (run / "metrics.jsonl").read_text().rpartition("\n")[0]
            + "".join("\n" + json.dumps(row) for row in rows)
            + "\n"
        )
    cli.main(["report", *map(str, runs), "--out", str(tmp_path / "out")])
    *table, last = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80
    assert last.startswith("report: ")
    figures = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures >= {"loss_tokens.png", "training_loss_tokens.png", "rates_and_norms.png"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"gradient norm of {names[1]}; update norm, parameter norm of one, {names[1]}" in text
    assert "![norms by part](figures/norms_by_part.png)" in text
    parts = {"train/grad_norm/mlp": "gradient norm, mlp"}
    parts |= {"train/grad_norm/vector": "gradient norm, vector"}
    assert norms_by_component([read_run(run, "a") for run in runs]) == parts
    assert "| one | 5,120 | 6.0000 | 3.0000 | 3.0000 | 200.0 |" in text


def test_runs_whose_directories_have_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", [5.0, 4.0, 3.0])
    cli.main(["report", "a/run", "b/run", "--out", "out"])
    names = [found["name"] for found in json.loads((tmp_path / "out/report.json").read_text())]
    assert names == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "RUN"), (["one", "two"], "--out"), (["nowhere"], "nowhere "), (["empty"], "empty ")],
)
def test_what_cannot_be_drawn(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "empty", [])
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", *words])
    assert stop.value.code in (1, 2)
    assert message in capsys.readouterr().err
