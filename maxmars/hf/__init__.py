"""Hugging Face's GPT-2: directories with `config.json` and safetensors, read and written.

Nothing here opens a pickle.
"""

from maxmars.hf.config_json import is_hf_directory, load_config
from maxmars.hf.layout import HFLayout
from maxmars.hf.load import load_params, open_weights
from maxmars.hf.tokenizer_files import load_hf_tokenizer, write_hf_tokenizer
from maxmars.hf.write import MAX_FILE_BYTES, Dtype, model_bytes, write_model

__all__ = [
    "MAX_FILE_BYTES",
    "Dtype",
    "HFLayout",
    "is_hf_directory",
    "load_config",
    "load_hf_tokenizer",
    "load_params",
    "model_bytes",
    "open_weights",
    "write_hf_tokenizer",
    "write_model",
]
