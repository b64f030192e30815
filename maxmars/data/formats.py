"""The formats of token directories that can be read, and how they are told apart.

* Our own shards (`maxmars data prepare`), on a disk or in a bucket: `meta.json`, see `metadata`.
* nanoGPT: `train.bin` and `val.bin`, without a header. Their tokenizer is the one that the config
  names, or a `tokenizer.json` beside them, or else GPT-2's with its uint16. They are refused where
  a file beside them says that they are not GPT-2's, such as `meta.pkl`, which is left alone:
  reading a pickle runs what is in it.
* llm.c: `NAME_train.bin` and `NAME_val.bin`, or `NAME_train_000001.bin` and so on, with a header.
* build-nanogpt: `NAME_train_000001.npy` and so on, NumPy's arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxmars.config import TokenDirectory
from maxmars.data.bucket import list_objects
from maxmars.data.metadata import (
    METADATA,
    PLAN,
    PREPARE,
    Metadata,
    NoSuchSplitError,
    check_finished,
    parse_metadata,
    read_metadata,
)
from maxmars.data.token_files import (
    NAME_THEM,
    TokenFile,
    TokenShards,
    TokenStream,
    Vocabulary,
    check_size,
    shards_of,
)
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, load
from maxmars.distributed.files import Workdir, is_remote, read_text, resolve

_LOGGER = logging.getLogger(__name__)
_HEADER = np.dtype("<i4"), 256  # llm.c's
_HEADER_BYTES = _HEADER[0].itemsize * _HEADER[1]
_NAME = re.compile(r"(?:(?P<name>.+)_)?(?P<split>train|val)(?:_(?P<number>\d+))?\.(?:bin|npy)")
_GPT2 = Vocabulary(tokenizer=GPT2Tokenizer.name, size=GPT2Tokenizer.vocab_size)
_LLAMA_3 = Vocabulary(tokenizer="llama-3", size=128_256)
# Magic number and version of llm.c's headers -> type of a token, what the ids mean.
_LLM_C = {(20240520, 1): ("uint16", _GPT2), (20240801, 7): ("uint32", _LLAMA_3)}
_TOKENIZER = "tokenizer.json"
_OF_OTHER_TOKENIZERS = ("meta.pkl", "tokenizer.model", "vocab.json")
_WINDOWS, _WINDOW = 16, 4096  # tokens that are looked at before anything is done with a directory
_MANY, _FEW_HIGH_BYTES = 1024, 0.05


def open_split(directory: str | os.PathLike[str] | TokenDirectory, split: str) -> TokenStream:
    """The tokens of a split, `train` or `val`, of a directory in any format that can be read.

    A `TokenDirectory` also says what its files do not.

    Raises:
      FileNotFoundError: there is no such directory, nothing in it that can be read, or a file of
        our own shards is missing.
      ValueError: the files are damaged; `NoSuchSplitError` where there is no such split.
      OSError, ImportError: a bucket cannot be read; see `files.require_access`.
    """
    if not isinstance(directory, TokenDirectory):
        directory = TokenDirectory(path=os.fspath(directory))
    return open_examined(directory, split, examine(directory.path))


def vocab_size_of(directory: str) -> int:
    """Number of token ids of a directory in any format that can be read, without its tokens.

    It is GPT-2's where another program's files, and a `tokenizer.json` beside them, do not say it.

    Raises:
      See `read_metadata`.
    """
    place = resolve(directory)
    if (
        is_remote(place)
        or any((place / name).exists() for name in (METADATA, PLAN))
        or not place.is_dir()
    ):
        return read_metadata(directory).vocab_size
    headers = (_read_header(Path(path)) for path in sorted(place.glob("*.bin")))
    told = (_LLM_C[magic, version] for magic, version, _ in headers if (magic, version) in _LLM_C)
    if (found := next(told, None)) is not None:
        return found[1].size
    has_tokenizer = (place / _TOKENIZER).is_file() and (place / "train.bin").is_file()
    return load(place).vocab_size if has_tokenizer else _GPT2.size


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
    meta = read_text(directory / "meta.json")
    if meta is None:
        check_finished(directory)
    if meta is None and is_remote(directory):
        raise FileNotFoundError(
            f"{directory} has no meta.json: tokens in a bucket must be of `maxmars data prepare`; "
            "name this directory as its OUT, or copy a prepared directory there."
        )
    metadata = None if meta is None else parse_metadata(meta, directory / "meta.json")
    if metadata is not None and is_remote(directory):
        _check_objects(directory, metadata, checksums)
    elif metadata is not None:
        for files in shards_of(directory, metadata).values():
            for file in files:
                check_size(file)
    return meta


def open_examined(tokens: TokenDirectory, split: str, meta: str | None) -> TokenStream:
    """The tokens of a split of a directory for which `examine`, in any process, gave `meta`.

    Raises:
      See `open_split`.
    """
    directory = resolve(tokens.path)
    named = {"tokenizer": tokens.tokenizer, "vocab_size": tokens.vocab_size, "dtype": tokens.dtype}
    given = " and ".join(f"{name}={value}" for name, value in named.items() if value is not None)
    if meta is not None and given:
        raise ValueError(
            f"{given} is set for {directory}, whose meta.json says what its tokens are; leave it "
            "out."
        )
    metadata = None if meta is None else parse_metadata(meta, directory / "meta.json")
    if metadata is not None:
        return TokenShards(directory, split, metadata)
    directory = Path(directory)
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise FileNotFoundError(f"the token directory {directory} {what}; {PREPARE}.")
    return _open_foreign(directory, split, tokens)


def _check_objects(directory: Workdir, metadata: Metadata, checksums: bool) -> None:
    """Compare what a bucket says of the shards of a directory with `meta.json`."""
    objects, files = list_objects(directory), shards_of(directory, metadata)
    shards = [shard for split in metadata.splits.values() for shard in split.shards]
    if checksums and any(shard.crc32c is None for shard in shards):
        _LOGGER.warning(
            "%s/meta.json holds no CRC32C, as `maxmars data prepare` records with the extra gcs: "
            "the shards are compared by size alone; `maxmars data inspect` reads and compares them",
            directory,
        )
    for name, split in metadata.splits.items():
        for file, shard in zip(files[name], split.shards, strict=True):
            stored = objects.get(shard.file)
            if stored is None:
                raise FileNotFoundError(f"the token shard {file.path} is missing; upload it again.")
            told: dict[str, int | str] = {"size": file.num_bytes}
            if checksums and shard.crc32c is not None:
                told["crc32c"] = shard.crc32c
            for field, recorded in told.items():
                if str(stored.get(field)) != str(recorded):
                    raise ValueError(
                        f"the token shard {file.path} is not the one that was prepared: its "
                        f"{field} is {stored.get(field)}, but meta.json says {recorded}; upload it "
                        "again."
                    )


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What a file of tokens says of itself."""

    dtype: np.dtype
    header_bytes: int
    count: int
    """Tokens."""
    vocabulary: Vocabulary = _GPT2


def _open_foreign(directory: Path, split: str, tokens: TokenDirectory) -> TokenStream:
    """One split of a directory of nanoGPT, llm.c or build-nanogpt."""
    files = [(path, m) for path in sorted(directory.iterdir()) if (m := _NAME.fullmatch(path.name))]
    bins = [(path, m) for path, m in files if path.suffix == ".bin"]
    headless = False
    if any(_read_header(path)[0] in {magic for magic, _ in _LLM_C} for path, _ in bins):
        files, read = bins, _told_by_llm_c
    elif plain := [(path, m) for path, m in bins if m["name"] is m["number"] is None]:
        if tokens.tokenizer is tokens.vocab_size is None and (directory / _TOKENIZER).is_file():
            tokens = dataclasses.replace(tokens, tokenizer=str(directory))
        files, read, headless = plain, functools.partial(_told_by_nanogpt, tokens), True
    else:
        files, read = [(path, m) for path, m in files if path.suffix == ".npy"], _told_by_numpy
    if not files:
        raise FileNotFoundError(
            f"{directory} holds no tokens that can be read. What can be: a directory made by "
            "`maxmars data prepare` (meta.json), nanoGPT's "
            "train.bin and val.bin, llm.c's NAME_train_*.bin and NAME_val_*.bin, and build-"
            "nanogpt's NAME_train_*.npy and NAME_val_*.npy. Run `maxmars data prepare SOURCE "
            "DIRECTORY` to make tokens from text; a function of your own reads anything else, such "
            "as TFDS's records of tokens (from_tfds in tools/examples/own_data.py)."
        )
    if not headless and tokens.dtype is not None:
        raise ValueError(
            f"dtype={tokens.dtype} is set for {directory}, whose files say the type of their "
            "tokens; leave it out."
        )
    names = sorted({m["name"] or "" for _, m in files})
    if len(names) > 1:
        raise ValueError(
            f"{directory} holds the files of several data sets ({', '.join(names)}); move each to "
            "a directory of its own."
        )
    splits: dict[str, list[TokenFile]] = {}
    kinds: dict[tuple[str, Vocabulary], Path] = {}
    for path, m in sorted(files, key=lambda item: (item[1]["split"], int(item[1]["number"] or 0))):
        told = read(path)
        kinds[told.dtype.name, told.vocabulary] = path
        num_bytes = told.header_bytes + told.count * told.dtype.itemsize
        name = m["split"]
        file = TokenFile(path=path, num_bytes=num_bytes, header_bytes=told.header_bytes, split=name)
        check_size(file)
        splits.setdefault(name, []).append(file)
    if len(kinds) > 1:
        paths = " and ".join(map(str, kinds.values()))
        raise ValueError(
            f"{paths} hold tokens of different tokenizers or types; keep those of one."
        )
    if split not in splits:
        raise NoSuchSplitError(
            f"{directory} has no file of the split {split!r}, only of {', '.join(splits)}; put one "
            f"there whose name is like {files[0][0].name}'s"
            + (", or train without validation: --eval.every None." if split == "val" else ".")
        )
    _warn_of_gaps([(path, m) for path, m in files if m["split"] == split])
    (dtype, vocabulary), _ = kinds.popitem()
    stream = TokenStream(
        directory, split, splits, dtype=dtype, vocabulary=_vocabulary(tokens, vocabulary)
    )
    _check_samples(stream, guessed=headless and tokens.tokenizer is tokens.vocab_size is None)
    return stream


def _vocabulary(tokens: TokenDirectory, told: Vocabulary) -> Vocabulary:
    """What the ids of another program's tokens mean: as the config says, or as the files do."""
    name, size = tokens.tokenizer, tokens.vocab_size
    match name:
        case None if size is None:
            return told
        case None | "unknown":
            assert size is not None  # see `TokenDirectory`
            return Vocabulary(tokenizer="unknown", size=size)
        case ByteTokenizer.name:
            return Vocabulary(tokenizer=name, size=size or ByteTokenizer.vocab_size)
        case GPT2Tokenizer.name:
            return Vocabulary(tokenizer=name, size=size or GPT2Tokenizer.vocab_size)
    own = load(name)
    return Vocabulary(
        tokenizer=own.name,
        size=size or own.vocab_size,
        digest=own.digest,
        place=resolve(name),
    )


def _check_samples(stream: TokenStream, *, guessed: bool) -> None:
    """Look at tokens here and there, before a run: may they be what they are taken to be?

    Args:
      stream: of another program.
      guessed: whether nothing says that the tokens are GPT-2's uint16.

    Raises:
      ValueError: they are not.
    """
    length = min(_WINDOW, stream.num_tokens)
    starts = np.linspace(0, stream.num_tokens - length, _WINDOWS).astype(np.int64) // 2 * 2
    samples = stream.read_windows(np.unique(starts), length)
    if not guessed or length < _MANY:
        return
    ids = samples.astype("<u2")
    if not ids[:, 1::2].any():
        why = "every second one is 0, as in integers of 32 or 64 bits"
    elif np.mean(ids.view(np.uint8) > 127) < _FEW_HIGH_BYTES:  # of GPT-2's, a third of the lower
        why = "they are small, as of bytes or characters"
    else:
        return
    raise ValueError(
        f"the numbers in {stream.directory} do not look like GPT-2's tokens of 2 bytes: {why}; "
        f"{NAME_THEM} (if they are GPT-2's, by --data.tokenizer gpt2)."
    )


def _warn_of_gaps(files: list[tuple[Path, re.Match[str]]]) -> None:
    """Warn of numbers that are missing between those of the files of a split."""
    paths = {int(m["number"]): path for path, m in files if m["number"]}
    missing = sorted(set(range(min(paths, default=0), max(paths, default=0))) - paths.keys())
    if missing:
        first, width = files[0][0], len(files[0][1]["number"])
        stem = first.stem[:-width]
        names = [f"{stem}{number:0{width}d}{first.suffix}" for number in missing[:3]]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        _LOGGER.warning(
            "%s lacks %s%s between its other files: it is read without them; copy them there",
            first.parent,
            ", ".join(names),
            more,
        )


def _told_by_nanogpt(tokens: TokenDirectory, path: Path) -> _Told:
    """What is taken to be in a nanoGPT file, which says nothing of itself."""
    other = next((n for n in _OF_OTHER_TOKENIZERS if (path.parent / n).exists()), None)
    if other is not None and tokens.tokenizer is tokens.vocab_size is None:
        raise ValueError(
            f"{path.parent / other} says that {path.name} holds the ids of a tokenizer of its own, "
            "as nanoGPT's of characters, and no pickle is ever opened. Prepare the text anew "
            f"(`maxmars data prepare {path.parent / 'input.txt'} OUT --tokenizer byte`), or put "
            f"the {_TOKENIZER} of these ids beside them (five lines make one of characters: "
            "tools/examples/your_own_text.md), or train on the bare ids by --data.vocab-size N "
            "--model.vocab-size N; --data.tokenizer names a tokenizer elsewhere."
        )
    size = _vocabulary(tokens, _GPT2).size
    dtype = np.dtype(tokens.dtype or ("uint16" if size <= 1 << 16 else "uint32"))
    num_bytes = path.stat().st_size
    if num_bytes == 0 or num_bytes % dtype.itemsize:
        raise ValueError(
            f"{path} has {num_bytes} bytes, but its tokens have {dtype.itemsize} bytes each, as "
            f"{dtype}: it was cut short, so write it again; or they are of another type, so name "
            "it by --data.dtype."
        )
    return _Told(dtype=dtype, header_bytes=0, count=num_bytes // dtype.itemsize)


def _told_by_llm_c(path: Path) -> _Told:
    magic, version, count = _read_header(path)
    if (magic, version) not in _LLM_C:
        known = " or ".join(f"{magic} version {version}" for magic, version in _LLM_C)
        raise ValueError(
            f"{path} is no token file of llm.c: its header begins with {magic} version {version}, "
            f"not {known}."
        )
    name, vocabulary = _LLM_C[magic, version]
    return _Told(
        dtype=np.dtype(name), header_bytes=_HEADER_BYTES, count=count, vocabulary=vocabulary
    )


def _told_by_numpy(path: Path) -> _Told:
    try:
        array = np.load(path, mmap_mode="r")  # which refuses pickles
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
    return _Told(dtype=array.dtype, header_bytes=array.offset, count=array.size)


def _read_header(path: Path) -> tuple[int, int, int]:
    """Magic number, version and token count of an llm.c file; zeros of one that is too short."""
    with path.open("rb") as file:
        start = file.read(_HEADER_BYTES)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0")[:12], _HEADER[0]).tolist()
    return (magic, version, count) if len(start) == _HEADER_BYTES else (0, 0, 0)
