"""The measurements on a GPU, without one: what is left, what is not run again, and the table."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

from maxmars.config.chips import CHIPS

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CARD = "NVIDIA H100 80GB HBM3"
PEAK, MEMORY = CHIPS["h100"].peak_flops, CHIPS["h100"].memory_bandwidth


@pytest.fixture
def acceptance(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_acceptance

    return gpu_acceptance.main


def leave(folder, unit, found, status="ok"):
    result = {"unit": unit, "status": status, "seconds": 1.0, "overrides": [], "found": found}
    (folder / f"{unit}.json").write_text(json.dumps(result))


def step(
    optimizer, step_s, *, size="small", mfu=0.5, ratio=1.0, share=0.1, parameters=1e8, peak=10
):
    """A measured step; its model's products take half of the model's time at the published peak."""
    spread = {"median": step_s, "min": step_s, "max": step_s}
    return {
        "name": f"gpt2-{size}-{optimizer}",
        "tokens_a_step": 1000,
        "tokens_per_sec": {key: 1000 / s for key, s in spread.items()},
        "step_time": spread,
        "ratio_to_first": {"median": ratio},
        "mfu": mfu,
        "peak_bytes": peak * 1e9,
        "compile_time": 30.0,
        "phases": {"forward": 0.3, "backward": 0.7 - share, "optimizer": share},
        "longest": [
            {"name": "gemm.1", "phase": "forward", "source": "dot", "ms": 1.5, "share": 0.25}
        ],
        "environment": {"device_kinds": [CARD]},
        "plan": {
            "num_parameters": int(parameters),
            "chip": {"peak_flops": PEAK, "memory_bandwidth": MEMORY},
            "flops": {"hardware": 0.5 * step_s * (1 - share) * PEAK, "optimizer": 0},
            "memory": {
                "parameters_bytes": 0.8 * share * step_s * MEMORY / 3,
                "optimizer_state_bytes": {},
                "previous_parameters_bytes": 0,
                "peak_bytes": 10.2e9,
            },
        },
    }


def listed(acceptance, capsys, *words):
    acceptance([*map(str, words), "--list"])
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_what_is_left_is_listed_and_what_is_done_is_not(acceptance, capsys, tmp_path):
    everything = listed(acceptance, capsys, "--out", tmp_path)
    expected = ["machine", "tests-kernels", "tests-training", "tests-resume", "steps-small"]
    assert everything[:5] == expected
    for unit in (
        "steps-xl-mars_m",
        "peer-large",
        "real-mars",
        "checkpoint-xl",
        "plan-medium",
    ):
        assert unit in everything
    words = ("--out", tmp_path, "--pieces", "tests,steps", "--sizes", "small,xl")
    leave(tmp_path, "tests-kernels", {"tests": 1, "failed": [], "skipped": []})
    leave(tmp_path, "steps-small", {}, "failed")
    leave(tmp_path, "steps-xl-adamw", {}, "left out")
    left = listed(acceptance, capsys, *words)
    assert left[:2] == ["tests-training", "tests-resume"]
    assert "steps-small" not in left  # failed: only on demand
    assert "steps-xl-adamw" in left  # what it lacked may be there now
    assert "steps-small" in listed(acceptance, capsys, *words, "--retry")


def test_every_test_for_a_gpu_is_run():
    marked = {
        str(path.relative_to(TOOLS.parent))
        for path in (TOOLS.parent / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu\n" in path.read_text()
    }
    text = (TOOLS / "gpu_acceptance.py").read_text()
    assert marked == set(re.findall(r'"(tests/\w+/test_\w+\.py)"', text))


def test_all_done_runs_nothing(acceptance, capsys, tmp_path):
    words = ["--out", str(tmp_path), "--pieces", "machine"]
    leave(tmp_path, "machine", {"x": 1})
    with pytest.raises(SystemExit) as stop:
        acceptance(words)
    assert stop.value.code == 0
    assert "all is done" in capsys.readouterr().out
    leave(tmp_path, "machine", {}, "timed out")
    with pytest.raises(SystemExit) as stop:
        acceptance(words)
    assert stop.value.code == 1
    assert "failed: machine" in capsys.readouterr().out
    with refused(SystemExit, tmp_path / "machine.json", "--out"):
        acceptance([*words, "--", "--model.remat", "full"])


def test_the_table_judges_every_goal(acceptance, capsys, tmp_path):
    leave(
        tmp_path,
        "machine",
        {
            "date": "2026-12-01",
            "device_kind": CARD,
            "driver": None,
            "matmul_flops": [7e14, 8e14, 9e14],
            "copy_bytes_per_sec": [3e12],
            "environment": dict.fromkeys(("python", "jax", "flax", "optax", "maxmars"), "1"),
        },
    )
    small = [step("adamw", 1.0, mfu=0.52), step("mars", 1.01, ratio=0.99)]
    leave(tmp_path, "steps-small", {"results": small})
    leave(tmp_path, "peer-small", {"results": [small[0], step("torch", 1.2, ratio=0.8)]})
    adamw = step("adamw", 4.0, size="xl", mfu=0.5, parameters=16e8, peak=11)
    leave(tmp_path, "steps-xl-adamw", {"results": [adamw]})
    mars_m = step("mars_m", 4.2, size="xl", parameters=16e8)
    leave(tmp_path, "steps-xl-mars_m", {"results": [mars_m]})
    leave(tmp_path, "tests-kernels", {"tests": 9, "failed": ["test_x"], "skipped": []}, "failed")
    leave(tmp_path, "eval", {}, "left out")
    config = {"global_batch_size": 10, "model": {"max_seq_len": 10_000}}
    run = {"verdict": "identical", "config": config, "losses": [[1, 10.8], [2, 9.5]]}
    leave(tmp_path, "real-adamw", run)
    leave(tmp_path, "real-mars", run | {"verdict": "different"}, "failed")
    acceptance(["--out", str(tmp_path), "--table"])
    printed = capsys.readouterr().out
    for line in (
        "| MFU of small, AdamW, at least | 50.0% | 52.0% | met |",
        "| MFU of xl, AdamW, at least | 55.0% | 50.0% | missed by 5.0% |",
        "| MFU of large, AdamW, at least | 55.0% |  | not measured |",
        "| tokens/s of small over compiled PyTorch, at least | 1.15 | 1.25 | met |",
        "| step of mars_m over AdamW's, xl, at most | +4.0% | +5.0% | missed by +1.0% |",
        "| plan's time, calibrated, off by at most | 10.0% | 0.0% | met |",
        "| plan's peak of memory off by at most | 3.0% | 7.3% | missed by 4.3% |",
        "| mars on real text, killed and resumed | identical | different | missed |",
        "| real-adamw | training loss by tokens: 0.1M: 10.800, 0.2M: 9.500 |",
        "| tests-kernels | 9 tests, failed or skipped: test_x |",
    ):
        assert line in printed, line
    assert "different devices" not in printed
    data = printed.split("roofline.py:")[1]
    assert "'H100 SXM': Calibration(measured='2026-12-01, NVIDIA H100 80GB HBM3, JAX 1'" in data
    assert (
        "arithmetic=((100000000, 0.5), (1600000000, 0.5)), memory=0.8, error=0.0, clock=1.0)"
        in data
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pieces", "stesp"], "stesp"),
        (["--sizes", "huge"], "huge"),
        (["--tokens", "/nowhere"], "--tokens /nowhere"),
        (["--table"], "no results"),
    ],
)
def test_wrong_words_are_refused(acceptance, capsys, tmp_path, words, named):
    with pytest.raises(SystemExit) as stop:
        acceptance(["--out", str(tmp_path), *words])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_of_the_cheapest_units_stops_and_continues(tmp_path):
    command = [sys.executable, str(TOOLS / "gpu_acceptance.py"), "--out", str(tmp_path)]
    command += ["--rehearse", "--pieces", "machine,generate"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

    def start(*words):
        options = {"env": environment, "capture_output": True, "text": True, "check": False}
        return subprocess.run([*command, *words], **options)

    first = start("--minutes", "0.01")  # one unit runs in any case
    assert first.returncode == 75, first.stdout + first.stderr
    assert "left for the next time: generate" in first.stdout
    second = start()
    assert second.returncode == 0, second.stdout + second.stderr
    assert "machine: " not in second.stdout
    assert "generate: ok" in second.stdout
    table = start("--table")
    assert "| generate | tokens/s " in table.stdout
