"""Models of the Hugging Face hub, against a local imitation of it."""

import dataclasses
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
from fake_hub import FakeHub, serving
from hf_models import BYTES, hf_arrays, hf_fields, write_hf
from refusals import refused, stopped
from running import finish_well, free_port, start_python
from tiny import MODEL, audited, short_config

from maxmars import cli
from maxmars.checkpoint.journal import read_journal, session_starts
from maxmars.data.tokenizer import ByteTokenizer, save
from maxmars.eval import load
from maxmars.eval.trained_model import export_model
from maxmars.train import InitFrom, train

TOKEN = "hf_aSecretThatNobodyMaySee"


@pytest.fixture
def hub():
    """The imitation, with the token of the user `me`, who has not logged in."""
    hub = FakeHub(tokens={TOKEN: "me"})
    with serving(hub):
        yield hub


@pytest.fixture
def logged_in(monkeypatch):
    """With a token in the environment, which nothing may print."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def model_files(folder, seed=0, **fields):
    write_hf(folder, hf_fields(BYTES) | fields, hf_arrays(BYTES, seed))
    save(ByteTokenizer(), folder)
    return folder


@pytest.fixture
def one(tmp_path):
    return model_files(tmp_path / "one")


def call(*argv):
    cli.main([str(word) for word in argv])


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, load(one).params, load(other).params)


@pytest.mark.seconds
def test_an_uploaded_export_comes_back_bit_by_bit(hub, logged_in, run, tmp_path, capsys):
    out, again = tmp_path / "out", tmp_path / "again"
    call("export", run, out)
    commit = hub.add("me/back", out, private=True)
    theirs = load("hf:me/back")
    assert (theirs.origin, theirs.name) == (f"hf:me/back@{commit}", f"me/back@{commit[:7]}")
    assert theirs.tokenizer.digest == load(run).tokenizer.digest
    assert_same("hf:me/back", run)
    call("export", "hf:me/back", again)
    for file in out.iterdir():
        if file.name != "README.md":
            assert (again / file.name).read_bytes() == file.read_bytes()
    shards = tmp_path / "shards"
    export_model(run, shards, max_file_bytes=20_000)
    hub.add("me/back", shards)
    hub.requests.clear()
    assert_same("hf:me/back", run)
    assert {name for name in hub.fetched() if name.endswith(".safetensors")} == {
        path.name for path in shards.glob("*.safetensors")
    }
    assert TOKEN not in str(capsys.readouterr())


def test_revisions_and_a_branch_that_moves(hub, one, tmp_path):
    many = {"pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"no", "README.md": b"words"}
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    first = hub.add("some/revisions", files | many)
    hub.repositories["some/revisions"].refs["v1"] = first
    assert_same("hf:some/revisions", one)
    assert set(hub.fetched()) == set(files)  # what is needed
    second = hub.add("some/revisions", model_files(tmp_path / "two", seed=1))
    hub.requests.clear()
    for revision in ("v1", first):
        assert_same(f"hf:some/revisions@{revision}", one)
    assert hub.fetched() == []  # they are in the cache
    assert load("hf:some/revisions").origin.endswith(second)
    hub.requests.clear()
    assert load(f"hf:some/revisions@{second}").origin.endswith(second)
    assert hub.requests == []


def test_without_a_network_the_cache_is_used(one, tmp_path, capsys, monkeypatch):
    hub = FakeHub()
    with serving(hub):
        commit = hub.add("some/offline", one)
        load("hf:some/offline")
        hub.requests.clear()
        with monkeypatch.context() as patch:  # what the variable sets when it is imported
            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
            call("export", "hf:some/offline", tmp_path / "offline")
        assert hub.requests == []
    call("export", "hf:some/offline", tmp_path / "out")
    for warning in capsys.readouterr().err.splitlines():
        assert warning.startswith("maxmars: warning: ")
        assert f"commit {commit}" in warning
    load(f"hf:some/offline@{commit}")
    assert capsys.readouterr().err == ""
    for target in ("hf:some/other", "hf:some/offline@v2"):
        with stopped(1, target):
            call("export", target, tmp_path / "other")


@pytest.mark.parametrize(
    ("target", "token", "value"),
    [
        ("hf:gpt2", None, "hf:gpt2"),
        ("hf:a/b--c", None, "a/b--c"),
        ("hf:no/such", None, "Repository Not Found"),
        ("hf:some/pickle", None, "model.safetensors"),
        ("hf:some/llama", None, '"llama"'),
        ("hf:some/open", "hf_expired", "401"),
        ("hf:some/open", "hf_a\x01b", "HF_TOKEN"),
    ],
)
def test_not_fetched(hub, one, tmp_path, monkeypatch, target, token, value):
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    hub.add("some/open", files)
    pickle = {"pytorch_model.bin": files.pop("model.safetensors")}
    hub.add("some/pickle", files | pickle)
    hub.add("some/llama", model_files(tmp_path / "llama", model_type="llama"))
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with stopped(1, value) as errors:
        call("export", target, tmp_path / "out")
    assert "hf_" not in errors.getvalue()
    assert "model.safetensors" not in hub.fetched()  # whatever is wrong is found before
    assert not (tmp_path / "out").exists()


def test_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with stopped(1, "[hf]'`"):
        call("export", "hf:a/b", tmp_path / "out")


# --- starting to train from one -----------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    return short_config(tmp_path / "tokens")


def start_of(workdir):
    return session_starts(read_journal(workdir))[-1].init_from


@pytest.mark.slow
def test_a_run_keeps_to_its_commit_when_the_branch_moves(hub, logged_in, config, tmp_path, capsys):
    def add(seed):
        folder = write_hf(tmp_path / str(seed), hf_fields(MODEL), hf_arrays(MODEL, seed))
        return hub.add("me/start", folder, private=True)

    first, workdir = add(1), tmp_path / "run"
    source = InitFrom(path="hf:me/start")
    train(config, workdir, init_from=source)
    assert f"hf:me/start@{first}" in capsys.readouterr().out
    start = start_of(workdir)
    assert (start["path"], start["weights"]) == ("hf:me/start", f"hf:me/start@{first}")
    add(2)
    hub.requests.clear()
    train(dataclasses.replace(config, num_steps=3), workdir, init_from=source)
    assert "continuing from step 2" in capsys.readouterr().out
    found = audited(workdir)
    assert (found.verdict, found.last_step) == ("one trajectory", 3)
    assert hub.requests == []  # its weights are in its checkpoints
    assert start_of(workdir) == start
    with refused(ValueError, "hf:me/start", "--init-optimizer-state"):
        state = InitFrom(path="hf:me/start", optimizer_state=True)
        train(config, tmp_path / "other", init_from=state)
    assert not (tmp_path / "other").exists()
    files = [path for path in workdir.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


FETCH = """
import sys
from maxmars.config import MeshConfig
from maxmars.distributed import processes
from maxmars.distributed.sharding import make_mesh
from maxmars.eval import load
port, place = map(int, sys.argv[1:])
processes.initialize(f"127.0.0.1:{port}", 2, place)
mesh = make_mesh(MeshConfig(data=2))
print("origin", load("hf:some/shared", mesh=mesh).origin, flush=True)
processes.shutdown()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_take_the_same_commit(hub, one, tmp_path):
    """Each has a cache of its own, as on two hosts. The branch moves after the first download."""
    first, port = hub.add("some/shared", one), free_port()
    other = model_files(tmp_path / "other", seed=1)
    hub.after_download = lambda: hub.add("some/shared", other)
    homes = [{"HF_HOME": str(tmp_path / f"home{i}")} for i in range(2)]
    outputs = finish_well(
        [start_python(tmp_path, "-c", FETCH, port, i, variables=homes[i]) for i in range(2)]
    )
    assert all(f"origin hf:some/shared@{first}" in output for output in outputs)
    assert hub.fetched().count("model.safetensors") == 2
    assert len(hub.repositories["some/shared"].commits) == 2
