"""Bits per byte of the validation text: wherever they are shown, they are a plain count."""

import json
import math

import numpy as np
import pytest
from running import train_here, write_config

from maxmars.cli import main
from maxmars.data.metadata import read_metadata
from maxmars.data.tokenizer import Vocabulary
from maxmars.eval import load
from maxmars.eval.validation import bytes_of_data

TEXTS = [f"Café number {i}, naïve 日本 and {'so ' * (i % 7)}on.\n" for i in range(300)]
WINDOWS, LENGTH = 20, 16
EVAL = f"eval=EvalConfig(every=2, num_windows={WINDOWS}, batch_size=8)"


def prepared(folder):
    """Tokens of the texts by a tokenizer.json of bytes with merges, half of them for validation."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    text, out = folder / "text.jsonl", folder / "tokens"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["--tokenizer", str(folder / "tokenizer.json"), "--validation-fraction", "0.5"]
    main(["data", "prepare", str(text), str(out), *words])
    return out


def plain(model, stream):
    """Loss and bits per byte of the first windows of a stream, in float64, from the logits and the
    decoded text."""
    tokens = stream[: WINDOWS * LENGTH + 1].astype(np.int64)
    logits = model.logits(tokens[:-1].reshape(WINDOWS, LENGTH)).astype(np.float64)
    targets = tokens[1:]
    logits = logits.reshape(len(targets), -1)
    log_likelihoods = logits[np.arange(len(targets)), targets] - np.log(np.exp(logits).sum(-1))
    is_text = targets != model.tokenizer.eot
    assert 0 < is_text.sum() < len(targets)
    num_bytes = len(model.tokenizer.decode(targets[is_text]).encode())
    return -log_likelihoods.mean(), -log_likelihoods[is_text].sum() / math.log(2) / num_bytes


def test_tokens_without_a_vocabulary_do_not_wait_for_a_network(monkeypatch):
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    said = []
    assert bytes_of_data(Vocabulary(tokenizer="gpt2", size=50257), said.append) is None
    assert "TIKTOKEN_CACHE_DIR" in said[0]
    assert bytes_of_data(Vocabulary(tokenizer="byte", size=257), said.append).sum() == 256


@pytest.mark.seconds
@pytest.mark.usefixtures("without_figures")
def test_they_are_a_plain_count_over_the_decoded_text(tmp_path, capsys):
    """In the metrics of training on eight devices, its summary, the report and the model card, and
    in `eval` on other devices."""
    tokens = prepared(tmp_path)
    vocab_size = read_metadata(tokens).vocab_size
    data = f"data=TokenShardsConfig(path={str(tokens)!r})"
    model = f"model=dataclasses.replace(MODEL, num_layers=1, vocab_size={vocab_size})"
    write_config(tmp_path, f"num_steps=2, optimizer=ADAMW, {EVAL}, {data}, {model}")
    train_here(tmp_path, "run", "--mesh.fsdp", 2, "--mesh.tensor", 2)
    run = tmp_path / "run"
    val = sorted(tokens.glob("val_*.bin"))
    stream = np.concatenate([np.fromfile(file, read_metadata(tokens).dtype) for file in val])
    loss, expected = plain(load(run), stream)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval/loss" in line][-1]
    assert last["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert last["eval/bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["eval/bits_per_byte"] == last["eval/bits_per_byte"]
    shown = f"{last['eval/bits_per_byte']:.4f}"
    assert capsys.readouterr().out.count(f"{shown} bits a byte") == 2  # the evaluation, the summary

    scores = tmp_path / "scores.json"
    words = ["eval", run, "--tasks", "loss", "--against", run / "checkpoints" / "2"]
    main([*map(str, words), "--output", str(scores), "--mesh.tensor", "4", "--num-processes", "1"])
    fields = json.loads(scores.read_text())
    assert fields["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert fields["difference"]["bits_per_byte"] == 0
    assert shown in capsys.readouterr().out
    main(["report", str(run)])
    assert shown in (run / "report" / "report.md").read_text()
    assert shown in capsys.readouterr().out
    main(["export", str(run), str(tmp_path / "hf")])
    assert shown in (tmp_path / "hf" / "README.md").read_text()
