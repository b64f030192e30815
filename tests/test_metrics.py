import json

import pytest

from maxmars import distributed, metrics
from maxmars.config import GPT2Config, MeshConfig
from maxmars.metrics import MetricsWriter, flops_per_token, peak_flops
from maxmars.sharding import make_mesh

pytestmark = pytest.mark.smoke


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
    assert list(tmp_path.iterdir()) == []


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
