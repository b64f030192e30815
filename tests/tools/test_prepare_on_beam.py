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
        text = "\n".join(f"{i} {line} " * (1 + line % 50) for line in range(300))
        (tmp_path / f"{i}.txt").write_text(text)
    whole = tmp_path / "whole"
    words = ["--document-separator", r"\n", "--task-bytes", "20000"]
    main(["data", "prepare", str(tmp_path / "*.txt"), str(whole), *words, "--workers", "0"])
    for count in ("1", "2"):
        out = tmp_path / f"beam{count}"
        runner = ["--runner", "DirectRunner", "--direct_running_mode", "multi_processing"]
        options = [*words, "--", *runner, "--direct_num_workers", count]
        environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
        command = [python, str(TOOL), str(tmp_path / "*.txt"), str(out), *options]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
        for path in whole.iterdir():
            ours, theirs = path.read_bytes(), (out / path.name).read_bytes()
            if path.name == "meta.json":
                ours, theirs = json.loads(ours), json.loads(theirs)
                assert theirs.pop("command") == ours.pop("command").replace(
                    "/whole", f"/beam{count}"
                )
            assert ours == theirs
