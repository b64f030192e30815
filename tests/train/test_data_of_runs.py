"""A run knows its data: by digest when it continues, by checksums while it trains."""

import dataclasses
import functools
import json
import os
import re
import shutil

import numpy as np
import pytest
import running
import tiny
from damage import flip
from refusals import refused, stopped
from token_directories import write_nanogpt, write_shards

from maxmars.checkpoint import read
from maxmars.checkpoint.journal import changes_of_config, read_journal
from maxmars.cli import main
from maxmars.config import EvalConfig, TokenShardsConfig
from maxmars.train import train

STREAM = np.random.default_rng(0).integers(0, 200, 2000)


@pytest.fixture
def short_config(tmp_path):
    """Makes configs of a few steps on `<tmp_path>/tokens`."""
    tiny.short_config(tmp_path / "tokens")
    return functools.partial(tiny.short_config, tmp_path / "tokens", eval=EvalConfig(every=None))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps and its tokens, for tests that copy them."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny.short_config(folder / "tokens", eval=EvalConfig(every=None))
    train(config, folder / "run")
    return folder


@pytest.fixture
def copied(finished, tmp_path, short_config):
    """The config of the finished run's tokens in `tmp_path`, and its workdir there."""
    shutil.copytree(finished / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "tokens")
    shutil.copytree(finished / "tokens", tmp_path / "tokens")
    return short_config(num_steps=4), tmp_path / "run"


@pytest.mark.seconds
def test_a_damaged_shard_stops_the_run_and_the_mended_one_goes_on(short_config, tmp_path):
    tokens, config = tmp_path / "tokens", short_config(num_steps=500)
    shutil.copytree(tokens, tmp_path / "sound")
    flip(tokens / "train_00003.bin", 7)
    with refused(ValueError, tokens / "train_0000", "SHA-256"):
        train(config, tmp_path / "run")
    shutil.rmtree(tokens)
    (tmp_path / "sound").rename(tokens)
    before = len(running.records(tmp_path / "run"))
    assert before < 400  # it did not train to the end
    result = train(dataclasses.replace(config, num_steps=before + 2), tmp_path / "run")
    assert result.done


@pytest.mark.seconds
def test_tokens_that_changed_since_are_not_replayed(short_config, tmp_path):
    train(short_config(num_steps=1), tmp_path / "run")
    file = tmp_path / "tokens" / "train_00003.bin"
    status = file.stat()
    flip(tmp_path / "tokens" / "train_00003.bin", 6)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with stopped(1, f"{file} does not match its checksum"):
        main(["audit", str(tmp_path / "run"), "--replay", "1"])


@pytest.mark.seconds
def test_a_run_says_what_its_user_may_not_want(short_config, tmp_path, capsys):
    """No comparison with the checksums, and a vocabulary far larger than that of the tokens."""
    config = short_config(num_steps=1)
    flip(tmp_path / "tokens" / "train_00003.bin", 6)
    data = dataclasses.replace(config.data, verify=False)
    model = dataclasses.replace(config.model, vocab_size=600)
    assert train(dataclasses.replace(config, data=data, model=model), tmp_path / "run").done
    printed = capsys.readouterr().out
    assert "data.verify is off" in printed
    assert "--model.vocab-size 257" in printed
    assert not (tmp_path / "run" / "verified").exists()


@pytest.mark.seconds
def test_other_data_at_the_same_path_are_refused(copied, tmp_path):
    _, workdir = copied
    recorded = read(workdir / "checkpoints").data_digest
    assert json.loads((workdir / "summary.json").read_text())["data_digest"] == recorded
    shutil.rmtree(tmp_path / "tokens")
    write_shards(tmp_path / "tokens", STREAM[::-1], STREAM[:400], vocab_size=257)
    fields = "num_steps=4, mesh=MeshConfig(data=2), eval=EvalConfig(every=None)"
    running.write_config(tmp_path, fields, make="short_config")
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    command = ["train", str(tmp_path / "config.py"), "--workdir", str(workdir)]
    command += ["--num-processes", "1", "--mesh.data", "8"]
    for more in ([], ["--resume-overrides", "data.path"]):
        with stopped(1) as errors:
            main([*command, *more])
        (line,) = errors.lines
        match = re.match(
            rf"maxmars: error: {workdir} was trained on other data: their digest is (\w+), and "
            rf"that of the data here is (\w+)\. .* --init-from {workdir} and another --workdir\.",
            line,
        )
        assert match is not None, line
        assert recorded.startswith(match[1])
        assert match[1] != match[2]
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


@pytest.mark.seconds
def test_the_same_data_at_another_path_continue(copied, tmp_path):
    config, workdir = copied
    (tmp_path / "tokens").rename(tmp_path / "moved")
    config = dataclasses.replace(config, data=TokenShardsConfig(path=str(tmp_path / "moved")))
    assert train(config, workdir).step == 4
    assert "data.path" in changes_of_config(read_journal(workdir))[2]


@pytest.mark.seconds
def test_tokens_of_other_programs_are_trained_on_as_they_are(tmp_path, capsys):
    directory = tmp_path / "letters"
    write_nanogpt(directory, STREAM % 65, STREAM % 65)
    (directory / "meta.pkl").write_bytes(b"")
    options = "--data.vocab-size 65 --model.vocab-size 70"
    small = "--num-steps 1 --model.num-layers 1 --model.max-seq-len 16 --eval.num-windows 8"
    words = f"train quickstart:data={directory} --num-processes 1 --workdir {tmp_path / 'run'}"
    main([*words.split(), *small.split(), *options.split()])
    printed = capsys.readouterr().out
    assert "done: 1 steps" in printed
    assert "--model.vocab-size" not in printed
    assert "nats a token" in printed
    assert "bits a byte" not in printed  # no file says what the tokens are
    assert printed.splitlines()[-1] == f"next: maxmars report {tmp_path / 'run'}"
