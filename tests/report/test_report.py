"""Figures and pages of runs that are made up."""

import dataclasses
import importlib.util
import json
import math

import pytest
from tiny import tiny_config

from maxmars import cli
from maxmars.config import to_dict
from maxmars.goodput import ACTIVITIES
from maxmars.report.curves import Curve, Line, read_run
from maxmars.report.document import Document, Section, Table
from maxmars.report.figures import RateLine, RatePoint, draw_losses, draw_rates

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


def line(name, losses, step_time_s=0.1):
    curve = Curve(
        loss_name="validation loss",
        tokens=tuple(range(0, 100 * len(losses), 100)),
        losses=tuple(losses),
        tokens_per_step=100,
        step_time_s=step_time_s,
    )
    return Line(name=name, curves=(curve,))


def test_the_curve_of_a_run(tmp_path):
    name, curve = read_run(write_run(tmp_path / "one", [5.0, 4.0, 3.0]))
    assert name == "one"
    assert curve.tokens == (0, 10 * 256, 20 * 256)
    assert curve.losses == (5.0, 4.0, 3.0)
    assert curve.step_time_s == 0.2
    assert curve.seconds == (0.0, 2.0, 4.0)
    assert curve.loss_name == "validation loss"


def test_a_run_without_evaluations_has_its_training_loss(tmp_path):
    _, curve = read_run(write_run(tmp_path / "one", [5.0, "NaN"], key="train/loss"))
    assert curve.loss_name == "training loss"
    assert math.isnan(curve.losses[1])


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run: there is no config\.json"):
        read_run(tmp_path)
    empty = write_run(tmp_path / "one", [])
    with pytest.raises(ValueError, match="has no losses yet"):
        read_run(empty)


def test_seeds_are_drawn_as_far_as_all_of_them_go():
    first, second = line("a", [3.0, 2.0]).curves[0], line("a", [4.0, 3.0, 2.0]).curves[0]
    tokens, losses = Line(name="a", curves=(second, first)).points
    assert tokens.tolist() == [0, 100]
    assert losses.tolist() == [[4.0, 3.0], [3.0, 2.0]]


def test_figures_are_drawn_as_png_and_svg(tmp_path):
    lines = [line("a", [5.0, 3.0, 2.5]), line("b", [5.0, 3.1, math.nan], step_time_s=None)]
    for against in ("tokens", "time"):
        png, svg = draw_losses(lines, tmp_path / against, against=against)
        assert png.read_bytes()[:4] == PNG
        assert svg.read_text().startswith("<?xml")
    untimed = dataclasses.replace(lines[1])
    assert draw_losses([untimed], tmp_path / "none", against="time") == []
    points = (
        RatePoint(learning_rate=1e-3, losses=(2.0, 2.1)),
        RatePoint(learning_rate=2e-3, losses=(math.inf,)),
        RatePoint(learning_rate=4e-3, losses=()),
    )
    png, _ = draw_rates([RateLine(name="a", points=points)], tmp_path / "rates")
    assert png.read_bytes()[:4] == PNG
    assert draw_rates([RateLine(name="a", points=points[1:])], tmp_path / "none") == []


def test_the_same_figure_is_the_same_file(tmp_path):
    for name in ("one", "two"):
        draw_losses([line("a", [3.0, 2.0])], tmp_path / name, against="tokens")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"the extra `report`: pip install 'maxmars\[report\]'"):
        draw_rates(
            [RateLine(name="a", points=(RatePoint(learning_rate=1.0, losses=(1.0,)),))],
            tmp_path / "x",
        )


def test_markup_in_names_stays_text(tmp_path):
    table = Table(columns=("a|b", "<i>"), rows=(("x & y", "1"),))
    document = Document(title="<b>", sections=(Section(title="One", parts=(table, "`p < q` <")),))
    document.write(tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert "<title>&lt;b&gt;</title>" in page
    assert "<td>x &amp; y</td>" in page
    assert "<p><code>p &lt; q</code> &lt;</p>" in page
    assert "| a&#124;b | <i> |\n|---|---:|\n" in (tmp_path / "report.md").read_text()


def test_the_report_of_two_runs_from_the_command_line(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [5.0, 4.0, 3.0]) for name in ("one", "two")]
    seconds = dict.fromkeys(ACTIVITIES, 0.0) | {"steps": 90.0, "checkpoint": 10.0}
    session = {"start": 0.0, "end": 100.0, "first_step": 0, "last_step": 20, "done": True}
    (runs[1] / "sessions.jsonl").write_text(json.dumps(session | {"seconds": seconds}) + "\n")
    cli.main(["report", *map(str, runs), "--out", str(tmp_path / "out")])
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    text = (tmp_path / "out/report.md").read_text()
    assert "| two | validation loss | 5,120 | 3.0000" in text
    assert "| share of the time | two |\n|---|---:|\n| time | 1:40 |" in text
    assert "| steps that count | 90.0% |\n| checkpoints | 10.0% |\n" in text
    assert (tmp_path / "out" / "figures" / "loss_time.svg").is_file()
    cli.main(["report", str(runs[0])])
    assert (runs[0] / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "maxmars report needs a RUN"),
        (["one", "two"], "several runs needs --out DIR"),
        (["nowhere"], "nowhere holds no run"),
    ],
)
def test_what_cannot_be_drawn(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", *words])
    assert stop.value.code in (1, 2)
    assert message in capsys.readouterr().err
