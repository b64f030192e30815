"""A run whose own data and optimizer take secrets: no file of it but the user's own has one."""

import pytest

from maxmars.cli import main

CANARY = "CANARY5f0e"

OWN = """
import grain, numpy, optax

def windows(*, split, length, url, api_token):
    assert api_token == "CANARY5f0e-1" and url == "https://me:CANARY5f0e-2@host/data", api_token
    tokens = numpy.random.default_rng(0).integers(0, 256, (64, length + 1))
    return grain.MapDataset.source(tokens.astype(numpy.int32))

def optimizer(learning_rate, *, matrix_specs, mesh, auth):
    assert auth == ("me", "CANARY5f0e-3")
    return optax.adam(learning_rate)
""".replace(f'"{CANARY}', f'"{CANARY[:6]}" "{CANARY[6:]}')  # which sources/ keeps
OWN = OWN.replace(f"https://me:{CANARY}", f'https://me:{CANARY[:6]}" "{CANARY[6:]}')

CONFIG = """
from maxmars.config import *

def get_config(password: str = "") -> TrainConfig:
    return TrainConfig(
        name="secrets", num_steps=2, global_batch_size=8,
        model=GPT2Config(num_layers=1, num_heads=2, embed_dim=16, max_seq_len=16, vocab_size=257),
        data=GrainConfig(
            source="own.py:windows", tokenizer="byte", options={"url": "", "api_token": ""}
        ),
        optimizer=OptaxConfig(
            make="own.py:optimizer", learning_rate=1e-3, options={"auth": ("me", "CANARY5f0e-3")}
        ),
        schedule=ScheduleConfig(warmup_steps=0, decay_steps=4),
        eval=EvalConfig(every=2, num_windows=8, batch_size=8),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
    )
"""


@pytest.mark.slow
def test_no_record_of_a_run_has_a_secret_and_it_continues(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "config.py").write_text(CONFIG)
    run, url = tmp_path / "run", f"https://me:{CANARY}-2@host/data"
    config = f"{tmp_path / 'config.py'}:password={CANARY}"
    train = ["train", config, "--workdir", str(run), "--num-processes", "1"]
    secrets = ["--data.options.url", url, f"--data.options.api-token={CANARY}-1"]
    main([*train, *secrets])
    main([*train, *secrets, "--num-steps", "4"])
    with pytest.raises(SystemExit):
        main([*train, "--data.options.url", url, f"--data.options.api-token={CANARY}-4"])
    assert CANARY not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", str(run), "--tasks", "loss", "--num-processes", "1"])
    assert "MAXMARS_URL" in capsys.readouterr().err
    monkeypatch.setenv("MAXMARS_URL", url)
    monkeypatch.setenv("MAXMARS_API_TOKEN", f"{CANARY}-1")
    report = tmp_path / "run" / "scores.json"
    eval_loss = ["eval", str(run), "--tasks", "loss", "--num-processes", "1"]
    main([*eval_loss, "--output", str(report)])
    main(["export", str(run), str(run / "exported")])
    main(["audit", str(run), "--output", str(run / "audit.json")])
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.json", "journal.jsonl", "README.md", "audit.json"} <= {p.name for p in files}
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
