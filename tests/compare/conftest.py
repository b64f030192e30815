"""One comparison of tiny models, made from the command line, which the tests of this room read."""

import contextlib
import shutil
from pathlib import Path

import pytest
from tiny import short_config

from maxmars import cli
from maxmars.compare.trials import Comparison, read_comparison

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
        model=replace(MODEL, embed_dim=int(size)),
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
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("compare.json", "rows.jsonl"):
        shutil.copy(compared / name, kept)
    return kept
