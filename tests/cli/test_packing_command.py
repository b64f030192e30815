"""Packed windows through the command line: prepare, train, resume."""

import json
import shlex

import numpy as np
import pytest
from test_commands import ALONE, TINY

from maxmars.cli import main


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """400 short documents, one a line."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("packing") / "documents.jsonl"
    texts = ("ab c" * int(n) for n in rng.integers(0, 12, 400))
    path.write_text(
        "".join(json.dumps({"text": f"{i} {text}"}) + "\n" for i, text in enumerate(texts))
    )
    return path


@pytest.mark.seconds
def test_best_fit_from_text_to_a_resumed_run(documents, tmp_path, capsys):
    prepare = ["data", "prepare", str(documents), str(tmp_path / "tokens"), "--workers", "0"]
    main(prepare)
    options = ["--workdir", str(tmp_path / "run"), *ALONE, *TINY.split()]
    train = ["train", f"quickstart:data={tmp_path / 'tokens'}", "--data.packing", "best_fit"]
    train += options
    with pytest.raises(SystemExit):
        main([*train, "--num-steps", "1"])
    assert "with --pack best_fit --pack-length 32" in capsys.readouterr().err
    main([*prepare, "--pack", "best_fit", "--pack-length", "32"])
    *said, following = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{tmp_path / 'tokens'} was complete: ")
    assert "windows of 32 tokens (val)" in said[-1]
    packed = "--data.packing best_fit --model.max-seq-len 32"
    assert following == f"next: maxmars train quickstart:data={tmp_path / 'tokens'} {packed}"
    words = shlex.split(following)[2:]
    main([*words, *options, "--num-steps", "1"])
    main([*train, "--num-steps", "3", "--resume-overrides", "num-steps"])
    *_, following = capsys.readouterr().out.splitlines()
    main([*shlex.split(following)[2:], "--max-new-tokens", "3"])
    assert capsys.readouterr().out.startswith("Once")
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) > 1
