import json

import pytest
from hf_models import BASE, VARIANTS, hf_fields

from maxmars import hf
from maxmars.config import GPT2Config
from maxmars.hf.config_json import config_fields


def load(directory, fields):
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (directory / "config.json").write_text(text)
    return hf.load_config(directory)


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
    assert load(tmp_path, fields).num_layers == 48
    small = fields | {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_inner": 3072}
    assert load(tmp_path, small) == GPT2Config(compute_dtype="float32")
    del fields["n_positions"]
    assert load(tmp_path, fields).max_seq_len == 1024


@pytest.mark.parametrize("kind", VARIANTS)
def test_ours_come_back(tmp_path, kind):
    config = VARIANTS[kind]
    fields = config_fields(config, dtype="float32", end_of_text=60)
    assert load(tmp_path, fields) == config


WRONG = {
    "no JSON": ("{", "is no valid JSON"),
    "no object": ("[1]", "must hold a JSON object, but holds list"),
    "missing": ({"n_embd": ...}, "has no n_embd"),
    "text": ({"n_layer": "3"}, 'n_layer is "3"; it must be of type int'),
    "bool": ({"n_head": True}, "n_head is true; it must be of type int"),
    "zero": ({"n_head": 0}, "n_head is 0; it must be greater than zero"),
    "heads": ({"n_head": 3}, "must be a multiple of"),
    "epsilon": ({"layer_norm_epsilon": -1}, "describes no GPT-2"),
    "scaling": ({"scale_attn_by_inverse_layer_idx": None}, "must be of type bool"),
    "context": ({"n_ctx": 13}, "n_positions is 12 and n_ctx 13"),
    "activation": ({"activation_function": "relu"}, 'activation_function is "relu", but maxmars'),
    "model": ({"model_type": "llama"}, 'model_type is "llama"'),
    "scale": ({"scale_attn_weights": False}, "scale_attn_weights is false"),
    "width": ({"n_inner": 100}, "n_inner is 100"),
    "head": ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention is true"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "ours": ({"maxmars": {"use_bias": 0}}, "as `maxmars export` writes them"),
    "ours unknown": ({"maxmars": {"remat": "full"}}, "as `maxmars export` writes them"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_malformed_and_unsupported(tmp_path, kind):
    changes, message = WRONG[kind]
    if not isinstance(changes, str):
        fields = hf_fields(BASE) | changes
        changes = {name: value for name, value in fields.items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        load(tmp_path, changes)


def test_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        hf.load_config(tmp_path)
    assert not hf.is_hf_directory(tmp_path)
    assert not hf.is_hf_directory(tmp_path / "missing")
    (tmp_path / "config.json").write_text('{"type": "TrainConfig"}')  # of a run
    assert not hf.is_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert hf.is_hf_directory(tmp_path)
