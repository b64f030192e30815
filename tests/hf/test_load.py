import dataclasses
import json

import jax
import numpy as np
import pytest
from hf_models import (
    BASE,
    TOKENS,
    hf_arrays,
    hf_fields,
    logits,
    plain_hf_logits,
    write_hf,
)
from safetensors.numpy import save_file

from maxmars import hf, sharding
from maxmars.config import MeshConfig
from maxmars.model import graph_and_abstract_params, logical_axes


def load(directory, config=None, mesh=None):
    config = config or hf.load_config(directory)
    abstract = graph_and_abstract_params(config)[1]
    if mesh is not None:
        shardings = sharding.tree_shardings(mesh, logical_axes(config))
        abstract = sharding.with_shardings(abstract, shardings)
    params = hf.load_params(directory, config, abstract)
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
@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("inverse", [False, True])
def test_logits_equal_a_plain_numpy_gpt2(tmp_path, prefix, inverse):
    fields = hf_fields(BASE) | {"scale_attn_by_inverse_layer_idx": inverse}
    arrays = hf_arrays(BASE)
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


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jax.numpy.bfloat16])
def test_other_types_are_converted(tmp_path, dtype):
    arrays = {name: array.astype(dtype) for name, array in hf_arrays(BASE).items()}
    _, params = load(write_hf(tmp_path, hf_fields(BASE), arrays))
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
    assert hf.is_hf_directory(tmp_path)
    np.testing.assert_allclose(logits(*load(tmp_path)), expected(arrays), atol=2e-5)

    def refused(match, **changes):
        index.write_text(json.dumps({"weight_map": weight_map | changes}))
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            load(tmp_path)

    refused("which does not hold it", **{"h.0.ln_1.bias": weight_map["wte.weight"]})
    refused(r"other-1.safetensors is missing", **{"h.0.ln_1.bias": "other-1.safetensors"})
    for unsafe in ("../model-0.safetensors", "/etc/passwd", "model-0.bin", ""):
        refused("may only name safetensors files beside it", **{"h.0.ln_1.bias": unsafe})
    index.write_text("[]")
    with pytest.raises(ValueError, match="is no index of safetensors files"):
        load(tmp_path)


def test_the_reference_model_on_one_device_and_on_eight(reference_dir):
    directory = reference_dir / "reference" / "hf_gpt2_tiny"
    reference = np.load(reference_dir / "reference" / "hellaswag_reference.npz")
    tokens = reference["tokens"].astype(np.int32)
    config = hf.load_config(directory)
    config = dataclasses.replace(config, vocab_pad_multiple=2)
    for mesh in (None, sharding.make_mesh(MeshConfig(fsdp=4, tensor=2))):
        _, params = load(directory, config, mesh)
        got = logits(config, params, tokens)
        np.testing.assert_allclose(got[..., :64], reference["logits_head"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(got[:, -1], reference["logits_last"], rtol=0, atol=1e-4)
        normalizer = np.log(np.exp(got.astype(np.float64)).sum(-1))
        np.testing.assert_allclose(normalizer, reference["logsumexp"], rtol=0, atol=1e-4)


def test_sharded_loading_gives_the_same_bits(model):
    config = dataclasses.replace(BASE, vocab_pad_multiple=8)
    _, alone = load(model, config)
    _, sharded = load(model, config, sharding.make_mesh(MeshConfig(fsdp=4, tensor=2)))
    jax.tree.map(np.testing.assert_array_equal, alone, sharded)
    kernel = sharded["h"]["mlp"]["c_fc"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (3, 4, 32)
    assert not np.any(alone["wte"]["embedding"][61:])


def test_a_model_without_biases_takes_zeros_only(tmp_path):
    config = dataclasses.replace(BASE, use_bias=False)
    arrays = hf_arrays(BASE)
    zeroed = {n: a * (not n.endswith("bias")) for n, a in arrays.items()}
    _, params = load(write_hf(tmp_path / "zero", hf_fields(BASE), zeroed), config)
    np.testing.assert_allclose(logits(config, params), expected(zeroed), atol=2e-5)
    with pytest.raises(ValueError, match=r"bias in .* is not zero"):
        load(write_hf(tmp_path / "biased", hf_fields(BASE), arrays), config)


def changed(name, change):
    def change_arrays(arrays):
        result = change(arrays.pop(name))
        if result is not None:
            arrays[name] = result

    return change_arrays


WRONG_ARRAYS = {
    "missing": (changed("h.2.mlp.c_fc.weight", lambda x: None), r"lacks 1 arrays, first h.2.mlp"),
    "shape": (
        changed("h.1.attn.c_attn.weight", np.transpose),
        r"has shape \[48, 16\], but the model's is \[16, 48\]",
    ),
    "vocabulary": (changed("wte.weight", lambda x: x[:60]), r"has shape \[60, 16\]"),
    "another layer": (
        lambda arrays: arrays.update({"h.3.ln_1.bias": np.zeros(16, np.float32)}),
        "also has 1 arrays, first h.3.ln_1.bias",
    ),
    "head": (
        lambda arrays: arrays.update({"lm_head.weight": arrays["wte.weight"] + 1}),
        "lm_head.weight in .* differs from wte.weight",
    ),
    "integers": (
        changed("h.0.ln_1.weight", lambda x: x.astype(np.int32)),
        "has type I32, but only F64, F32, F16, BF16 are read",
    ),
    "twice": (
        lambda arrays: arrays.update({"transformer.ln_f.bias": arrays["ln_f.bias"]}),
        "has arrays twice",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ARRAYS)
def test_wrong_arrays(tmp_path, kind):
    change, message = WRONG_ARRAYS[kind]
    arrays = hf_arrays(BASE)
    change(arrays)
    with pytest.raises(ValueError, match=message):
        load(write_hf(tmp_path, hf_fields(BASE), arrays))


def header_of(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def rewrite(path, header, data):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


def with_entry(name, **changes):
    def damage(path):
        header, data = header_of(path)
        header[f"transformer.{name}"] |= changes
        rewrite(path, header, data)

    return damage


def overlap(path):
    header, data = header_of(path)
    header["transformer.ln_f.bias"]["data_offsets"] = header["transformer.ln_f.weight"][
        "data_offsets"
    ]
    rewrite(path, header, data)


def twice(path):
    header, data = header_of(path)
    text = json.dumps(header)
    entry = json.dumps({"transformer.ln_f.bias": header["transformer.ln_f.bias"]})
    rewrite(path, (text[:-1] + ", " + entry[1:]).encode(), data)


DAMAGE = {
    "half": (lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]), "is cut short"),
    "last byte": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is cut short"),
    "in the header": (lambda p: p.write_bytes(p.read_bytes()[:100]), "is cut short"),
    "empty": (lambda p: p.write_bytes(b""), "its header would have 0 bytes"),
    "a web page": (lambda p: p.write_bytes(b"<!DOCTYPE html>" * 9), "its header would have"),
    "more bytes": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "1 bytes follow the last"),
    "no JSON": (lambda p: rewrite(p, b"{nothing}", b""), "its header cannot be read"),
    "no object": (lambda p: rewrite(p, b"[1, 2]", b""), "its header cannot be read"),
    "nested": (lambda p: rewrite(p, b"[" * 99999, b""), "its header cannot be read"),
    "overlap": (overlap, "begins at byte"),
    "twice": (twice, "names an array twice"),
    "negative": (with_entry("ln_f.bias", data_offsets=[-64, 0]), "has shape"),
    "beyond": (with_entry("ln_f.bias", data_offsets=[10**15, 10**15 + 64]), "begins at byte"),
    "bool": (with_entry("ln_f.bias", shape=[True]), "has shape"),
    "size": (with_entry("ln_f.bias", shape=[17]), r"has 64 bytes, which are not F32\[17\]"),
    "type": (with_entry("ln_f.bias", dtype="F4"), "unknown type 'F4'"),
    "type of type": (with_entry("ln_f.bias", dtype=["F32"]), "unknown type"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_safetensors(model, kind):
    damage, message = DAMAGE[kind]
    damage(model / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(model)


def test_pickles_are_not_opened(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert hf.is_hf_directory(model)
    with pytest.raises(ValueError, match=r"save_pretrained\('.*model-safetensors'\)"):
        load(model)
    (model / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load(model)
