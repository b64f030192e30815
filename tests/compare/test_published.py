"""The tables of the pages, made anew from the rows in `.github/results`."""

from pathlib import Path

import pytest

from maxmars.compare import tables
from maxmars.compare.grids import value_of, with_values
from maxmars.compare.report import print_report
from maxmars.compare.statistics import Interval
from maxmars.compare.summary import Outcome, Summary, summarize

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".github" / "results"
SIZES = ("tiny-0.3M", "tiny-1M")
COMPARISONS = (*SIZES, "matrices-0.3M")
PAGE = (ROOT / "maxmars" / "compare" / "README.md").read_text()
NOTES = {"momentum": " (momentum)", "vector_b2": " (vectors)"}

pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="an sdist has no .github")


@pytest.fixture(scope="module")
def summaries() -> dict[str, Summary]:
    return {name: summarize(RESULTS / name) for name in COMPARISONS}


def interval(value: Interval, sign: str = "") -> str:
    return tables.format_interval(value, f"{{:{sign}.3f}}", 3).replace("-", "−")


def p_value(p: float) -> str:
    return f"{p:.0e}".replace("e-0", "e-") if p < 0.001 else f"{p:.{1 if p < 0.01 else 2}g}"


def setting(outcome: Outcome) -> str:
    """Rate, both decays and weight decay, as far as they were tuned, as the tables write them."""
    config = with_values(outcome.contender.config, dict(outcome.best.setting))
    own = {grid.field for grid in outcome.contender.grids}
    fields = [f for f in ("learning_rate", "b1", "momentum", "b2", "vector_b2") if f in own]
    values = [f"{value_of(config, field):g}{NOTES.get(field, '')}" for field in fields]
    if "weight_decay" in own:
        values.append(f"{value_of(config, 'weight_decay'):.2g}")
    return ", ".join(values)


def row(outcome: Outcome, summary: Summary) -> list[str]:
    """A contender in the table of its size, but for the time of a step, which is measured alone."""
    name, best = outcome.contender.name, outcome.best
    difference, p, factor = "", "", "1"
    if best.test is not None:
        difference = interval(best.test.difference, "+")
        p = p_value(summary.p_adjusted[name])
        gain = best.speed_up
        factor = f"{gain.mean:.2f} ({gain.low:.2f} to {gain.high:.2f})"
    return [f"`{name}`", setting(outcome), interval(best.loss), difference, p, factor]


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_table_of_a_comparison(name, summaries):
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for outcome in summaries[name].outcomes:
        made = row(outcome, summaries[name])
        (cells,) = (cells for cells in shown if cells[:3] == made[:3])
        assert cells[: len(made)] == made
        if name.endswith("0.3M"):
            state = outcome.cost["optimizer_state_bytes"] / outcome.cost["num_parameters"]
            assert cells[-1] == f"{state:.1f}"


def test_the_table_of_the_first_page(summaries):
    page = (ROOT / "README.md").read_text()
    for summary in (summaries[size] for size in SIZES):
        losses = (interval(outcome.best.loss) for outcome in summary.outcomes)
        assert f"M tokens | {' | '.join(losses)} |" in page


def test_the_printed_table_loses_no_digit(summaries, capsys):
    print_report(summaries, Path("out"))
    printed = capsys.readouterr().out.splitlines()
    for outcome in (outcome for summary in summaries.values() for outcome in summary.outcomes):
        start, end = f"{outcome.contender.name} ", f" {1000 * outcome.step_time_s:.1f}"
        assert [line for line in printed if line.startswith(start) and line.rstrip().endswith(end)]


PAIRS = ("muon mars", "soap mars", "nadamw adamw", "nadamw mars", "muon mars_m", "soap mars_m")


@pytest.mark.parametrize("size", SIZES)
def test_the_pairs_that_the_text_names(size, summaries):
    pairs = {f"{pair.first} {pair.second}": pair for pair in summaries[size].pairs}
    for name in (*PAIRS, "soap muon"):
        p = pairs[name].p_adjusted
        assert interval(pairs[name].test.difference).removeprefix("−") in PAGE, name
        # Rounded to two digits, the one p just below 0.05 would say too little.
        assert p_value(p) in PAGE or f"{p:.3g}" in PAGE, name
