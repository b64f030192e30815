"""The files of GPT-2's vocabulary: where tiktoken looks for them, and their download."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
import uuid
from pathlib import Path

_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_FILES = ("vocab.bpe", "encoder.json")
_TIMEOUT_S = 20.0


def is_on_disk() -> bool:
    """Whether the gpt2 tokenizer can be made without network."""
    return all((_cache() / cached_name(file)).exists() for file in _FILES)


def download() -> None:
    """Put the files where tiktoken looks for them; its own download has no timeout."""
    for file in _FILES:
        path = _cache() / cached_name(file)
        if not path.exists():
            with urllib.request.urlopen(_URL + file, timeout=_TIMEOUT_S) as response:
                content = response.read()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
            temporary.write_bytes(content)
            temporary.rename(path)


def _cache() -> Path:
    """The directory that tiktoken uses."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if os.environ.get(variable):
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def cached_name(file: str) -> str:
    """Under which tiktoken caches a file."""
    return hashlib.sha1((_URL + file).encode()).hexdigest()


def missing(error: Exception) -> str:
    """What to say where the files are not on disk and `download` has failed."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR")
    place = f"in TIKTOKEN_CACHE_DIR={cache}" if cache else "on disk (TIKTOKEN_CACHE_DIR is not set)"
    names = " and ".join(f"{file} as {cached_name(file)}" for file in _FILES)
    return (
        f"the vocabulary of the gpt2 tokenizer is not {place} and could not be downloaded "
        f"({type(error).__name__}: {error}). Without network, download {names} from {_URL} on "
        "another machine, copy both into a directory here and set TIKTOKEN_CACHE_DIR to it."
    )
