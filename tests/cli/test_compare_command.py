import json
import runpy
import typing
from pathlib import Path

import pytest
from tiny import short_config

from maxmars.cli import compare, main
from maxmars.cli.config_file import UsageError, load_config, split_positionals
from maxmars.compare.record import open_record
from maxmars.config import differences

TINY = str(Path(__file__).parents[2] / "configs" / "compare_tiny.py")
WORKDIR = ("--workdir", "nowhere")


def test_the_config_of_the_comparison_has_every_optimizer():
    names = ("adamw", "lion", "soap", "muon", "mars", "mars_exact", "mars_lion", "mars_shampoo")
    configs = [load_config(f"{TINY}:optimizer={name}") for name in (*names, "mars_m")]
    assert len({config.optimizer for config in configs}) == 9
    assert len({config.model for config in configs}) == 1
    config = configs[0]
    assert config.num_steps * config.tokens_per_step >= 1_000_000


@pytest.mark.parametrize("size", ["tiny", "small", "xl"])
def test_each_ablation_changes_one_field_of_mars(size):
    file = Path(TINY).with_name("ablations.py")
    choices = typing.get_args(runpy.run_path(str(file))["Optimizer"])
    mars, *others = (load_config(f"{file}:size={size},optimizer={name}") for name in choices)
    assert (mars.optimizer.gamma, mars.optimizer.clip_threshold) == (0.025, 1.0)
    changed = [[row[0] for row in differences(mars, other)] for other in others]
    assert [fields for fields in changed if len(fields) != 2 or fields[0] != "name"] == []
    assert len({other.optimizer for other in others}) == len(others)


@pytest.mark.slow
def test_a_single_config_and_few_steps_end_with_an_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MAXMARS_CACHE", str(tmp_path / "cache"))
    short_config(tmp_path / "tokens")
    config = tmp_path / "config.py"
    config.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\nfrom tiny import short_config\n\n"
        f"def get_config():\n    return short_config(Path({str(tmp_path / 'tokens')!r}))\n"
    )
    workdir = tmp_path / "out"
    words = ["--steps", "3", "--eval.every", "100", "--seeds", "1", "--learning-rates", "1e-3"]
    main(["compare", str(config), *words, "--workdir", str(workdir)])
    printed = capsys.readouterr().out
    assert "rate 0.001    seed 0  validation loss" in printed
    assert "tiny was run at one rate only, so it is not tuned." in printed
    lines = [line for line in printed.splitlines() if not line.startswith("report:")]
    assert max(map(len, lines)) <= 80
    (outcome,) = json.loads((workdir / "report.json").read_text())["outcomes"]
    assert outcome["curves"][0]["tokens"] == [0, 3 * 256]
    assert outcome["loss"]["low"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "maxmars compare needs a config file"),
        ([TINY], "maxmars compare needs --workdir DIR"),
        ([TINY, *WORKDIR, "--optimizers", "adamw,marss"], "optimizer=marss is not a choice"),
        ([TINY, *WORKDIR, "--optimizers", "mars,mars"], "must name optimizers, each once"),
        (
            [f"{TINY}:optimizer=mars", *WORKDIR, "--optimizers", "adamw"],
            "names an optimizer itself",
        ),
        ([TINY, TINY + ":optimizer=compare-tiny-mars"], "is not a choice"),
        ([TINY, *WORKDIR, "--seeds", "0"], "--seeds 0 must be at least 1"),
        ([TINY, *WORKDIR, "--steps", "0"], "--steps 0 must be at least 1"),
        ([TINY, *WORKDIR, "--baseline", "adamw"], "--baseline adamw is none of"),
        ([TINY, *WORKDIR, "--learning-rates", "fast"], "'fast' is no positive number"),
        ([TINY, *WORKDIR, "--learning-rates", "muon=1e-3"], "'muon' is none of"),
        ([TINY, "--workdir", "gs://bucket/x"], "must be on a disk of this machine"),
    ],
)
def test_what_cannot_be_compared(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words])
    assert stop.value.code in (1, 2)
    assert message in capsys.readouterr().err


def test_learning_rates_for_all_and_by_name():
    names = ["adamw", "mars"]
    both = compare._given_rates("3e-3,1e-3", names)
    assert both == {"adamw": (1e-3, 3e-3), "mars": (1e-3, 3e-3)}
    own = compare._given_rates("adamw=1e-3,2e-3,mars=6e-3", names)
    assert own == {"adamw": (1e-3, 2e-3), "mars": (6e-3,)}
    assert compare._given_rates("mars=6e-3", names) == {"mars": (6e-3,)}


def test_a_grid_is_extended_by_naming_the_new_rate_alone(tmp_path, monkeypatch):
    seen = []

    def stub(comparison, workdir):
        seen.append({c.name: c.learning_rates for c in open_record(comparison, workdir).contenders})
        return False

    monkeypatch.setattr("maxmars.compare.comparison.compare", stub)
    words = ["compare", TINY, "--optimizers", "adamw,mars", "--workdir", str(tmp_path)]
    for rates in ([], ["--learning-rates", "adamw=0.5"], []):
        with pytest.raises(SystemExit):
            main([*words, *rates])
    first, extended, again = seen
    assert extended["mars"] == again["mars"] == first["mars"]
    # The rates of finished cells join the grid; there are none.
    assert extended["adamw"] == again["adamw"] == (0.5,)


def test_the_grid_is_around_the_configs_own_rate():
    configs = {"adamw": load_config(f"{TINY}:optimizer=adamw")}
    (contender,) = compare._contenders(configs, {})
    own = configs["adamw"].optimizer.learning_rate
    assert contender.learning_rates == (own / 2, own, own * 2, own * 4)


def test_contenders_are_named_after_what_differs():
    specs = compare._with_optimizers([TINY], "adamw,mars")
    assert specs == [f"{TINY}:optimizer=adamw", f"{TINY}:optimizer=mars"]
    assert list(compare._by_name({s: load_config(s) for s in specs})) == ["adamw", "mars"]
    one = f"{TINY}:optimizer=muon"
    assert list(compare._by_name({one: load_config(one)})) == ["muon"]
    assert list(compare._by_name({TINY: load_config(TINY)})) == ["compare-tiny-mars"]
    with pytest.raises(UsageError, match="each once"):
        compare._with_optimizers([TINY], "")


def test_positionals_and_options_are_told_apart():
    words, options = split_positionals(["a.py", "--x", "1", "b.py", "--y=2", "--help", "c.py"])
    assert words == ["a.py", "b.py", "c.py"]
    assert options == ["--x", "1", "--y=2", "--help"]
