import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import (
    BASE,
    TOKENS,
    VARIANTS,
    hf_arrays,
    hf_fields,
    logits,
    plain_hf_logits,
    write_hf,
)
from refusals import refused
from safetensors.numpy import save_file
from trees import mesh_of

from maxmars.config import GPT2Config, MeshConfig
from maxmars.config.errors import in_words
from maxmars.distributed import sharding
from maxmars.model import huggingface
from maxmars.model.parameters import Parameters


def load(directory, config=None, mesh=None):
    config = config or huggingface.read_config(directory)
    abstract = Parameters(config).abstract
    if mesh is not None:
        shardings = Parameters(config, mesh).shardings
        abstract = sharding.with_shardings(abstract, shardings)
    params = huggingface.load_params(directory, config, abstract)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    return config, params


@pytest.fixture
def model(tmp_path):
    """A directory that tests may damage."""
    return write_hf(tmp_path / "model", hf_fields(BASE), hf_arrays(BASE), prefix="transformer.")


def expected(arrays, fields=None):
    fields = fields or hf_fields(BASE)
    return np.stack([plain_hf_logits(fields, arrays, row) for row in TOKENS])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("prefix", "inverse", "dtype"),
    [("", True, "float32"), ("transformer.", False, "float64"), ("", False, "bfloat16")],
)
def test_logits_equal_a_plain_numpy_gpt2(tmp_path, prefix, inverse, dtype):
    fields = hf_fields(BASE) | {"scale_attn_by_inverse_layer_idx": inverse}
    arrays = {name: array.astype(jnp.dtype(dtype)) for name, array in hf_arrays(BASE).items()}
    config, params = load(write_hf(tmp_path, fields, arrays, prefix))
    assert config == dataclasses.replace(BASE, scale_attn_by_inverse_layer_idx=inverse)
    np.testing.assert_allclose(logits(config, params), expected(arrays, fields), atol=2e-5)


def test_old_files_with_the_mask_and_the_tied_head_in_them(tmp_path):
    arrays = hf_arrays(BASE)
    extra = {"lm_head.weight": arrays["wte.weight"]}
    for i in range(BASE.num_layers):
        extra[f"h.{i}.attn.bias"] = np.tri(12, dtype=np.uint8)[None, None]
        extra[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    fields = hf_fields(BASE) | {"n_ctx": 12}
    _, params = load(write_hf(tmp_path, fields, arrays | extra))
    np.testing.assert_allclose(logits(BASE, params), expected(arrays), atol=2e-5)


def test_several_files_with_an_index(tmp_path):
    arrays = hf_arrays(BASE)
    write_hf(tmp_path, hf_fields(BASE), arrays)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(arrays)}
    for file in set(weight_map.values()):
        save_file({n: arrays[n] for n, f in weight_map.items() if f == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert huggingface.is_hf_directory(tmp_path)
    np.testing.assert_allclose(logits(*load(tmp_path)), expected(arrays), atol=2e-5)

    for file in ("../model-0.safetensors", "model-0.bin", "other-1.safetensors"):
        index.write_text(json.dumps({"weight_map": weight_map | {"h.0.ln_1.bias": file}}))
        with refused((ValueError, FileNotFoundError), index, file):
            load(tmp_path)
    for text in ("{}", '{"weight_map": []}'):
        index.write_text(text)
        with refused((ValueError, KeyError), index):
            load(tmp_path)


@pytest.mark.seconds
def test_the_reference_model_on_one_device_and_on_eight(reference_dir):
    directory = reference_dir / "reference" / "hf_gpt2_tiny"
    reference = np.load(reference_dir / "reference" / "hellaswag_reference.npz")
    tokens = reference["tokens"].astype(np.int32)
    config = huggingface.read_config(directory)
    config = dataclasses.replace(config, vocab_pad_multiple=2)
    for mesh in (None, mesh_of(fsdp=4, tensor=2)):
        _, params = load(directory, config, mesh)
        got = logits(config, params, tokens)
        np.testing.assert_allclose(got[..., :64], reference["logits_head"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(got[:, -1], reference["logits_last"], rtol=0, atol=1e-4)
        normalizer = np.log(np.exp(got.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(normalizer, reference["logsumexp"], rtol=0, atol=1e-4)


def test_sharded_loading_gives_the_same_bits(model):
    for multiple in (8, 128):  # of 128 rows, those of the second half are all padding
        config = dataclasses.replace(BASE, vocab_pad_multiple=multiple)
        _, alone = load(model, config)
        for shape in (MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, tensor=2)):
            _, sharded = load(model, config, sharding.make_mesh(shape))
            jax.tree.map(np.testing.assert_array_equal, alone, sharded)
            kernel = sharded["h"]["mlp"]["c_fc"]["kernel"]
            assert kernel.sharding.shard_shape(kernel.shape) == (3, 16 // shape.fsdp, 32)
        assert not np.any(alone["wte"]["embedding"][61:])


def test_a_model_without_biases_takes_zeros_only(tmp_path):
    config = dataclasses.replace(BASE, use_bias=False)
    arrays = hf_arrays(BASE)
    zeroed = {n: a * (not n.endswith("bias")) for n, a in arrays.items()}
    _, params = load(write_hf(tmp_path / "zero", hf_fields(BASE), zeroed), config)
    np.testing.assert_allclose(logits(config, params), expected(zeroed), atol=2e-5)
    with refused(ValueError, "h.0.attn.c_attn.bias"):
        load(write_hf(tmp_path / "biased", hf_fields(BASE), arrays), config)


def test_a_config_of_more_layers_than_the_files_have(tmp_path):
    """Of a billion, whose names would fill the memory."""
    config = dataclasses.replace(BASE, num_layers=10**9)
    folder = write_hf(tmp_path, hf_fields(BASE), hf_arrays(BASE))
    with refused(ValueError, str(tmp_path), "1000000000"):
        huggingface.open_weights(folder, config)


def changed(name, change):
    def change_arrays(arrays):
        result = change(arrays.pop(name))
        if result is not None:
            arrays[name] = result

    return change_arrays


WRONG_ARRAYS = {
    "missing": (changed("h.2.mlp.c_fc.weight", lambda x: None), "h.2.mlp.c_fc.weight"),
    "shape": (
        changed("h.1.attn.c_attn.weight", np.transpose),
        "[48, 16], but the model's is [16, 48]",
    ),
    "vocabulary": (changed("wte.weight", lambda x: x[:60]), "[60, 16]"),
    "another layer": (
        lambda arrays: arrays.update({"h.3.ln_1.bias": np.zeros(16, np.float32)}),
        "h.3.ln_1.bias",
    ),
    "head": (
        lambda arrays: arrays.update({"lm_head.weight": arrays["wte.weight"] + 1}),
        "lm_head.weight",
    ),
    "integers": (
        changed("h.0.ln_1.weight", lambda x: x.astype(np.int32)),
        "I32",
    ),
    "not finite": (
        changed(
            "h.1.ln_1.bias", lambda x: np.where(x > x[1], np.nan, np.where(x < x[1], np.inf, x))
        ),
        "h.1.ln_1.bias",
        "15 of 16",
    ),
    "beyond float32": (
        changed("wte.weight", lambda x: x.astype(np.float64) + 1e300 * (x == x.max())),
        "wte.weight",
        "1 of 976",
    ),
    "twice": (
        lambda arrays: arrays.update({"transformer.ln_f.bias": arrays["ln_f.bias"]}),
        "'transformer.'",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_wrong_arrays(tmp_path, kind):
    change, *named = WRONG_ARRAYS[kind]
    arrays = hf_arrays(BASE)
    change(arrays)
    with refused(ValueError, *named):
        load(write_hf(tmp_path, hf_fields(BASE), arrays))


@pytest.mark.parametrize("left", [0, 100, 5000], ids=["empty", "in the header", "in the arrays"])
def test_a_file_cut_short(model, left):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with refused(ValueError, path) as raised:
        load(model)
    assert "\n" not in in_words(raised.value)


def test_pickles_are_not_opened(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert huggingface.is_hf_directory(model)
    with refused(ValueError, model, "save_pretrained"):
        load(model)
    (model / "pytorch_model.bin").unlink()
    with refused(FileNotFoundError, "model.safetensors"):
        load(model)


# --- config.json ---------------------------------------------------------------------------------


def read_config(directory, fields):
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (directory / "config.json").write_text(text)
    return huggingface.read_config(directory)


def test_the_published_config(tmp_path):
    fields = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": 48,
        "n_positions": 1024,
        "output_past": True,
        "summary_type": "cls_index",
        "vocab_size": 50257,
    }
    assert read_config(tmp_path, fields).num_layers == 48
    small = fields | {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_inner": 3072}
    assert read_config(tmp_path, small) == GPT2Config(compute_dtype="float32")
    fields["activation_function"] = "gelu_fast"  # the same, with its constant cut to ten digits
    del fields["n_positions"]
    assert read_config(tmp_path, fields).max_seq_len == 1024


@pytest.mark.parametrize("kind", VARIANTS)
def test_ours_come_back(tmp_path, kind):
    config = VARIANTS[kind]
    fields = huggingface.config_fields(config)
    assert fields["n_ctx"] == fields["n_positions"] == config.max_seq_len  # llama.cpp reads n_ctx
    assert read_config(tmp_path, fields) == config
    fields["maxmars"] |= {"removed": None}  # as an earlier version had it, and did not use it
    assert read_config(tmp_path, fields) == config


WRONG = {
    "no JSON": ("{", "config.json"),
    "missing": ({"n_embd": ...}, "n_embd"),
    "text": ({"n_layer": "3"}, 'num_layers: "3"'),
    "heads": ({"n_head": 3}, "num_heads=3"),
    "context": ({"n_ctx": 13}, "n_ctx 13"),
    "activation": ({"activation_function": "relu"}, 'activation_function is "relu"'),
    "scale": ({"scale_attn_weights": False}, "scale_attn_weights is false"),
    "width": ({"n_inner": 100}, "n_inner is 100"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "ours": ({"maxmars": {"use_bias": 0}}, "use_bias: 0"),
    "ours unknown": ({"maxmars": {"remat": "full"}}, "remat"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_malformed_and_unsupported(tmp_path, kind):
    changes, named = WRONG[kind]
    if not isinstance(changes, str):
        fields = hf_fields(BASE) | changes
        changes = {name: value for name, value in fields.items() if value is not ...}
    with refused((ValueError, KeyError), tmp_path / "config.json", named):
        read_config(tmp_path, changes)


def test_no_config(tmp_path):
    with refused(FileNotFoundError, "config.json"):
        huggingface.read_config(tmp_path)
    assert not huggingface.is_hf_directory(tmp_path)
    assert not huggingface.is_hf_directory(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"type": "TrainConfig"}')  # of a run
    assert not huggingface.is_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert huggingface.is_hf_directory(tmp_path)
