"""The example outside GPT-2: every optimizer learns, exact MARS too, and what it says."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "examples" / "vision_transformer.py"
DIGITS = importlib.util.find_spec("sklearn") is not None


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("vision_transformer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(example):
    return example.split(*example.make_images())


ALL = ["adamw", "mars", "mars_exact", "mars_shampoo"]


# Compiling takes seconds each. MARS is within exact MARS, and AdamW is optax's.
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("adamw", "mars")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mars_exact", "mars_shampoo")),
    ],
)
def test_every_optimizer_learns(example, data, name):
    """Images made on the spot, of ten classes: chance is 2.30 nats."""
    assert list(example.OPTIMIZERS) == ALL
    run = example.make_run(name, data, 8, width=16, num_layers=1)
    end = jax.device_get(run(example.OPTIMIZERS[name][1], 0))
    assert end["test_loss"] < 1.5
    assert end["accuracy"] > 0.5


def run_script(example, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    example.main()


def test_the_star_is_at_the_least_validation_loss(example):
    def seeds(*losses):
        names = ("train_loss", "validation_loss", "test_loss", "accuracy")
        return [dict.fromkeys(names, loss) for loss in losses]

    cells = {"mars": {0.01: seeds(0.5, 0.75), 0.1: seeds(0.125), 1.0: seeds(float("nan"))}}
    header, *lines = example.table(cells)
    assert header.split() == ["optimizer", "rate", *seeds(0.0)[0]]
    assert [line.split()[1] for line in lines] == ["1e-02", "1e-01*", "1e+00"]
    assert "0.6250 ± 0.1768" in lines[0]
    assert "62.50% ± 17.68%" in lines[0]
    assert "±" not in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "made", "--optimizer", "sgd"], "--optimizer sgd is unknown"),
        pytest.param(
            [], r"pip install -e '.\[peers\]'", marks=pytest.mark.skipif(DIGITS, reason="installed")
        ),
    ],
)
def test_errors_name_the_way_out(example, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run_script(example, monkeypatch, *arguments)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.peers
@pytest.mark.skipif(not DIGITS, reason="scikit-learn (extra `peers`) is not installed")
def test_digits(example, monkeypatch, capsys):
    arguments = ["--optimizer", "adamw,mars", "--learning-rate", "3e-2", "--seeds", "1"]
    run_script(example, monkeypatch, *arguments)
    *_, adamw, mars = capsys.readouterr().out.splitlines()
    for line in (adamw, mars):
        assert float(line.split()[-1].rstrip("%")) > 90
