import io
import json

import pytest
from rich.console import Console

from maxmars import distributed, metrics
from maxmars.config import GPT2Config, MeshConfig
from maxmars.metrics import MetricsWriter, ProgressLine, flops_per_token, peak_flops
from maxmars.sharding import make_mesh

pytestmark = pytest.mark.smoke


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def read_lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def write_steps(workdir, steps, **kwargs):
    writer = MetricsWriter(workdir, **kwargs)
    for step in steps:
        writer.write(step, {"train/loss": float(step)})
    writer.close()


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path / "new" / "workdir")
    writer.write(10, {"train/loss": 2.5, "perf/mfu": 0.4})
    assert read_lines(tmp_path / "new" / "workdir") == [
        {"step": 10, "train/loss": 2.5, "perf/mfu": 0.4}
    ]
    writer.close()


def test_a_resumed_run_has_every_step_once(tmp_path):
    write_steps(tmp_path, [0, 10, 20, 30, 40])
    write_steps(tmp_path, [30, 40, 50], resume_step=20)
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 10, 20, 30, 40, 50]


def test_a_run_that_starts_again_has_every_step_once(tmp_path):
    write_steps(tmp_path, [0, 10])
    write_steps(tmp_path, [0, 10, 20])
    assert [line["step"] for line in read_lines(tmp_path)] == [0, 10, 20]


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path):
    write_steps(tmp_path, [10])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "train/lo')
    write_steps(tmp_path, [20], resume_step=10)
    assert [line["step"] for line in read_lines(tmp_path)] == [10, 20]


def test_values_that_are_not_finite_stay_valid_json(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 3})

    def reject(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert line == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 3}
    assert float(line["c"]) == float("-inf")


def test_only_the_primary_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "is_primary", lambda: False)
    write_steps(tmp_path, [1])
    metrics.write_environment(tmp_path, make_mesh(MeshConfig()))
    output = io.StringIO()
    line = ProgressLine(2, console=Console(file=output))
    line.update(1, {"train/loss": 1.0})
    line.message("text")
    line.close()
    assert list(tmp_path.iterdir()) == []
    assert output.getvalue() == ""


def test_environment_says_versions_devices_and_mesh(tmp_path):
    metrics.write_environment(tmp_path, make_mesh(MeshConfig(fsdp=2, tensor=2)))
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert environment["num_devices"] == 8
    assert environment["num_processes"] == 1
    assert environment["platform"] == "cpu"
    for package in ("python", "maxmars", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"):
        assert environment[package]
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


def test_git_commit_is_none_outside_a_checkout(tmp_path):
    assert metrics._git_commit(tmp_path) is None


def plain_line(num_steps, clock):
    output = io.StringIO()
    console = Console(file=output, width=80, highlight=False)
    return ProgressLine(num_steps, console=console, clock=clock), output


def test_plain_lines_away_from_a_terminal():
    clock = Clock()
    line, output = plain_line(1200, clock)
    line.message("step 0: validation loss 5.5512")
    clock.now = 20.0  # compilation
    rates = {"perf/tokens_per_sec": 12_345.0, "perf/step_time": 0.5}
    line.update(10, {"train/loss": 4.25, **rates})
    clock.now = 120.0
    line.update(110, {"train/loss": 3.0, "perf/mfu": 0.4512, **rates})
    line.message("saved [step] 110")
    line.close()
    assert output.getvalue().splitlines() == [
        "step 0: validation loss 5.5512",
        "step   10/1200  loss 4.2500  12.3k tok/s  ETA 9:55",
        "step  110/1200  loss 3.0000  12.3k tok/s  MFU 45.1%  ETA 18:10",
        "saved [step] 110",
    ]


def test_the_live_line_fits_80_columns_and_messages_stay_above_it():
    output = io.StringIO()
    clock = Clock()
    console = Console(file=output, width=80, force_terminal=True, highlight=False)
    line = ProgressLine(1_000_000, console=console, clock=clock)
    worst = {"train/loss": 10.81234, "perf/tokens_per_sec": 123_456_789.0, "perf/mfu": 0.512}
    line.update(1, worst)
    clock.now = 10.0
    line.message("step 2: validation loss 9.0000")
    line.update(2, worst)
    line.close()
    printed = output.getvalue()
    last = "step       2/1000000  loss 10.8123  123M tok/s  MFU 51.2%  ETA 115d 17h"
    assert len(last) <= 80
    assert last in printed
    assert printed.index("step 2: validation") < printed.index(last)
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.4, "0"), (999.4, "999"), (999.6, "1.00k"), (12_345.0, "12.3k"), (999_999.0, "1.00M")],
)
def test_short_numbers(number, text):
    assert metrics._short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.0, "0:07"), (754.0, "12:34"), (3723.0, "1:02:03"), (86_399.6, "1d 00h")],
)
def test_durations(seconds, text):
    assert metrics._duration(seconds) == text


@pytest.mark.parametrize(
    ("device_kind", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v6e", 918e12),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GB200", None),
        ("NVIDIA L4", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_peak_flops(device_kind, flops):
    assert peak_flops(device_kind) == flops


def test_flops_per_token_of_gpt2_small():
    # 6 * 124439808 + 12 * 12 * 768 * 1024
    assert flops_per_token(124_439_808, GPT2Config.small()) == 859_885_056
