"""Beam makes the bytes that `maxmars data prepare` makes. MAXMARS_BEAM_PYTHON is the interpreter of
an environment as `tools/prepare_on_beam.py` describes it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from maxmars.cli import main

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_on_beam.py"


@pytest.mark.long
def test_the_same_bytes_on_one_and_two_processes(tmp_path):
    python = os.environ.get("MAXMARS_BEAM_PYTHON")
    if python is None:
        pytest.skip("MAXMARS_BEAM_PYTHON names no interpreter with Apache Beam")
    for i in range(3):
        lines = (json.dumps({"text": f"{i} {line} " * (line % 50)}) for line in range(300))
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines))
    source, whole = str(tmp_path / "*.jsonl"), tmp_path / "whole"
    main(["data", "prepare", source, str(whole), "--task-bytes", "20000", "--workers", "0"])
    for count in ("1", "2"):
        out = tmp_path / f"beam{count}"
        runner = ["--runner", "DirectRunner", "--direct_running_mode", "multi_processing"]
        options = ["--task-bytes", "20000", *runner, "--direct_num_workers", count]
        environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
        command = [python, str(TOOL), source, str(out), *options]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
        for path in whole.iterdir():
            ours, theirs = path.read_bytes(), (out / path.name).read_bytes()
            if path.name == "meta.json":
                ours, theirs = json.loads(ours), json.loads(theirs)
                del ours["command"]
            assert ours == theirs
