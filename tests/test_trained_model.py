import dataclasses

import jax
import numpy as np
import pytest
from hf_models import (
    BASE,
    BYTES,
    hf_arrays,
    hf_fields,
    logits,
    make_run,
    one_device_mesh,
    random_params,
    write_hf,
)

from maxmars import sharding
from maxmars.checkpoint import load_config
from maxmars.config import MeshConfig
from maxmars.data.tokenizer import ByteTokenizer
from maxmars.model import logical_axes
from maxmars.trained_model import open_trained_model

PARAMS = {step: random_params(BYTES, step) for step in (2, 4)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "own", BYTES, PARAMS, ByteTokenizer())


def assert_same(params, expected):
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("inside", "step"),
    [("", 4), ("checkpoints", 4), ("checkpoints/2", 2), ("checkpoints/4/", 4)],
)
def test_a_run_and_its_checkpoints(run, inside, step):
    model = open_trained_model(f"{run}/{inside}", mesh=one_device_mesh())
    assert model.config == BYTES
    assert model.tokenizer.name == "byte"
    assert model.name == f"own, step {step}"
    assert_same(model.params, PARAMS[step])


def test_parameters_are_laid_out_as_in_training(run):
    mesh = sharding.make_mesh(MeshConfig(fsdp=8))
    model = open_trained_model(run, mesh=mesh)
    assert_same(model.params, PARAMS[4])
    expected = sharding.tree_shardings(mesh, logical_axes(model.config))
    assert jax.tree.map(lambda x: x.sharding, model.params) == expected


def test_a_hugging_face_directory_on_any_mesh(tmp_path, monkeypatch, reference_dir, capsys):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(reference_dir / "data" / "tiktoken"))
    config = dataclasses.replace(BASE, vocab_size=50257, num_layers=1)
    write_hf(tmp_path / "theirs", hf_fields(config), hf_arrays(config))
    tokens = np.array([[5, 50256, 7]], np.int32)
    alone = open_trained_model(tmp_path / "theirs", mesh=one_device_mesh())
    assert "whose tokenizer is taken" in capsys.readouterr().err
    assert (alone.name, alone.tokenizer.name, alone.config) == ("theirs", "gpt2", config)
    # tensor=2 does not divide 50,257: the embedding is padded.
    model = open_trained_model(tmp_path / "theirs", mesh=sharding.make_mesh(MeshConfig(tensor=2)))
    assert model.config.padded_vocab_size == 50258
    np.testing.assert_allclose(
        logits(model.config, model.params, tokens),
        logits(alone.config, alone.params, tokens),
        atol=1e-5,
    )


def test_a_mesh_that_does_not_divide_the_model(run):
    with pytest.raises(ValueError, match=r"tensor=8 does not divide model.num_heads=2"):
        open_trained_model(run, mesh=sharding.make_mesh(MeshConfig(tensor=8)))


def test_what_is_no_model(tmp_path, run):
    def refused(target, error, message):
        with pytest.raises(error, match=message):
            open_trained_model(target, mesh=one_device_mesh())

    refused(tmp_path / "missing", FileNotFoundError, "missing does not exist; name the working")
    refused(run / "checkpoints" / "3", FileNotFoundError, "3 does not exist")
    refused(tmp_path, ValueError, "is neither a run .* nor a Hugging Face directory")
    refused(run / "tokenizer" / "description.json", ValueError, "is neither a run")
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    refused(tmp_path / "new", FileNotFoundError, "holds no checkpoint yet")
    refused(tmp_path / "new" / "checkpoints", FileNotFoundError, "holds no checkpoint yet")
    write_hf(tmp_path / "bytes", hf_fields(BYTES), hf_arrays(BYTES))
    refused(tmp_path / "bytes", FileNotFoundError, "has no tokenizer .* of 257 tokens is not")


def test_a_run_without_its_tokenizer_or_with_anothers(tmp_path):
    one = {1: random_params(BASE)}
    bare = make_run(tmp_path / "bare", BASE, one, None)
    with pytest.raises(FileNotFoundError, match="tokenizer is missing: beside its checkpoints"):
        open_trained_model(bare, mesh=one_device_mesh())
    make_run(tmp_path / "other", BASE, one, ByteTokenizer())
    with pytest.raises(ValueError, match="has 257 tokens, but the model only 61"):
        open_trained_model(tmp_path / "other", mesh=one_device_mesh())
    assert load_config(tmp_path / "other" / "checkpoints").model == BASE
