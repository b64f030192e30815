import hashlib
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from damage import flip
from refusals import stopped
from running import exit_code
from token_directories import write_llm_c, write_nanogpt, write_shards

from maxmars.cli import main
from maxmars.data.metadata import read_metadata
from maxmars.data.prepare import prepare
from maxmars.data.tokenizer import ByteTokenizer

DOCUMENTS = [(f"{i}", f"{i:04d} ".ljust(20, "x")) for i in range(300)]


def run(out, documents=DOCUMENTS, **options):
    prepare(documents, out, tokenizer=ByteTokenizer(), source="a [test]", **options)
    return out


@pytest.fixture
def directory(tmp_path):
    return run(tmp_path / "tokens", task_bytes=1000)


def inspect(capsys, *arguments):
    code = exit_code("data", "inspect", *arguments)
    out, err = capsys.readouterr()
    return code, out + err


def test_counts_and_sample(directory, capsys):
    code, text = inspect(capsys, directory)
    assert code == 0
    split = read_metadata(directory).splits["train"]
    for shown in (
        f"{split.num_tokens:,}",
        f"{split.num_documents:,}",
        "21.0",  # tokens a document
        "1.00",  # bytes a token
        "a [test]",
        "train: '0000 xxxxxxxxxxxxxxx'",
        "checksum",
    ):
        assert shown in text
    assert text.endswith(f"next: maxmars train quickstart:data={directory}\n")
    (directory / "tokenizer.json").write_text("{}")
    code, text = inspect(capsys, directory)
    assert code == 0
    assert "no sample: " in text


def test_text_that_a_tokenizer_cannot_spell_is_refused(tmp_path, capsys):
    """Such as one of bytes that knows those alone that it was trained on, the trainer's default."""
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["<|endoftext|>"], show_progress=False)
    own.train_from_iterator(["the cat sat on the mat"], trainer)
    own.save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 900 + "\n")
    (tmp_path / "b.txt").write_text("the Cat sat on the mat " * 900 + "\n")
    out = tmp_path / "out"
    words = ["data", "prepare", str(tmp_path / "*.txt"), str(out), "--tokenizer"]
    words += [str(tmp_path / "own.json"), "--workers", "0"]
    with stopped(1, "'C'", "2.17%") as errors:
        main(words)
    assert len(errors.lines) == 1
    assert not out.exists()
    main([*words, "--allow-lossy", "--task-bytes", "20000"])
    assert "2.17%" in capsys.readouterr().out
    assert "2.17%" in inspect(capsys, out)[1]
    given = [*words[:5], words[5], "--validation-fraction", "0.1", "--allow-lossy"]
    assert read_metadata(out).command == shlex.join(["maxmars", *given, "--task-bytes", "20000"])


@pytest.mark.parametrize("name", ["train_00001.bin", "val_documents.bin"])
def test_damage_is_named(directory, capsys, name):
    flip(directory / name, 2)  # another token of the vocabulary
    code, text = inspect(capsys, directory)
    assert code == 1
    assert f"{name} " in text
    assert inspect(capsys, directory, "--no-verify")[0] == 0
    (directory / name).unlink()
    code, text = inspect(capsys, directory)
    assert code == 1
    assert name in text


def digests(text):
    """What inspect prints of the tokens of each split."""
    return re.findall(r"^SHA-256 of the tokens of (\w+): ([0-9a-f]{64})$", text, re.MULTILINE)


def test_the_digest_of_tokens_is_the_same_whatever_their_files(tmp_path, capsys):
    train, val = np.arange(5000) % 300, np.arange(600) % 300
    write_nanogpt(tmp_path / "nanogpt", train, val)
    write_llm_c(tmp_path / "llm.c" / "books_val_000000.bin", val)
    for i, tokens in enumerate(np.split(train, [400])):
        write_llm_c(tmp_path / "llm.c" / f"books_train_{i:06d}.bin", tokens)
    for name, dtype in (("16", "uint16"), ("32", "uint32")):
        options = {"dtype": dtype, "tokenizer": "gpt2", "vocab_size": 50257}
        write_shards(tmp_path / name, train, val, **options)
    expected = [
        (split, hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest())
        for split, tokens in (("train", train), ("val", val))
    ]
    for name in ("nanogpt", "32", "16", "llm.c"):
        code, text = inspect(capsys, tmp_path / name)
        assert code == 0, text
        assert digests(text) == expected
    assert "another program" in text  # of the last ones
    rows = [line.replace("│", " ").split()[:3] for line in text.splitlines()]
    assert ["train", "5,000", "2"] in rows
    assert ["val", "600", "1"] in rows
    assert text.endswith(f"next: maxmars train quickstart:data={tmp_path / 'llm.c'}\n")
    train[300] += 1
    write_nanogpt(tmp_path / "other", train, val)
    other = digests(inspect(capsys, tmp_path / "other")[1])
    assert other[0] != expected[0]
    assert other[1] == expected[1]
    assert digests(inspect(capsys, tmp_path / "other", "--no-verify")[1]) == []


def test_no_such_directory(tmp_path, capsys):
    (tmp_path / "file.txt").touch()
    for path, named in (
        (tmp_path / "none", "does not exist"),
        (tmp_path / "file.txt", "file.txt"),
        ("https://example.com/tokens", "gs://BUCKET/PATH"),
    ):
        code, text = inspect(capsys, path)
        assert code == 1
        assert named in text


@pytest.mark.seconds
@pytest.mark.parametrize("limit", ["-Sn 200", "-n 200"])
def test_more_files_than_may_be_open(limit, tmp_path):
    stream = np.arange(250 * 200) % 256
    for number, part in enumerate(np.split(stream, 250)):
        write_llm_c(tmp_path / "foreign" / f"a_train_{number:06}.bin", part)
    write_shards(tmp_path / "ours", stream, sizes=[200] * 250)
    for name in ("ours", "foreign"):
        command = shlex.join([sys.executable, "-m", "maxmars", "data", "inspect", name])
        inspected = subprocess.run(
            ["bash", "-c", f"ulimit {limit} && {command}"], cwd=tmp_path, capture_output=True
        )
        assert inspected.returncode == 0, inspected.stderr
        assert hashlib.sha256(stream.astype("<u4").tobytes()).hexdigest() in str(inspected.stdout)
