"""Runs and tokens of older versions, as their code wrote them.

In `older_versions.tar.xz`, `format_3` is of commit 6a4dfdb, the first that wrote checkpoints of
format 3, and had no journal; `format_2` is of the commit before it, whose checkpoints no run
continues. Each holds a run of four steps of MARS on a GPT-2 of 1,300 parameters, and the byte
tokens of one text. What is expected of their weights is what their own code computed.
"""

import json
import lzma
import subprocess
from pathlib import Path

import numpy as np
import pytest

from maxmars.checkpoint import read
from maxmars.cli import main
from maxmars.eval import load
from maxmars.train.metrics import read_metrics

OLDER = Path(__file__).with_name("older_versions.tar.xz")
SAVED_LOSS = 5.468883991241455
# Steps 5 to 8, which the code of format 3 computed from its own checkpoint.
CONTINUED = {
    (5, "train/loss"): 5.4701128005981445,
    (6, "train/loss"): 5.430599212646484,
    (6, "eval/loss"): 5.414720296859741,
    (7, "train/loss"): 5.432153701782227,
    (8, "train/loss"): 5.404257297515869,
    (8, "eval/loss"): 5.3939597606658936,
}
OPTIONS = """--num-processes 1 --mesh.tensor 2
    --schedule.decay-steps 8 --global-batch-size 4 --schedule.warmup-steps 2
    --model.num-layers 1 --model.num-heads 2 --model.embed-dim 4 --model.max-seq-len 16
    --model.scan-unroll 1 --model.compute-dtype float32
    --eval.every 2 --eval.num-windows 8 --eval.batch-size 4
    --checkpoint.every 4 --checkpoint.keep-last 9 --log.every 1"""


@pytest.fixture(params=["format_2", "format_3"])
def older(request):
    return request.param


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, to which the paths in the old files are relative."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def take(older):
    subprocess.run(["tar", "-x"], input=lzma.decompress(OLDER.read_bytes()), check=True)
    for name in ("run", "tokens"):
        Path(older, name).rename(name)


def train(*arguments):
    main(["train", "quickstart:data=tokens", "--workdir", *arguments, *OPTIONS.split()])


def losses(workdir):
    lines = read_metrics(Path(workdir))
    keys = ("train/loss", "eval/loss")
    return {(line["step"], key): line[key] for line in lines for key in keys if key in line}


def refusal(capsys, *arguments):
    """The line that refuses a command."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.seconds
def test_a_run_of_format_3_is_continued(folder, capsys):
    take("format_3")
    before = read("run/checkpoints")
    train("run", "--num-steps", "8")
    for key, expected in CONTINUED.items():
        assert losses("run")[key] == pytest.approx(expected, abs=1e-5), key
    after = read("run/checkpoints")
    assert (before.step, after.step) == (4, 8)
    assert after.data_position == 8 * 4
    assert after.data_digest == before.data_digest is not None
    main(["audit", "run"])
    assert "one trajectory" in capsys.readouterr().out


@pytest.mark.seconds
def test_the_parameters_of_both_formats_are_used(folder, older, capsys):
    take(older)
    options = "--num-processes 1 --tasks loss --data.path tokens --data.num-windows 8"
    main(["eval", "run", *options.split(), "--output", "scores.json"])
    scores = json.loads(Path("scores.json").read_text())
    expected = SAVED_LOSS if older == "format_3" else losses("run")[4, "eval/loss"]
    assert scores["loss"] == pytest.approx(expected, abs=1e-5)
    main(["generate", "run", "--prompt", "the ", "--max-new-tokens", "3", "--output", "t.jsonl"])
    assert len(Path("t.jsonl").read_text().splitlines()) == 1
    main(["export", "run", "exported"])
    tokens = np.arange(16)[None]
    np.testing.assert_allclose(
        load("exported").model(tokens), load("run").model(tokens), rtol=1e-5, atol=1e-6
    )


@pytest.mark.seconds
def test_the_tokens_of_both_are_sound_and_trained_on(folder, older):
    """And the parameters begin a new run."""
    take(older)
    main(["data", "inspect", "tokens"])
    train("new", "--num-steps", "1", "--init-from", "run")
    assert losses("new")[0, "eval/loss"] == pytest.approx(losses("run")[4, "eval/loss"], abs=1e-5)


def test_a_run_of_format_2_is_not_continued(folder, capsys):
    take("format_2")
    before = sorted(Path("run/checkpoints").rglob("*"))
    commit = read("run/checkpoints").environment["git_commit"]
    arguments = ["train", "quickstart:data=tokens", "--workdir", "run", *OPTIONS.split()]
    line = refusal(capsys, *arguments)
    for named in ("format 2", "--init-from", f"git checkout {commit}"):
        assert named in line
    left = sorted(path for path in Path("run/checkpoints").rglob("*") if path.name != ".lock")
    assert left == before
