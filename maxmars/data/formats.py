"""The formats of token directories that can be read, and the rules that recognise them.

* Our own shards (`maxmars data prepare`), on a disk or in a bucket: `meta.json`, see `metadata`.
* nanoGPT: `train.bin` and `val.bin`, without a header. The tokenizer is the one that the config
  names, or else a `tokenizer.json` beside these files, or else GPT-2's (uint16). That last guess is
  refused where a file such as `meta.pkl` shows another tokenizer. No pickle is opened, since
  reading one runs the code in it.
* llm.c: `NAME_train.bin` and `NAME_val.bin`, or `NAME_train_000001.bin` and so on, with a header.
* build-nanogpt: `NAME_train_000001.npy` and so on, NumPy's arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Sequence

import numpy as np
from etils import epath

from maxmars.config import TokenFilesConfig
from maxmars.data.bucket import list_objects
from maxmars.data.metadata import METADATA, PREPARE, Metadata, check_finished, parse_metadata
from maxmars.data.token_files import NAME_THEM, TokenDirectory, TokenFile, TokenStream, check_size
from maxmars.data.tokenizer import GPT2Tokenizer, Vocabulary
from maxmars.distributed.files import is_remote, read_text, resolve

_LOGGER = logging.getLogger(__name__)
_HEADER = np.dtype("<i4"), 256  # llm.c's
_HEADER_BYTES = _HEADER[0].itemsize * _HEADER[1]
_NAME = re.compile(r"(?:(?P<name>.+)_)?(?P<split>train|val)(?:_(?P<number>\d+))?\.(?:bin|npy)")
_GPT2 = Vocabulary(tokenizer=GPT2Tokenizer.name, size=GPT2Tokenizer.vocab_size)
_LLAMA_3 = Vocabulary(tokenizer="llama-3", size=128_256)
# Magic number and version of llm.c's headers -> type of a token, what the ids mean.
_LLM_C = {(20240520, 1): ("<u2", _GPT2), (20240801, 7): ("<u4", _LLAMA_3)}
_TOKENIZER = "tokenizer.json"
_OF_OTHER_TOKENIZERS = ("meta.pkl", "tokenizer.model", "vocab.json")
_WINDOWS, _WINDOW = 16, 4096  # samples of each split that are checked, and tokens of a sample
_MANY, _FEW_HIGH_BYTES = 1024, 0.05  # tokens for a verdict, and share of high bytes


def open_directory(tokens: str | os.PathLike[str] | TokenFilesConfig) -> TokenDirectory:
    """A directory of tokens in any format that can be read, checked by `check_files`.

    Args:
      tokens: path of the directory, on a disk or in a bucket. A `TokenFilesConfig` may also name
        tokenizer, vocabulary size and dtype, for other programs' files.

    Raises:
      FileNotFoundError: there is no such directory, or no tokens in it, or one of our own shards is
        missing.
      ValueError: the files are damaged.
      OSError, ImportError: a bucket cannot be read; see `files.require_access`.
    """
    if not isinstance(tokens, TokenFilesConfig):
        tokens = TokenFilesConfig(path=os.fspath(tokens))
    directory = describe(tokens, read_description(tokens.path))
    check_files(directory)
    return directory


def vocab_size_of(directory: str) -> int:
    """Number of token ids of a directory in any format that can be read.

    Other programs' files without a `tokenizer.json` have GPT-2's number, unless a header says more.

    Raises:
      See `open_directory`.
    """
    config = TokenFilesConfig(path=directory)
    return describe(config, read_description(directory)).vocabulary.size


# --- the three steps of opening -------------------------------------------------------------------


def read_description(directory: str | os.PathLike[str]) -> str | None:
    """The text of a directory's `meta.json`; None for a directory on a disk without one.

    Raises:
      FileNotFoundError: the preparation is unfinished, or a directory in a bucket has none.
      OSError, ImportError: see `open_directory`.
    """
    path = resolve(directory)
    text = read_text(path / METADATA)
    if text is None:
        check_finished(path)
    if text is None and is_remote(path):
        raise FileNotFoundError(
            f"{path} has no meta.json: tokens in a bucket must be of `maxmars data prepare`; "
            "name this directory as its OUT, or copy a prepared directory there."
        )
    return text


def describe(tokens: TokenFilesConfig, text: str | None) -> TokenDirectory:
    """The directory as described by `text`, its `meta.json`, or else by file names and the config.

    Raises:
      See `open_directory`.
    """
    path = resolve(tokens.path)
    if text is None:
        return _foreign(path, tokens)
    named = {"tokenizer": tokens.tokenizer, "vocab_size": tokens.vocab_size, "dtype": tokens.dtype}
    given = " and ".join(f"{name}={value}" for name, value in named.items() if value is not None)
    if given:
        raise ValueError(
            f"{given} is set for {path}, whose meta.json says what its tokens are; leave it out."
        )
    metadata = parse_metadata(text, path / METADATA)
    dtype = np.dtype(metadata.dtype).newbyteorder("<")  # also on a big-endian machine
    return TokenDirectory(
        path=path,
        files=tuple(
            TokenFile(
                path=path / shard.file,
                split=name,
                num_bytes=shard.num_tokens * dtype.itemsize,
                sha256=shard.sha256,
            )
            for name, split in metadata.splits.items()
            for shard in split.shards
        ),
        dtype=dtype,
        vocabulary=Vocabulary(
            tokenizer=metadata.tokenizer,
            size=metadata.vocab_size,
            digest=metadata.tokenizer_digest,
            path=path,
        ),
        metadata=metadata,
    )


def check_files(directory: TokenDirectory, *, checksums: bool = True) -> None:
    """Check the files of a directory against its description; one process does so for all.

    In a bucket, it compares size and checksum of every object; on a disk, the size of every file.
    Of other programs' files it also checks samples of the tokens.

    Raises:
      See `open_directory`.
    """
    if is_remote(directory.path):
        assert directory.metadata is not None  # see `read_description`
        _check_objects(directory, directory.metadata, checksums)
        return
    if directory.is_guess:
        _refuse_other_tokenizers(directory)
    for file in directory.files:
        if directory.metadata is None and (
            file.num_bytes == 0 or (file.num_bytes - file.header_bytes) % directory.dtype.itemsize
        ):
            raise ValueError(
                f"{file.path} has {file.num_bytes} bytes, but its tokens have "
                f"{directory.dtype.itemsize} bytes each, as {directory.dtype.name}: it was cut "
                "short, so write it again; or they are of another type, so name it by --data.dtype."
            )
        check_size(file)
    if directory.metadata is None:
        _warn_of_gaps(directory.files)
        for split in directory.splits:
            _check_samples(directory.stream(split))


def _check_objects(directory: TokenDirectory, metadata: Metadata, checksums: bool) -> None:
    """Compare a bucket's metadata of the shards of a directory with `meta.json`."""
    objects = list_objects(directory.path)
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    if checksums and any(shard.crc32c is None for shard in shards):
        _LOGGER.warning(
            "%s/meta.json holds no CRC32C, as `maxmars data prepare` records with the extra gcs: "
            "the shards are compared by size alone; `maxmars data inspect` reads and compares them",
            directory.path,
        )
    for file, shard in zip(directory.files, shards, strict=True):
        stored = objects.get(shard.file)
        if stored is None:
            raise FileNotFoundError(f"the token shard {file.path} is missing; upload it again.")
        recorded: dict[str, int | str] = {"size": file.num_bytes}
        if checksums and shard.crc32c is not None:
            recorded["crc32c"] = shard.crc32c
        for field, value in recorded.items():
            if str(stored.get(field)) != str(value):
                raise ValueError(
                    f"the token shard {file.path} is not the one that was prepared: its {field} "
                    f"is {stored.get(field)}, but meta.json says {value}; upload it again."
                )


def _refuse_other_tokenizers(directory: TokenDirectory) -> None:
    """Refuse nanoGPT's files if a file beside them shows that their tokens are not GPT-2's."""
    other = next((n for n in _OF_OTHER_TOKENIZERS if (directory.path / n).exists()), None)
    if other is not None:
        path = directory.path
        raise ValueError(
            f"{path / other} says that the files hold the ids of a tokenizer of its own, "
            "as nanoGPT's of characters, and no pickle is ever opened. Prepare the text anew "
            f"(`maxmars data prepare {path / 'input.txt'} OUT --tokenizer byte`), or put "
            f"the {_TOKENIZER} of these ids beside them (five lines make one of characters: "
            "tools/examples/your_own_text.md), or train on the bare ids by --data.vocab-size N "
            "--model.vocab-size N; --data.tokenizer names a tokenizer elsewhere."
        )


def _warn_of_gaps(files: Sequence[TokenFile]) -> None:
    """Warn if a number is missing in the numbered files of a split."""

    def number_of(file: TokenFile) -> int:
        match = _NAME.fullmatch(file.path.name)
        return int(match["number"] or 0) if match else 0

    for before, after in itertools.pairwise(files):
        number = number_of(before) + 1
        if before.split == after.split and number < number_of(after):
            stem, _, digits = after.path.stem.rpartition("_")
            _LOGGER.warning(
                "%s lacks %s, before %s: the split is read without it; copy it there",
                after.path.parent,
                f"{stem}_{number:0{len(digits)}d}{after.path.suffix}",
                after.path.name,
            )


def _check_samples(stream: TokenStream) -> None:
    """Check samples of the tokens: ids within the vocabulary, and plausible where GPT-2 is a guess.

    Raises:
      ValueError: a sample fails the check.
    """
    length = min(_WINDOW, stream.num_tokens)
    # From even tokens, so that the high halves of 32-bit integers are every second number.
    starts = np.linspace(0, stream.num_tokens - length, _WINDOWS).astype(np.int64) // 2 * 2
    samples = stream.read_windows(np.unique(starts), length)
    if not stream.directory.is_guess or length < _MANY:
        return
    ids = samples.astype("<u2")
    if not ids[:, 1::2].any():
        why = "every second one is 0, as in integers of 32 or 64 bits"
    elif np.mean(ids.view(np.uint8) > 127) < _FEW_HIGH_BYTES:  # GPT-2: a third of all low bytes
        why = "they are small, as of bytes or characters"
    else:
        return
    raise ValueError(
        f"the numbers in {stream.directory.path} do not look like GPT-2's tokens of 2 bytes: "
        f"{why}; {NAME_THEM} (if they are GPT-2's, by --data.tokenizer gpt2)."
    )


# --- other programs' files ------------------------------------------------------------------------


def _foreign(path: epath.Path, tokens: TokenFilesConfig) -> TokenDirectory:
    """A directory of nanoGPT, llm.c or build-nanogpt."""
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise FileNotFoundError(f"the token directory {path} {what}; {PREPARE}.")
    matches = [(file, m) for file in sorted(path.iterdir()) if (m := _NAME.fullmatch(file.name))]
    bins = [(file, m) for file, m in matches if file.suffix == ".bin"]
    plain = [(file, m) for file, m in bins if m["name"] is m["number"] is None]
    # The header decides between llm.c and nanoGPT, whose files may have the same names.
    if any(_read_header(file)[0] in {magic for magic, _ in _LLM_C} for file, _ in bins):
        files, format_of = bins, _llm_c
        plain = []
    elif plain:
        # The user's options win over a `tokenizer.json` beside the files, and that over the guess.
        if tokens.tokenizer is tokens.vocab_size is None and (path / _TOKENIZER).is_file():
            tokens = dataclasses.replace(tokens, tokenizer=str(path))
        files, format_of = plain, _nanogpt
    else:
        files, format_of = [(file, m) for file, m in matches if file.suffix == ".npy"], _numpy
    if not files:
        raise FileNotFoundError(
            f"{path} holds no tokens that can be read. What can be: a directory made by "
            "`maxmars data prepare` (meta.json), nanoGPT's "
            "train.bin and val.bin, llm.c's NAME_train_*.bin and NAME_val_*.bin, and build-"
            "nanogpt's NAME_train_*.npy and NAME_val_*.npy. Run `maxmars data prepare SOURCE "
            "DIRECTORY` to make tokens from text; a function of your own reads anything else, such "
            "as TFDS's records of tokens (from_tfds in tools/examples/own_data.py)."
        )
    if not plain and tokens.dtype is not None:  # headers of llm.c and NumPy name the dtype
        raise ValueError(
            f"dtype={tokens.dtype} is set for {path}, whose files say the type of their tokens; "
            "leave it out."
        )
    names = sorted({m["name"] or "" for _, m in files})
    if len(names) > 1:
        raise ValueError(
            f"{path} holds the files of several data sets ({', '.join(names)}); move each to a "
            "directory of its own."
        )
    # By number, not by name: without leading zeros, 10 would come before 2.
    files.sort(key=lambda item: (item[1]["split"], int(item[1]["number"] or 0)))
    opened = [format_of(file, m["split"]) for file, m in files]
    kinds = {(dtype, vocabulary): file.path for file, dtype, vocabulary in opened}
    if len(kinds) > 1:
        paths = " and ".join(map(str, kinds.values()))
        raise ValueError(
            f"{paths} hold tokens of different tokenizers or types; keep those of one."
        )
    ((dtype, vocabulary),) = kinds
    is_named = not (tokens.tokenizer is tokens.vocab_size is None)
    if is_named:
        vocabulary = Vocabulary.named(tokens.tokenizer or "unknown", tokens.vocab_size)
    if plain:
        dtype = np.dtype(tokens.dtype or ("u2" if vocabulary.size <= 1 << 16 else "u4"))
    return TokenDirectory(
        path=path,
        files=tuple(file for file, _, _ in opened),
        dtype=dtype.newbyteorder("<"),
        vocabulary=vocabulary,
        is_guess=bool(plain) and not is_named,
    )


def _nanogpt(path: epath.Path, split: str) -> tuple[TokenFile, np.dtype, Vocabulary]:
    """A file of nanoGPT, which has no header; dtype and vocabulary are the guess."""
    file = TokenFile(path=path, split=split, num_bytes=os.stat(path).st_size)
    return file, np.dtype("<u2"), _GPT2


def _llm_c(path: epath.Path, split: str) -> tuple[TokenFile, np.dtype, Vocabulary]:
    magic, version, count = _read_header(path)
    if (magic, version) not in _LLM_C:
        known = " or ".join(f"{magic} version {version}" for magic, version in _LLM_C)
        raise ValueError(
            f"{path} is no token file of llm.c: its header begins with {magic} version {version}, "
            f"not {known}."
        )
    name, vocabulary = _LLM_C[magic, version]
    dtype = np.dtype(name)
    num_bytes = _HEADER_BYTES + count * dtype.itemsize
    file = TokenFile(path=path, split=split, num_bytes=num_bytes, header_bytes=_HEADER_BYTES)
    return file, dtype, vocabulary


def _numpy(path: epath.Path, split: str) -> tuple[TokenFile, np.dtype, Vocabulary]:
    try:
        array = np.load(path, mmap_mode="r")  # np.load refuses pickles by default
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is no array of NumPy that can be read ({error}); write it again with np.save."
        ) from error
    is_ours = array.dtype.kind in "iu" and array.dtype == array.dtype.newbyteorder("<")
    if array.ndim != 1 or not is_ours:
        raise ValueError(
            f"{path} is an array of {array.dtype} and the shape {list(array.shape)}, not of "
            "little-endian integers in one dimension; write it again, as uint16 for GPT-2's tokens."
        )
    num_bytes = array.offset + array.size * array.itemsize
    file = TokenFile(path=path, split=split, num_bytes=num_bytes, header_bytes=array.offset)
    return file, array.dtype, _GPT2


def _read_header(path: epath.Path) -> tuple[int, int, int]:
    """Magic number, version and token count of an llm.c file; zeros if it is too short."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0")[:12], _HEADER[0]).tolist()
    return (magic, version, count) if len(start) == _HEADER_BYTES else (0, 0, 0)
