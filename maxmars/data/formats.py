"""The formats of token directories that can be read, and how they are told apart.

* Our own shards (`maxmars data prepare`), on a disk or in a bucket: `meta.json`, see `sources`.
* TFDS in its own layout (`dataset_info.json`), see `tfds_stream`.
* nanoGPT: `train.bin` and `val.bin`, uint16 without a header. No tokenizer is recorded; GPT-2's is
  assumed. A `meta.pkl` is left alone: reading a pickle runs what is in it.
* llm.c: `NAME_train.bin` and `NAME_val.bin`, or `NAME_train_000001.bin` and so on, with a header.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import numpy as np

from maxmars.config.checks import read_as
from maxmars.config.errors import about
from maxmars.data.bucket import list_objects
from maxmars.data.sources import (
    PREPARE,
    TFDS_FORMAT,
    Metadata,
    check_finished,
    parse_metadata,
)
from maxmars.data.tfds_stream import TfdsTokens
from maxmars.data.token_files import (
    TokenFile,
    TokenFiles,
    TokenShards,
    TokenStream,
    check_size,
    shards_of,
)
from maxmars.data.tokenizer import GPT2Tokenizer
from maxmars.distributed.files import Workdir, is_remote, read_text, require_access, resolve

_LOGGER = logging.getLogger(__name__)
_HEADER = np.dtype("<i4"), 256  # llm.c's
_HEADER_BYTES = _HEADER[0].itemsize * _HEADER[1]
_LLM_C_NAME = re.compile(r"(.+)_(train|val)(?:_(\d+))?\.bin")
# Magic number and version of llm.c's headers -> type of a token, tokenizer, its vocabulary.
_LLM_C = {
    (20240520, 1): ("uint16", GPT2Tokenizer.name, GPT2Tokenizer.vocab_size),
    (20240801, 7): ("uint32", "llama-3", 128_256),
}


def open_split(directory: str | os.PathLike[str], split: str) -> TokenStream:
    """The tokens of a split, `train` or `val`, of a directory in any format that can be read.

    Raises:
      FileNotFoundError: there is no such directory, nothing in it that can be read, or a file of
        our own shards is missing.
      ValueError: the files are damaged; `NoSuchSplitError` where there is no such split.
      OSError, ImportError: a bucket cannot be read; see `require_access`.
    """
    return open_examined(directory, split, examine(directory))


def examine(directory: str | os.PathLike[str], *, checksums: bool = True) -> str | None:
    """The text of a directory's `meta.json`; None on a disk where there is none.

    Looks at the size of every shard that it names, and in a bucket also compares the checksums that
    the bucket keeps. One process does it for all of a run.

    Args:
      directory: on a disk or in a bucket.
      checksums: compare the checksums of a bucket.

    Raises:
      See `open_split`.
    """
    directory = resolve(directory)
    require_access(directory)
    meta = read_text(directory / "meta.json")
    if meta is None:
        check_finished(directory)
    if meta is None and is_remote(directory):
        raise FileNotFoundError(
            f"{directory} has no meta.json: tokens in a bucket must be of `maxmars data prepare`; "
            "name this directory as its OUT, or copy a prepared directory there."
        )
    if meta is not None and not _is_tfds(meta, directory / "meta.json"):
        metadata = parse_metadata(meta, directory / "meta.json")
        if is_remote(directory):
            _check_objects(directory, metadata, checksums)
        else:
            for files in shards_of(directory, metadata).values():
                for file in files:
                    check_size(file)
    return meta


def open_examined(directory: str | os.PathLike[str], split: str, meta: str | None) -> TokenStream:
    """The tokens of a split of a directory for which `examine`, in any process, gave `meta`.

    Raises:
      See `open_split`.
    """
    directory = resolve(directory)
    if meta is not None and not _is_tfds(meta, directory / "meta.json"):
        return TokenShards(directory, split, parse_metadata(meta, directory / "meta.json"))
    directory = Path(directory)
    if meta is not None or (directory / "dataset_info.json").is_file():
        return TfdsTokens(directory, split)
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"the token directory {directory} {what}; {PREPARE}.")
    llm_c = [path for path in sorted(directory.glob("*.bin")) if _LLM_C_NAME.fullmatch(path.name)]
    if any(_read_header(path)[0] in {magic for magic, _ in _LLM_C} for path in llm_c):
        return _open_llm_c(directory, split, llm_c)
    if (directory / "train.bin").is_file() or (directory / "val.bin").is_file():
        return _open_nanogpt(directory, split)
    raise FileNotFoundError(
        f"{directory} holds no tokens that can be read. What can be: a directory made by `maxmars "
        "data prepare` (meta.json), a TFDS dataset with a feature `tokens` in ArrayRecord files "
        "(its version's directory, with dataset_info.json), nanoGPT's train.bin and val.bin, and "
        "llm.c's NAME_train_*.bin and NAME_val_*.bin. Run `maxmars data prepare SOURCE DIRECTORY` "
        "to make tokens from text."
    )


def _is_tfds(meta: str, path: Workdir) -> bool:
    with about(path):
        return read_as(dict, json.loads(meta)).get("format") == TFDS_FORMAT


def _check_objects(directory: Workdir, metadata: Metadata, checksums: bool) -> None:
    """Compare what a bucket says of the shards of a directory with `meta.json`.

    The CRC32C is that of the content; only where `meta.json` has none does the generation decide,
    which is another one after each upload.
    """
    objects, files = list_objects(directory), shards_of(directory, metadata)
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    if checksums and any(shard.crc32c is shard.generation is None for shard in shards):
        _LOGGER.warning(
            "%s/meta.json holds no CRC32C, as `maxmars data prepare` records with the extra gcs: "
            "the shards are compared by size alone; `maxmars data inspect` reads and compares them",
            directory,
        )
    for name, split in metadata.splits.items():
        for file, shard in zip(files[name], split.shards, strict=True):
            found = objects.get(shard.file)
            if found is None:
                raise FileNotFoundError(f"the token shard {file.path} is missing; upload it again.")
            told: dict[str, int | str] = {"size": file.num_bytes}
            if checksums and shard.crc32c is not None:
                told["crc32c"] = shard.crc32c
            elif checksums and shard.generation is not None:
                told["generation"] = shard.generation
            for field, recorded in told.items():
                if str(found.get(field)) != str(recorded):
                    raise ValueError(
                        f"the token shard {file.path} is not the one that was prepared: its "
                        f"{field} is {found.get(field)}, but meta.json says {recorded}; upload it "
                        "again."
                    )


def _open_nanogpt(directory: Path, split: str) -> TokenFiles:
    """One split of a nanoGPT directory: `train.bin` or `val.bin`, taken to be GPT-2's tokens."""
    splits = {}
    for name in ("train", "val"):
        path = directory / f"{name}.bin"
        if not path.is_file():
            continue
        num_bytes = path.stat().st_size
        if num_bytes == 0 or num_bytes % 2:
            raise ValueError(
                f"{path} has {num_bytes} bytes, but nanoGPT's tokens have 2 bytes each: it was cut "
                "short; write it again."
            )
        splits[name] = [TokenFile(path=path, num_bytes=num_bytes, split=name)]
    return TokenFiles(
        directory,
        split,
        splits,
        dtype="uint16",
        tokenizer=GPT2Tokenizer.name,
        tokenizer_digest=None,
        vocab_size=GPT2Tokenizer.vocab_size,
    )


def _open_llm_c(directory: Path, split: str, paths: list[Path]) -> TokenFiles:
    """One split of a directory of llm.c's files: GPT-2's tokens (uint16) or Llama 3's (uint32)."""
    matches = [(path, m) for path in paths if (m := _LLM_C_NAME.fullmatch(path.name))]
    names = sorted({m[1] for _, m in matches})
    if len(names) > 1:
        raise ValueError(
            f"{directory} holds the files of several data sets ({', '.join(names)}); move each to "
            "a directory of its own."
        )
    splits: dict[str, list[TokenFile]] = {}
    kinds: dict[tuple[int, int], Path] = {}
    for path, m in sorted(matches, key=lambda match: (match[1][2], int(match[1][3] or 0))):
        magic, version, count = _read_header(path)
        if (magic, version) not in _LLM_C:
            known = " or ".join(f"{magic} version {version}" for magic, version in _LLM_C)
            raise ValueError(
                f"{path} is no token file of llm.c: its header begins with {magic} version "
                f"{version}, not {known}."
            )
        kinds[magic, version] = path
        num_bytes = _HEADER_BYTES + count * np.dtype(_LLM_C[magic, version][0]).itemsize
        file = TokenFile(path=path, num_bytes=num_bytes, header_bytes=_HEADER_BYTES, split=m[2])
        check_size(file)
        splits.setdefault(m[2], []).append(file)
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(map(str, kinds.values()))} hold different tokenizers.")
    dtype, tokenizer, vocab_size = _LLM_C[next(iter(kinds))]
    return TokenFiles(
        directory,
        split,
        splits,
        dtype=dtype,
        tokenizer=tokenizer,
        tokenizer_digest=None,
        vocab_size=vocab_size,
    )


def _read_header(path: Path) -> tuple[int, int, int]:
    """Magic number, version and token count of an llm.c file; zeros of one that is too short."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0")[:12], _HEADER[0]).tolist()
    return (magic, version, count) if len(start) == _HEADER_BYTES else (0, 0, 0)
