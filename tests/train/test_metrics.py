"""metrics.jsonl: every step once."""

import contextlib
import json

import pytest
from etils import epath

from maxmars.config import GPT2Config
from maxmars.model.parameters import Parameters
from maxmars.train.metrics import read_metrics
from maxmars.train.sinks import MetricsFile
from maxmars.train.summary import best_evaluation


def write_steps(workdir, steps, **kwargs):
    file = MetricsFile(epath.Path(workdir), **kwargs)
    for step in steps:
        file.write(step, {"train/loss": float(step)})
    file.close()


def test_a_resumed_run_has_every_step_once(tmp_path):
    write_steps(tmp_path, [0, 10, 20, 30, 40])
    write_steps(tmp_path, [30, 40, 50], resume_step=20)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 10, 20, 30, 40, 50]
    write_steps(tmp_path, [0, 10])  # it starts again
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 10]
    write_steps(tmp_path, [10, 20], resume_step=0)  # from the weights of another run, saved there
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 10, 20]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    write_steps(tmp_path, [10])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "train/lo')
    write_steps(tmp_path, [20], resume_step=10)
    assert [line["step"] for line in read_metrics(tmp_path)] == [10, 20]


def test_values_that_are_not_finite_stay_valid_json(tmp_path):
    with contextlib.closing(MetricsFile(epath.Path(tmp_path))) as file:
        file.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 3})

    def reject(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert line == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 3}
    assert float(line["c"]) == float("-inf")


@pytest.mark.parametrize(
    ("losses", "best"),
    [(["NaN", 2.5, 3.0], {"eval/loss": 2.5, "step": 1}), (["NaN", "Infinity"], None)],
)
def test_the_best_of_the_evaluations_is_finite(losses, best):
    rows = [{"step": step, "eval/loss": loss} for step, loss in enumerate(losses)]
    assert best_evaluation([{"step": 0, "train/loss": 1.0}, *rows]) == best


def test_flops_per_token_of_gpt2_small():
    # 6 * 124439808 + 12 * 12 * 768 * 1024
    assert Parameters(GPT2Config.small()).flops_per_token == 859_885_056
