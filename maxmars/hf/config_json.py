"""`config.json` of a Hugging Face GPT-2, and our model configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxmars.config import GPT2Config

CONFIG = "config.json"
OURS = "maxmars"
"""Key in config.json of what Hugging Face's GPT-2 does not have: fields of GPT2Config."""
OUR_FIELDS = ("use_bias", "vocab_pad_multiple", "document_end_id")
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "scale_attn_by_inverse_layer_idx": False}
# What the model must be like: values other than these change its logits.
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": _GELU_TANH,
    "scale_attn_weights": (True,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "quantization_config": (None,),
}


def is_hf_directory(path: str | Path) -> bool:
    """Whether a local directory looks like a Hugging Face model: it has weights, in safetensors or
    another format, or a `config.json` that names a `model_type`."""
    directory = Path(path)
    if any(
        next(directory.glob(f"{name}*"), None) for name in ("model.safetensors", "pytorch_model")
    ):
        return True
    try:
        return "model_type" in json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def load_config(directory: str | Path) -> GPT2Config:
    """The model that the `config.json` of a Hugging Face directory describes.

    Matrix products are in float32, as Hugging Face computes by default. `use_bias`,
    `vocab_pad_multiple` and `document_end_id` are those of an exported model of ours.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: it is malformed, or describes a model that `maxmars.model.GPT2` is not.
    """
    path = Path(directory) / CONFIG
    fields = read_json_object(path)
    for name, allowed in _FIXED.items():
        value = fields.get(name, allowed[0])
        if value not in allowed:
            wanted = " or ".join(map(json.dumps, allowed))
            raise ValueError(
                f"{path}: {name} is {json.dumps(value)}, but maxmars reads models with {wanted} "
                "only."
            )
    embed_dim, max_seq_len = _size(path, fields, "n_embd"), _context(path, fields)
    if fields.get("n_inner") not in (None, 4 * embed_dim):
        raise ValueError(
            f"{path}: n_inner is {fields['n_inner']!r}, but maxmars reads models whose MLP is four "
            f"times as wide as n_embd ({4 * embed_dim}) only."
        )
    try:
        return GPT2Config(
            num_layers=_size(path, fields, "n_layer"),
            num_heads=_size(path, fields, "n_head"),
            embed_dim=embed_dim,
            max_seq_len=max_seq_len,
            vocab_size=_size(path, fields, "vocab_size"),
            layer_norm_epsilon=_typed(path, fields, "layer_norm_epsilon", float),
            scale_attn_by_inverse_layer_idx=_typed(
                path, fields, "scale_attn_by_inverse_layer_idx", bool
            ),
            compute_dtype="float32",
            **_our_fields(path, fields),
        )
    except ValueError as error:
        raise ValueError(f"{path} describes no GPT-2: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON object in a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is no JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}, which a model needs there.")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds {type(fields).__name__}.")
    return fields


def write_json_object(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON object into a file."""
    path.write_text(json.dumps(fields, indent=2) + "\n")


def config_fields(config: GPT2Config, *, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """What `config.json` says of a model of ours; `load_config` reads it back.

    Args:
      config: the model.
      dtype: type of its weights in the files, such as float32.
      end_of_text: id of the token that ends a document.
    """
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": _GELU_TANH[0],
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_embd": config.embed_dim,
        "n_inner": None,
        "n_positions": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        **dropout,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        OURS: {name: getattr(config, name) for name in OUR_FIELDS},
    }


def _context(path: Path, fields: dict[str, Any]) -> int:
    """`n_positions`; old files also, or only, name it `n_ctx`."""
    names = [name for name in ("n_positions", "n_ctx") if name in fields] or ["n_positions"]
    sizes = {_size(path, fields, name) for name in names}
    if len(sizes) > 1:
        raise ValueError(
            f"{path}: n_positions is {fields['n_positions']} and n_ctx {fields['n_ctx']}; "
            "the context must be the same in both."
        )
    return sizes.pop()


def _size(path: Path, fields: dict[str, Any], name: str) -> int:
    value = _typed(path, fields, name, int)
    if value < 1:
        raise ValueError(f"{path}: {name} is {value}; it must be greater than zero.")
    return value


def _typed(path: Path, fields: dict[str, Any], name: str, kind: type) -> Any:
    if name not in fields and name not in _DEFAULTS:
        raise ValueError(f"{path} has no {name}; it is no config.json of a GPT-2.")
    value = fields.get(name, _DEFAULTS.get(name))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(
            f"{path}: {name} is {json.dumps(value)}; it must be of type {kind.__name__}."
        )
    return value


def _our_fields(path: Path, fields: dict[str, Any]) -> dict[str, Any]:
    ours = fields.get(OURS, {})
    kinds = {
        "use_bias": (bool,),
        "vocab_pad_multiple": (int,),
        "document_end_id": (int, type(None)),
    }
    if not isinstance(ours, dict) or any(
        type(value) not in kinds.get(name, ()) for name, value in ours.items()
    ):
        raise ValueError(
            f"{path}: {OURS} is {json.dumps(ours)}; it may hold {', '.join(OUR_FIELDS)} of the "
            "model, as `maxmars export` writes them."
        )
    return ours
