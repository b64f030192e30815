"""The command line of `maxmars compare`, and its configs."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import stopped
from token_directories import write_shards

from maxmars.cli import main
from maxmars.config import Source, from_dict, load_config
from maxmars.config.load import load_comparison

TINY = str(Path(__file__).parents[2] / "configs" / "compare_tiny.py")


def test_the_config_of_the_comparison_has_every_optimizer():
    names = ("adamw", "nadamw", "lion", "soap", "muon", "normuon", "muonh", "muon_two_ema")
    mars = ("mars", "mars_exact", "mars_lion", "mars_shampoo", "mars_m", "mars_m_h")
    configs = [load_config(f"{TINY}:optimizer={name}") for name in (*names, *mars)]
    assert len({config.optimizer for config in configs}) == 14
    assert len({config.model for config in configs}) == 1
    config = configs[0]
    assert config.num_steps * config.tokens_per_step >= 1_000_000


@pytest.fixture
def recorded(tmp_path):
    """What `compare` with these words records before its first trial begins, which is refused."""

    def recorded(*words):
        out = tmp_path / "out"
        with stopped(1, "model.max_seq_len=1000"):
            main(["compare", *words, "--model.max-seq-len", "1000", "--workdir", str(out)])
        return json.loads((out / "compare.json").read_text())

    return recorded


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--optimizers", "adamw", "lion"],
            {"adamw": [3e-4, 6e-4, 1.2e-3, 2.4e-3], "lion": [5e-5, 1e-4, 2e-4, 4e-4]},
        ),
        (["--learning-rates", "3e-3", "1e-3"], {"adamw": [1e-3, 3e-3], "lion": [1e-3, 3e-3]}),
    ],
)
def test_grids_of_contenders(words, expected, compare_command, recorded):
    grids = recorded(compare_command[1], *words)["compared"]
    assert {name: own[0]["scanned"] for name, own in grids.items()} == expected


@pytest.mark.parametrize(
    ("table", "baseline", "contenders"),
    [
        ("six", "adamw", {"adamw", "nadamw", "mars", "mars_m", "muon", "soap"}),
        (
            "whole_matrices",
            "muon",
            {"mars_m", "mars_m_h", "muon", "muonh", "normuon", "muon_two_ema"},
        ),
    ],
)
def test_the_tables_of_the_results_page(table, baseline, contenders):
    comparison = load_comparison(f"{TINY}:table={table}")
    assert set(comparison.contenders) == contenders
    assert (comparison.baseline or next(iter(comparison.contenders))) == baseline


@pytest.mark.seconds
def test_trials_score_the_validation_split_alone(compare_command, recorded):
    best = ["--checkpoint.keep-best", "1", "--checkpoint.keep-best-of", "mine"]
    record = recorded(compare_command[1], "--eval.data", "mine=nowhere", *best)
    assert "nowhere" not in json.dumps(record)


IN_FILE = """
def get_comparison(most: Literal["3", "5"] = "5"):
    return ComparisonConfig(
        contenders={name: get_config(name) for name in ("adamw", "lion")},
        tune=("learning_rate", "weight_decay"),
        grids={"adamw": {"eps": ()}, "lion": {"b1": (0.9, 0.8)}},
        baseline="lion",
        budget=7,
        seeds=int(most),
    )
"""


@pytest.mark.seconds
def test_a_comparison_in_a_config_file(compare_command, tmp_path, recorded):
    """What is typed counts more, for all contenders."""
    config = tmp_path / "config.py"
    config.write_text(Path(compare_command[1]).read_text() + IN_FILE)
    kept = recorded(f"{config}:most=3", "--budget", "9")
    assert (kept["baseline"], kept["budget"], len(kept["seeds"])) == ("lion", 9, 3)
    assert {c["model"]["max_seq_len"] for c in kept["configs"].values()} == {1000}
    fields = {n: [grid["field"] for grid in own] for n, own in kept["compared"].items()}
    assert fields == {
        "adamw": ["learning_rate", "weight_decay", "eps"],
        "lion": ["learning_rate", "weight_decay", "b1"],
    }
    assert kept["compared"]["lion"][2]["scanned"] == [0.9]


MINE = "import optax\n\ndef make(learning_rate, b1=0.9, weight_decay=0.03): ...\n"


@pytest.mark.seconds
def test_the_one_line_with_own_data_and_an_own_optimizer(tmp_path, monkeypatch):
    """Keyword defaults of its function are fields, tuned as those that the others have."""
    write_shards(tmp_path / "data", np.arange(64), vocab_size=300)
    own, out = tmp_path / "mine.py", tmp_path / "out"
    own.write_text(MINE)
    monkeypatch.chdir(tmp_path)
    words = ["quickstart:data=data", "--optimizers", "adamw", "mars_m", "muon", "mine.py:make"]
    words += ["--eval.own", "mine.py:make"]  # is left out, as HellaSwag is
    words += ["--num-steps", "60", "--eval.every", "30", "--workdir", "out"]
    words += ["--tune", "learning_rate", "weight_decay"]
    with stopped(1):  # its function makes nothing
        main(["compare", *words])
    assert not out.exists()
    own.write_text(MINE.replace("...", "return optax.adamw(learning_rate, b1)"))
    with stopped(1, "64 tokens"):  # of which no batch can be made
        main(["compare", *words])
    kept = json.loads((out / "compare.json").read_text())
    assert list(kept["compared"]) == ["adamw", "mars_m", "muon", "mine"]
    for grids in kept["compared"].values():
        assert [grid["field"] for grid in grids] == ["learning_rate", "weight_decay"]
    assert kept["compared"]["mine"][1]["scanned"] == [0.03]
    config = from_dict(kept["configs"]["mine"])
    assert config.optimizer.make == Source.parse("mine.py:make")
    assert (config.model.vocab_size, config.num_steps, config.eval.every) == (300, 60, 30)
    assert config.eval.own is None
    assert "learning_rate" not in kept["configs"]["mine"]["optimizer"]["options"]
    (copy,) = (out / "sources").rglob("mine.py")
    assert copy.read_text() == own.read_text()


def test_a_field_that_a_contender_lacks_is_said_before_the_first_run(tmp_path, compare_command):
    (tmp_path / "mine.py").write_text("def make(learning_rate, k=1): ...\n")
    words = [compare_command[1], "--optimizers", "adamw", "lion", f"{tmp_path / 'mine.py'}:make"]
    words += ["--tune", "learning_rate", "eps", "b1", "--workdir", str(tmp_path / "out")]
    with stopped(1) as errors:
        main(["compare", *words, "--model.max-seq-len", "1000"])
    lion, mine = [line for line in errors.lines if " lacks " in line]
    assert "lion lacks eps: " in lion
    assert "learning_rate, b1" in lion
    assert "b2" in lion  # a field that it has and that is not tuned
    assert "mine lacks eps, b1: " in mine
    assert "eps=" in mine
    assert "mine.py" in mine
