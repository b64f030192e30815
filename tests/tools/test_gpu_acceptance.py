"""The measurements on a GPU, without one: what is left, what is not run again, and the table."""

import json
import re
import signal
from pathlib import Path

import pytest
from refusals import stopped

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def acceptance(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import gpu_acceptance

    return gpu_acceptance.main


def leave(folder, unit, found):
    result = {"command": [], "options": [], "seconds": 1.0, "found": found}
    (folder / f"{unit}.json").write_text(json.dumps(result))


def step(optimizer, step_s, planned_s, *, size="small", mfu=0.5, ratio=1.0, peak=10):
    """A measured step, and what the plan said of it."""
    spread = {"median": step_s, "min": step_s, "max": step_s}
    return {
        "name": f"gpt2-{size}-{optimizer}",
        "tokens_a_step": 1000,
        "tokens_per_sec": {key: 1000 / s for key, s in spread.items()},
        "step_time": spread,
        "ratio_to_first": dict.fromkeys(("median", "min", "max"), ratio),
        "mfu": mfu,
        "peak_bytes": peak * 1e9,
        "compile_time": 30.0,
        "phases": {"forward": 0.3, "backward": 0.6, "optimizer": 0.1},
        "longest": [
            {"name": "gemm.1", "phase": "forward", "source": "dot", "ms": 1.5, "share": 0.25}
        ],
        "environment": {"device_kinds": [CARD]},
        "plan": {
            "memory": {"peak_bytes": 10.2e9},
            "time": {"step_time_s": planned_s},
            "clock": {"seconds": planned_s},
        },
    }


def listed(acceptance, capsys, *words):
    acceptance([*map(str, words), "--list"])
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()]


def test_what_is_left_is_listed_and_what_is_done_is_not(acceptance, capsys, tmp_path):
    everything = listed(acceptance, capsys, "--out", tmp_path)
    expected = ["machine", "tests-kernels", "tests-training", "tests-resume", "steps-small"]
    assert everything[:5] == expected
    assert {"steps-xl-mars_m", "peer-large", "real-mars", "checkpoint"} <= set(everything)
    words = ("--out", tmp_path, "--pieces", "tests,steps", "--sizes", "small,xl")
    leave(tmp_path, "tests-kernels", {})
    left = listed(acceptance, capsys, *words)
    assert left == [
        *("tests-training", "tests-resume", "steps-small"),
        *(f"steps-xl-{optimizer}" for optimizer in ("adamw", "mars", "mars_m", "muon")),
    ]


def test_every_test_for_a_gpu_is_run():
    marked = {
        str(path.relative_to(TOOLS.parent))
        for path in (TOOLS.parent / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu\n" in path.read_text()
    }
    text = (TOOLS / "gpu_acceptance.py").read_text()
    assert marked == set(re.findall(r'"(tests/\w+/test_\w+\.py)"', text))


def test_the_table_has_steps_and_what_the_plan_said_of_them(acceptance, capsys, tmp_path):
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
    small = [step("adamw", 1.0, 0.8, mfu=0.52), step("mars", 1.01, 0.808, ratio=0.99)]
    leave(tmp_path, "steps-small", {"results": small})
    adamw = step("adamw", 4.0, 4.0, size="xl", mfu=0.5, peak=11)
    leave(tmp_path, "steps-xl-adamw", {"results": [adamw]})
    leave(tmp_path, "tests-kernels", ["9 passed"])
    acceptance(["--out", str(tmp_path), "--table"])
    printed = capsys.readouterr().out
    assert "800 TFLOP/s" in printed
    rows = [
        [c.strip() for c in line.split("|")] for line in printed.splitlines() if "1,000" in line
    ]
    assert [row[2] for row in rows] == ["gpt2-small-adamw", "gpt2-small-mars", "gpt2-xl-adamw"]
    assert [row[4] for row in rows] == ["1.000 (1.000 to 1.000)", "0.990 (0.990 to 0.990)", ""]
    assert [row[6] for row in rows] == ["1000.0 (-20.0%)", "1010.0 (-20.0%)", "4000.0 (+0.0%)"]
    assert rows[2][5:9] == ["50.0%", "4000.0 (+0.0%)", "10.0%", "11.0 (-7.3%)"]
    assert "9 passed" in printed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--pieces", "stesp"], "stesp"),
        (["--sizes", "huge"], "huge"),
        (["--tokens", "/nowhere"], "--tokens /nowhere"),
        (["--table"], "no results"),
    ],
)
def test_wrong_words_are_refused(acceptance, tmp_path, words, named):
    with stopped(2, named):
        acceptance(["--out", str(tmp_path), *words])


@pytest.mark.slow
def test_a_rehearsal_of_the_cheapest_units_stops_and_continues(acceptance, capsys, tmp_path):
    terminated = signal.getsignal(signal.SIGTERM)  # which the command sets

    def start(code, pieces, *words):
        with stopped(code):
            acceptance(["--out", str(tmp_path), "--rehearse", "--pieces", pieces, *words])
        return capsys.readouterr().out

    try:
        # One unit runs in any case.
        first = start(75, "machine,generate", "--minutes", "0.01")
        assert "left for the next time: generate" in first
        wrong = start(1, "machine,generate,eval", "--shared", "nowhere")
        assert "machine: " not in wrong
        assert "failed: eval" in wrong
        assert "all is done" in start(0, "machine,generate")
    finally:
        signal.signal(signal.SIGTERM, terminated)
    acceptance(["--out", str(tmp_path), "--table"])
    assert '"tokens_per_sec"' in capsys.readouterr().out
