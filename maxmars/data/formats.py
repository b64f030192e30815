"""The formats of token directories that can be read, and how they are told apart.

* Our own shards (`maxmars data prepare`): `meta.json`, see `sources`.
* TFDS in its own layout (`dataset_info.json`), see `tfds_stream`.
* nanoGPT: `train.bin` and `val.bin`, uint16 without a header. No tokenizer is recorded; GPT-2's is
  assumed.
* llm.c: `NAME_train.bin` and `NAME_val.bin`, or `NAME_train_000001.bin` and so on, with a header.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

import numpy as np

from maxmars.data.sources import FORMAT, TFDS_FORMAT, read_metadata
from maxmars.data.streams import TokenFile, TokenFiles, TokenShards, TokenStream
from maxmars.data.tfds_stream import TfdsTokens
from maxmars.data.tokenizer import GPT2Tokenizer, JsonTokenizer

Format = Literal["shards", "tfds", "nanogpt", "llm.c"]

_HEADER = np.dtype("<i4"), 256  # llm.c's
_HEADER_BYTES = _HEADER[0].itemsize * _HEADER[1]
# Magic number and version of llm.c's headers -> type of a token, tokenizer, its vocabulary.
_LLM_C = {
    (20240520, 1): ("uint16", GPT2Tokenizer.name, GPT2Tokenizer.vocab_size),
    (20240801, 7): ("uint32", "llama-3", 128_256),
}


def nanogpt_files(directory: Path, split: str) -> TokenFiles:
    """One split of a nanoGPT directory: `train.bin` or `val.bin`, uint16 and no header.

    nanoGPT does not write which tokenizer it was; it is taken to be GPT-2's. A `meta.pkl` is left
    alone: reading a pickle runs what is in it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it does not hold whole tokens.
    """
    path = directory / f"{split}.bin"
    if not path.is_file():
        raise FileNotFoundError(f"the nanoGPT directory {directory} has no {path.name}.")
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % 2:
        raise ValueError(
            f"{path} has {num_bytes} bytes, but nanoGPT's tokens have 2 bytes each: it was cut "
            "short; write it again."
        )
    return TokenFiles(
        directory,
        split,
        [TokenFile(path=path, num_tokens=num_bytes // 2)],
        dtype="uint16",
        tokenizer=GPT2Tokenizer.name,
        tokenizer_digest=None,
        vocab_size=GPT2Tokenizer.vocab_size,
    )


def llm_c_paths(directory: Path, split: str) -> list[Path]:
    """llm.c's files of a split in order: `NAME_train.bin`, or `NAME_train_000001.bin` and so on.

    Raises:
      ValueError: they have several NAMEs.
    """
    pattern = re.compile(rf"(.+)_{split}(_\d+)?\.bin")
    matches = [m for path in directory.glob("*.bin") if (m := pattern.fullmatch(path.name))]
    names = sorted({m[1] for m in matches})
    if len(names) > 1:
        raise ValueError(
            f"{directory} holds the {split} files of several data sets ({', '.join(names)}); move "
            "each to a directory of its own."
        )
    numbered = sorted(matches, key=lambda m: (int((m[2] or "_0")[1:]), m[0]))
    return [directory / m[0] for m in numbered]


def is_llm_c(path: Path) -> bool:
    """Whether a file begins with a header of llm.c."""
    header = _read_header(path)
    return header is not None and header[0] in {magic for magic, _ in _LLM_C}


def _read_header(path: Path) -> tuple[int, int, int] | None:
    """Magic number, version and token count; None of a file that is too short for a header."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    if len(start) < _HEADER_BYTES:
        return None
    magic, version, count = np.frombuffer(start, _HEADER[0])[:3].tolist()
    return magic, version, count


def llm_c_files(directory: Path, split: str) -> TokenFiles:
    """One split of a directory of llm.c's files: GPT-2's tokens (uint16) or Llama 3's (uint32).

    Raises:
      FileNotFoundError: there is no file of this split.
      ValueError: a file is damaged, or of another kind than the first.
    """
    paths = llm_c_paths(directory, split)
    if not paths:
        raise FileNotFoundError(f"{directory} has no file *_{split}.bin or *_{split}_*.bin.")
    files, kinds = [], {}
    for path in paths:
        header = _read_header(path)
        if header is None or header[:2] not in _LLM_C:
            known = " or ".join(f"{magic} version {version}" for magic, version in _LLM_C)
            found = (
                "shorter than a header" if header is None else f"{header[0]} version {header[1]}"
            )
            raise ValueError(f"{path} is no token file of llm.c: {found}, not {known}.")
        kinds[header[:2]] = path
        files.append(TokenFile(path=path, num_tokens=header[2], header_bytes=_HEADER_BYTES))
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(map(str, kinds.values()))} hold different tokenizers.")
    dtype, tokenizer, vocab_size = _LLM_C[next(iter(kinds))]
    return TokenFiles(
        directory,
        split,
        files,
        dtype=dtype,
        tokenizer=tokenizer,
        tokenizer_digest=None,
        vocab_size=vocab_size,
    )


def format_of(directory: Path) -> Format:
    """The format of a directory of tokens, from the names of its files and their headers.

    Raises:
      FileNotFoundError: there is no such directory, or nothing in it that can be read.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"the token directory {directory} does not exist; run `maxmars data prepare SOURCE "
            "DIRECTORY` to make one."
        )
    if (directory / "meta.json").is_file():
        return "tfds" if _format_in_metadata(directory) == TFDS_FORMAT else "shards"
    if (directory / "dataset_info.json").is_file():
        return "tfds"
    if any(is_llm_c(path) for split in ("train", "val") for path in llm_c_paths(directory, split)):
        return "llm.c"
    if (directory / "train.bin").is_file() or (directory / "val.bin").is_file():
        return "nanogpt"
    raise FileNotFoundError(
        f"{directory} holds no tokens that can be read. What can be: a directory made by `maxmars "
        "data prepare` (meta.json), a TFDS dataset with a feature `tokens` in ArrayRecord files "
        "(its version's directory, with dataset_info.json), nanoGPT's train.bin and val.bin, and "
        "llm.c's NAME_train_*.bin and NAME_val_*.bin. Run `maxmars data prepare SOURCE DIRECTORY` "
        "to make tokens from text."
    )


def _format_in_metadata(directory: Path) -> str:
    try:
        return json.loads((directory / "meta.json").read_text())["format"]
    except (ValueError, KeyError, TypeError):
        return FORMAT  # whose reader says what is wrong with it


def open_split(directory: str | Path, split: str) -> TokenStream:
    """The tokens of a split, `train` or `val`, of a directory in any format that can be read.

    Raises:
      FileNotFoundError: there is no such directory, nothing in it that can be read, or a file of
        the split is missing.
      ValueError: the files are damaged, or there is no such split.
    """
    directory = Path(directory)
    match format_of(directory):
        case "shards":
            return TokenShards(directory, split)
        case "tfds":
            return TfdsTokens(directory, split)
        case "nanogpt":
            return nanogpt_files(directory, split)
        case "llm.c":
            return llm_c_files(directory, split)


_BESIDE_SHARDS = ("meta.json", JsonTokenizer.name)


def files_of(directory: Path) -> dict[str, str | None]:
    """The files that reading a directory of tokens takes: name -> SHA-256, where it is recorded.

    Raises:
      FileNotFoundError: there is no such directory, or nothing in it that can be read.
      ValueError: its `meta.json` is damaged.
    """
    match format_of(directory):
        case "shards":
            splits = read_metadata(directory).splits.values()
            shards = {s.file: s.sha256 for split in splits for s in split.shards}
            beside = [name for name in _BESIDE_SHARDS if (directory / name).is_file()]
            return {**dict.fromkeys(beside), **shards}
        case "tfds":
            return {path.name: None for path in sorted(directory.iterdir()) if path.is_file()}
        case "nanogpt":
            names = ("train.bin", "val.bin")
            return {name: None for name in names if (directory / name).is_file()}
        case "llm.c":
            paths = [p for split in ("train", "val") for p in llm_c_paths(directory, split)]
            return {path.name: None for path in paths}
