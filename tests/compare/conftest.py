"""One comparison of tiny models, run by the command line and with made-up rows, which the tests of
this room read."""

import contextlib
import dataclasses
import math
import shutil
from pathlib import Path

import pytest
from made_up import made_curve, made_row, made_rows
from tiny import short_config

from maxmars import cli
from maxmars.compare.grids import make_grid
from maxmars.compare.run import find_start
from maxmars.compare.trials import (
    Comparison,
    Contender,
    open_comparison,
    read_comparison,
    write_row,
)
from maxmars.config.load import load_comparison

CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from pathlib import Path
from typing import Literal
from maxmars.config import *
from tiny import ADAMW, MODEL, short_config

def get_config(
    optimizer: Literal["adamw", "lion"] | Source = "adamw", size: Literal["16", "32"] = "32"
):
    if isinstance(optimizer, Source):
        own = dict(options={{"damping": 0.02}}, learning_rate=4e-3)
        chosen = OptaxConfig(make=optimizer, **own)
    else:
        chosen = ADAMW if optimizer == "adamw" else LionConfig()
    return short_config(
        Path({tokens!r}),
        model=replace(MODEL, num_layers=1, embed_dim=int(size)),
        optimizer=chosen,
        eval=EvalConfig(every=9, num_windows=16),
        checkpoint=CheckpointConfig(every=None),
    )

def get_comparison():
    rates = {{"adamw": (1e4, 4e-3), "lion": (1e-3, 4e-3)}}
    return ComparisonConfig(
        contenders={{name: get_config(name) for name in rates}},
        grids={{name: {{"learning_rate": values}} for name, values in rates.items()}},
        seeds=2,
        budget=2,
        finalists=1,
    )
"""


@pytest.fixture(scope="session")
def compare_command(tmp_path_factory) -> list[str]:
    """The command that compares AdamW, also at a rate at which it diverges, and Lion: four steps,
    evaluated at the end."""
    folder = tmp_path_factory.mktemp("comparison")
    short_config(folder / "tokens")
    config = folder / "config.py"
    tests = str(Path(__file__).parents[1])
    config.write_text(CONFIG.format(tests=tests, tokens=str(folder / "tokens")))
    return ["compare", str(config), "--num-steps", "4", "--workdir"]


@pytest.fixture(scope="session")
def compared(tmp_path_factory, compare_command) -> Path:
    """The directory of that comparison when it is complete, beside the file `printed`; tests do not
    write into it."""
    folder = tmp_path_factory.mktemp("compared")
    with (folder / "printed").open("w") as printed, contextlib.redirect_stdout(printed):
        cli.main([*compare_command, str(folder / "workdir")])
    return folder / "workdir"


@pytest.fixture(scope="session")
def comparison(compared) -> Comparison:
    """What that comparison compares."""
    return read_comparison(compared)


@pytest.fixture
def kept(compared, tmp_path) -> Path:
    """A copy of what of that comparison is kept, to write into."""
    return copy_rows(compared, tmp_path / "kept")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory, compare_command) -> Path:
    given = load_comparison(compare_command[1])
    contenders = []
    for name, rates in given.grids.items():
        config = dataclasses.replace(given.contenders[name], num_steps=4)
        grid = make_grid(config, "learning_rate", rates["learning_rate"])
        contenders.append(Contender(name=name, config=config, grids=(grid,)))
    options = {"baseline": "adamw", "seeds": (0, 1), "budget": 2, "finalists": 1}
    comparison = Comparison(contenders=tuple(contenders), **options)
    starts = [find_start(dataclasses.replace(config, seed=seed)) for seed in (0, 1)]

    def row_of(trial):
        ((_, rate),) = trial.setting
        weights, tokens = starts[trial.seed]
        loss = math.inf if rate > 1 else 5 - 100 * rate
        own = {"curve": made_curve(loss), "final_state": "1" * 64}
        return made_row(trial, loss, initial_weights=weights, tokens=tokens, **own)

    folder = tmp_path_factory.mktemp("made")
    open_comparison(comparison, folder)
    for row in made_rows(comparison, row_of).values():
        write_row(row, folder)
    return folder


@pytest.fixture
def made(made_once, tmp_path) -> Path:
    """The directory of that comparison with made-up losses in its rows, to write into; its trials
    start as real ones do."""
    return copy_rows(made_once, tmp_path / "made")


def copy_rows(workdir, to):
    to.mkdir()
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(workdir / name, to)
    return to
