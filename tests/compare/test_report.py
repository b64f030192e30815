"""Curves, figures and reports of runs that are made up."""

import csv
import html
import json
import math
import re
import sys

import pytest
from refusals import stopped
from tiny import began_at, tiny_config

from maxmars import cli
from maxmars.checkpoint.journal import Ended, PrefixHash
from maxmars.compare.curves import Line, Recorded, norms_by_component, norms_by_layer, read_run
from maxmars.compare.figures import draw_lines, draw_speed_ups, draw_tuning
from maxmars.compare.statistics import Interval
from maxmars.compare.summary import TriedSetting
from maxmars.compare.tables import print_table
from maxmars.config import to_dict

pytestmark = pytest.mark.smoke


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
    points = {"eval/loss": [(step, 100 * step, loss) for step, loss in enumerate(losses)]}
    points |= {
        f"train/{key}": [(step, 100 * step, value) for step, value in enumerate(values, 1)]
        for key, values in series.items()
    }
    return Line(name=name, runs=(Recorded(points=points, step_time_s=step_time_s),))


def draw_losses(lines, path, **options):
    return draw_lines(lines, path, {"eval/loss": "validation loss"}, **options)


def labels_in(path):
    """The texts of an SVG figure."""
    return re.findall(r"<!-- (.+?) -->", path.read_text())


def tried(value, *losses, on_slice=True):
    return TriedSetting(value=value, losses=losses, on_slice=on_slice)


def test_the_curve_of_a_run_that_never_evaluates(tmp_path):
    run = read_run(write_run(tmp_path / "one", [5.0, "NaN"], key="train/loss"), "one").runs[0]
    assert (run.curve.losses[0], run.curve.loss_of) == (5.0, "training loss")
    assert math.isnan(run.curve.losses[1])
    assert run.points["train/loss"][0] == (0, 0, 5.0)


def test_seeds_are_drawn_as_far_as_all_of_them_go():
    runs = (*line("a", [3.0, 2.0]).runs, *line("a", [4.0, 3.0, 2.0]).runs)
    _, tokens, losses = Line(name="a", runs=runs).mean("eval/loss")
    assert tokens.tolist() == [0, 100]
    assert losses.tolist() == [3.5, 2.5]


@pytest.mark.seconds
def test_figures_are_pictures_and_the_same_figure_is_the_same_file(tmp_path):
    logged = {"loss": [5.0, math.inf, 2.4], "grad_norm": [9.0, 0.0, 0.3], "param_norm": [1, 1, 1]}
    lines = [line("a", [5.0, 3.0, 2.5], **logged), line("b", [5.0, math.nan], step_time_s=None)]
    rates = [tried(1e-3, 2.0, 2.1), tried(2e-3, math.inf), tried(4e-3)]
    rates += [tried(4e-3, 2.2, on_slice=False), tried(8e-3, 9.0, math.inf, on_slice=False)]
    decays = [tried(0.8, 2.0), tried(0.9, 1.9), tried(0.95, 2.2)]
    norms = {"train/loss": "loss", "train/grad_norm": "gradient", "train/param_norm": "weights"}
    gains = {"a": [(10**6, Interval(mean=1.5, low=1.2, high=1.8))], "b": []}
    for against in ("tokens", "time"):
        assert draw_losses(lines, tmp_path / f"{against}.png", against=against)
    assert draw_lines(lines, tmp_path / "norms.png", norms, columns=2)
    assert draw_tuning({"a": rates}, tmp_path / "rates.png", "learning_rate")
    assert draw_tuning({"a": decays}, tmp_path / "b1.png", "b1")
    decays = [tried(0, 2.0), tried(0.1, 1.9)]
    assert draw_tuning({"a": decays}, tmp_path / "decay.png", "weight_decay")
    assert draw_speed_ups(gains, tmp_path / "gains.png", "b")
    drawn = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(set(drawn)) == 7
    assert {content[:4] for content in drawn} == {b"\x89PNG"}
    for ending, begin in ("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml"):
        paths = [tmp_path / name / f"tokens.{ending}" for name in ("one", "two")]
        for path in paths:
            draw_losses(lines, path, note="838k parameters, 3 seeds")
        one, two = (path.read_bytes() for path in paths)
        assert one == two
        assert one.startswith(begin)


def colors_of(names, path):
    """The colours of contenders in a figure, by name."""
    draw_losses([line(n, [5.0, 3.0, 2.5]) for n in names], path)
    colors = re.findall(r"stroke: (#\w{6}); stroke-width: 1.6", path.read_text())
    return dict(zip(names, dict.fromkeys(colors), strict=True))


def test_a_contender_keeps_its_colour_whatever_the_order_of_contenders(tmp_path):
    first = colors_of(["muon", "mine", "adamw", "yours"], tmp_path / "0.svg")
    assert colors_of(["adamw", "yours", "muon", "mine"], tmp_path / "1.svg") == first
    alone = colors_of(["muon", "mars"], tmp_path / "2.svg")
    assert alone["muon"] == first["muon"]


def test_norms_of_sound_runs_stay_in_the_figure(tmp_path):
    """Some optimizers let parameters grow more than others do."""
    ends = {"a": 38.0, "b": 38.5, "c": 70.0, "d": 9e9}
    lines = [line(name, [5.0, 3.0], param_norm=[37.0, end]) for name, end in ends.items()]
    draw_lines(lines, tmp_path / "x.svg", {"train/param_norm": "norm"}, columns=2)
    ticks = [float(label) for label in labels_in(tmp_path / "x.svg") if label[0].isdecimal()]
    assert 60 < max(ticks) < 1e5


def test_a_figure_of_runs_without_evaluations_on_the_way_shows_their_whole_range(tmp_path):
    """Not their ends alone: between these lines would leave the figure."""
    ends = [("a", [9.0, 2.50]), ("b", [9.0, 2.51]), ("c", [9.0, 2.8])]
    draw_losses([line(*end) for end in ends], tmp_path / "x.svg")
    assert {"3", "5", "8"} <= {*labels_in(tmp_path / "x.svg")}


def test_what_there_is_nothing_to_draw_of(tmp_path):
    untimed = line("b", [5.0, 3.1], step_time_s=None)
    assert not draw_losses([untimed], tmp_path / "none.png", against="time")
    assert not draw_lines([untimed], tmp_path / "none.png", {"train/grad_norm": "norm"})
    diverged = {"a": [tried(2e-3, math.inf), tried(4e-3)]}
    assert not draw_tuning(diverged, tmp_path / "none.png", "learning_rate")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_diverged_does_not_flatten_the_others(tmp_path):
    pictures = []
    for number, lost in enumerate((30.0, 9e9)):  # both are above the figure
        lines = [line("a", [9.0, 3.0, 2.5]), line("b", [9.0, lost, lost])]
        draw_losses(lines, tmp_path / f"{number}.png")
        pictures.append((tmp_path / f"{number}.png").read_bytes())
    assert pictures[0] == pictures[1]
    draw_losses(lines[:1], tmp_path / "alone.png")
    assert pictures[0] != (tmp_path / "alone.png").read_bytes()


def test_a_line_of_one_seed_says_so_beside_means_of_several(tmp_path):
    one, two, three = (line(name, [3.0, 2.0]) for name in "abc")
    seeds = Line(name="many", runs=(*two.runs, *three.runs))
    draw_losses([one, seeds], tmp_path / "x.svg")
    assert {"a (1 seed)", "many"} <= set(labels_in(tmp_path / "x.svg"))
    draw_losses([one, two], tmp_path / "y.svg")
    assert {"a", "b"} <= set(labels_in(tmp_path / "y.svg"))


def test_names_in_figures_and_tables_are_folded_between_words(tmp_path, capsys):
    name = "lion/learning_rate=0.00025,weight_decay=0.1,seed=0"
    draw_losses([line(name, [3.0, 2.0])], tmp_path / "x.svg")
    words = ("lion/", "learning_rate=0.00025,", "weight_decay=0.1,", "seed=0")
    assert {*words} <= {*labels_in(tmp_path / "x.svg")}
    numbers = ["-0.123456789" for _ in range(5)]
    names = [name, "short", "a_long_word_alone"]
    print_table(("run", *"abcde"), [[name, *numbers] for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[2:]] == [*words, "short", names[-1], numbers[0]]
    assert lines[-1].split() == numbers


def test_without_matplotlib_there_are_tables_and_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # Python's way to say: not installed
    run = write_run(tmp_path / "one", [5.0, 4.0, 3.0])
    cli.main(["report", str(run)])
    printed, page = capsys.readouterr().out, (run / "report" / "report.md").read_text()
    for text in (printed, page):
        assert "[report]" in text
        assert "3.0000" in text
    assert {path.name for path in (run / "report").iterdir()} == {"report.md", "curves.csv"}


NAME = "_|`a`\n[x](http://y) <b> *c* & $\\d$ and so on, longer than any column of a table may be"


@pytest.mark.slow
def test_the_report_of_runs(tmp_path, capsys):
    one, two = (write_run(tmp_path / f, [5.0, 4.0, 3.0]) for f in ("one", NAME.replace("/", ":")))
    norms = {"train/grad_norm": 1.0, "train/grad_norm/mlp": 0.6, "train/grad_norm/vector": 0.8}
    norms |= {"layers/update_rms/h.up/1": 0.1, "layers/update_rms/h.up/0": 0.2}
    norms |= {"layers/update_rms/h.10.up": 0.3, "layers/update_rms/down": 0.4}
    rows = [{"step": n, "train/loss": 9.0 - n, "train/learning_rate": 0.1} for n in (1, 2, 3)]
    text = (one / "metrics.jsonl").read_text().rpartition("\n")[0]
    rows = [text, *(json.dumps(row | norms) for row in rows), ""]
    (one / "metrics.jsonl").write_text("\n".join(rows))
    seconds = {"steps": 90.0, "checkpoint": 10.0}
    lines = [began_at(0), Ended(step=20, seconds=seconds, done=True, metrics=PrefixHash())]
    (one / "journal.jsonl").write_text("".join(line.text + "\n" for line in lines))
    out = ["--out", str(tmp_path / "out")]
    cli.main(["report", str(one), str(two), *out])
    *table, last = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80
    assert re.search(r"^one +5,120 +6.0000 +3.0000 +3.0000 +200.0", "\n".join(table), re.MULTILINE)
    assert last == f"report: {tmp_path / 'out' / 'report.md'}"
    figures = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert figures == {
        *("loss_tokens", "loss_time", "norms", "norms_by_component", "norms_by_layer")
    }
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| one | 5,120 | 6.0000 | 3.0000 | 3.0000 | 200.0 |" in page
    assert "| share of the time | one |\n| --- | ---: |\n| time | 1:40 |" in page
    assert "| steps that count | 90.0% |\n| checkpoints | 10.0% |\n" in page
    assert "![norms by component](figures/norms_by_component.png)" in page
    lines = csv.DictReader((tmp_path / "out" / "curves.csv").read_text().splitlines())
    lines = [row for row in lines if row["run"] == "one"]
    points = [(row["step"], row["tokens"], row["eval/loss"]) for row in lines if row["eval/loss"]]
    assert points == [("0", "0", "5.0"), ("10", "2560", "4.0"), ("20", "5120", "3.0")]
    assert [row["train/grad_norm/mlp"] for row in lines if row["step"] in "123"] == ["0.6"] * 3
    assert [row["seconds"] for row in lines][-1] == "4.0"
    parts = {"train/grad_norm/mlp": "gradient norm, mlp"}
    parts |= {"train/grad_norm/vector": "gradient norm, vector"}
    lines = [read_run(run, "a") for run in (one, two)]
    assert norms_by_component(lines) == parts
    (of_one, of_two), names = norms_by_layer(lines)
    assert of_one.runs[0].points == {
        "layers/update_rms/h.up": [(0, 0, 0.2), (1, 1, 0.1), (10, 10, 0.3)],
        "layers/update_rms/down": [(0, 0, 0.4)],
    }
    assert of_one.runs[0].points.keys() <= names.keys()
    assert not of_two.runs[0].points

    # The name shows as it is.
    heading, *_, row = page[: page.index("Losses in nats")].strip().splitlines()
    for where in (heading.rpartition("one, ")[2], row.split(" | ")[0]):
        assert NAME.replace("/", ":").replace("\n", " ") in html.unescape(where)
        assert not re.search(r"[`\[\]<>*\\]|://", where)
    assert row.count("|") == 7

    # Only a report of the same runs is written anew.
    with stopped(1, f"{tmp_path / 'out'} "):
        cli.main(["report", str(one), *out])
    assert (tmp_path / "out" / "report.md").read_text() == page
    for _ in range(2):
        cli.main(["report", str(one)])
    assert (one / "report" / "report.md").is_file()


def test_a_run_with_one_point_and_one_without_timed_steps_are_drawn(tmp_path, monkeypatch):
    """Their directories have the same name, so that parents tell them apart."""
    monkeypatch.chdir(tmp_path)
    for parent in ("a", "b", "c"):
        (tmp_path / parent).mkdir()
    write_run(tmp_path / "a" / "run", [5.0], key="train/loss")
    untimed = write_run(tmp_path / "b" / "run", [5.0, 4.0]) / "metrics.jsonl"
    untimed.write_text("\n".join([*untimed.read_text().splitlines()[:2], ""]))
    write_run(tmp_path / "c" / "run", [5.0, 4.0])
    cli.main(["report", "a/run", "b/run", "--out", "labelled", "--labels", "first", "the other"])
    text = (tmp_path / "labelled" / "report.md").read_text()
    assert "| first | 0 | 5.0000 |" in text
    assert "| the other | 2,560 |" in text
    with stopped(2, "--labels first"):
        cli.main(["report", "a/run", "b/run", "--out", "out", "--labels", "first"])
    cli.main(["report", "a/run", "b/run", "c/run", "--out", "out"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| a/run | 0 | 5.0000 | – | – | 200.0 |" in text
    assert "| b/run | 2,560 | – | 4.0000 | 4.0000 | – |" in text
    assert "not drawn: a/run." in text
    assert "timed: b/run." in text
