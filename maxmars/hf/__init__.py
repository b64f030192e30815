"""Hugging Face's GPT-2: directories with `config.json` and safetensors, read and written.

Nothing here opens a pickle.
"""

from maxmars.hf.config_json import is_hf_directory, load_config
from maxmars.hf.load import load_params
from maxmars.hf.tokenizer_files import load_hf_tokenizer

__all__ = ["is_hf_directory", "load_config", "load_hf_tokenizer", "load_params"]
