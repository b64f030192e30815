"""Windows that know where their documents begin, so that attention stays within documents.

* `packing="split"`: windows are cut from the stream as it is, and the tokens that end documents are
  looked for in them.
* `packing="best_fit"`: whole documents share windows, and none is cut that fits into one. Which
  ones is planned once, by `maxmars data prepare --pack best_fit`; the plan is a file beside the
  shards.

The token that ends a document is the first of the next segment, as a generated text begins with it:
it is predicted from the document that it ends, and the first token of a document from it alone.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer

from maxmars.config.checks import CheckedConfig, NotNegative, read_as, require
from maxmars.config.errors import about
from maxmars.data.bucket import read_ranges
from maxmars.data.metadata import AGAIN, DocumentStarts, Metadata, read_metadata
from maxmars.data.token_files import (
    TokenFile,
    TokenShards,
    TokenStream,
    check_size,
)
from maxmars.data.windows import TYPES, Batch, TokenWindows, Types
from maxmars.distributed import processes
from maxmars.distributed.files import (
    Workdir,
    is_remote,
    read_text,
    reporting,
    resolve,
    write_bytes,
    write_json,
)
from maxmars.distributed.progress import Progress


def segments_and_positions(
    begins: Bool[np.ndarray, "*rows window"],
) -> dict[str, Int32[np.ndarray, "*rows window"]]:
    """`segment_ids`, counted from 0 in each row, and `positions`, counted from 0 in each segment.

    Args:
      begins: whether a token is the first of a segment; the first of a row always is.
    """
    index = np.arange(begins.shape[-1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(begins, index, 0), axis=-1)
    return {"segment_ids": np.cumsum(begins, axis=-1, dtype=np.int32), "positions": index - first}


# --- best fit: the plan --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The documents of each window. Window i holds the pieces `windows[i]` to `windows[i + 1]`.

    A window is the end-of-text token and then its pieces, `length` tokens at most; the rest is
    padding. A piece is a whole document with the end-of-text token after it, or a part of a
    document that is longer than a window. Such parts overlap by one token, which the later part
    does not predict, so that every token of the split is predicted once.
    """

    length: int
    """Tokens of a window that are predicted, `max_seq_len`."""
    windows: Int64[np.ndarray, " borders"]
    """Number of the first piece of each window, and the number of all pieces."""
    starts: Int64[np.ndarray, " pieces"]
    """Place in the split's stream of each piece's first token."""
    lengths: Int32[np.ndarray, " pieces"]
    """Tokens of each piece; negative where it continues a document."""

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows) - 1

    @property
    def fill(self) -> float:
        """Part of the windows that is not padding."""
        return float(np.abs(self.lengths).sum(dtype=np.int64) / (len(self) * self.length))


def plan_best_fit(
    document_starts: Integer[np.ndarray, " documents"], num_tokens: int, length: int
) -> Plan:
    """Fit documents into windows: each, from the longest on, into the fullest that has room.

    The windows are in a random order, which is always the same. The time is that of sorting the
    documents: 20,000 take some 10 ms, 10 million some 10 s.

    Args:
      document_starts: where in a stream each document starts, ascending.
      num_tokens: tokens of the stream.
      length: tokens of a window that are predicted, 2 at least.
    """
    # Documents of 3, 9 and 2 tokens, in windows of length 4:
    #
    #   starts, ends    0 3 12    3 12 14
    #   counts          1 3 1             pieces of each document; all but its first add 3 tokens
    #   document        0  1  1  1  2     of each piece
    #   piece           0  0  1  2  0     its number in the document
    #   starts          0  3  6  9 12
    #   lengths         3  4  4  3  2     the pieces [3, 7), [6, 10) and [9, 12) overlap by one
    starts = document_starts.astype(np.int64)
    ends = np.append(starts[1:], num_tokens)
    counts = 1 + np.maximum(0, -((length + starts - ends) // (length - 1)))
    document = np.repeat(np.arange(len(starts)), counts)
    piece = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = starts[document] + piece * (length - 1)
    lengths = np.minimum(length, ends[document] - starts).astype(np.int32)
    window, num_windows = best_fit(lengths, length)
    window = np.random.default_rng(0).permutation(num_windows)[window]
    order = np.argsort(window, kind="stable")  # of the pieces, window after window
    return Plan(
        length=length,
        windows=np.searchsorted(window[order], np.arange(num_windows + 1)),
        starts=starts[order],
        lengths=np.where(piece > 0, -lengths, lengths)[order],
    )


def best_fit(
    sizes: Int[np.ndarray, " items"], capacity: int
) -> tuple[Int64[np.ndarray, " items"], int]:
    """The bin of each item, and the number of bins, by best fit decreasing.

    Each item, from the largest on, goes into the fullest bin that has room for it. Items of one
    size, and bins with the same room, are handled together.

    Args:
      sizes: from 1 to `capacity`.
      capacity: of a bin.
    """
    order = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), np.int64)
    num_bins = 0
    rooms: list[int] = []  # what is free in any bin, ascending
    bins: dict[int, np.ndarray] = {}  # numbers of the bins with so much room

    def put(room: int, numbers: np.ndarray) -> None:
        if not room or not len(numbers):
            return
        if room in bins:
            numbers = np.concatenate([bins[room], numbers])
        else:
            bisect.insort(rooms, room)
        bins[room] = numbers

    borders = np.flatnonzero(np.diff(sizes[order], prepend=0, append=0))  # between unequal sizes
    for first, last in itertools.pairwise(borders):
        items, size = order[first:last], int(sizes[order[first]])
        while len(items):
            tightest = bisect.bisect_left(rooms, size)
            if tightest < len(rooms):
                room = rooms.pop(tightest)
                numbers = bins.pop(room)
            else:  # new bins, for all of these items
                room, count = capacity, -(-len(items) // (capacity // size))
                numbers = np.arange(num_bins, num_bins + count)
                num_bins += count
            # 5 items of size 3 into 4 bins with room 7: 2 `each`, so 3 are `used`, the last by 1
            # item; the room of the four is then 1, 1, 4 and 7.
            each = room // size
            now = min(len(items), each * len(numbers))
            used = -(-now // each)
            in_last = now - each * (used - 1)
            bin_of[items[:now]] = np.repeat(numbers[:used], each)[:now]
            put(room - each * size, numbers[: used - 1])
            put(room - in_last * size, numbers[used - 1 : used])
            put(room, numbers[used:])
            items = items[now:]
    return bin_of, num_bins


# --- best fit: the plan's file, and the windows --------------------------------------------------

_BORDER = np.dtype("<i8")
_PIECE = np.dtype([("start", "<i8"), ("length", "<i4")])


@dataclass(frozen=True, kw_only=True)
class _Described(CheckedConfig):
    """What the JSON file beside a plan says of it."""

    documents: str
    num_windows: NotNegative[int]
    num_pieces: NotNegative[int]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan on a disk or in a bucket, of which only the windows of a batch are read.

    The file holds the borders of `Plan.windows` and then the pieces. That of 9e9 tokens of web
    text in windows of 1,024 has some 230 MB.
    """

    length: int
    num_windows: int
    file: TokenFile

    def __len__(self) -> int:
        """Number of windows."""
        return self.num_windows

    def pieces(
        self, windows: Int64[np.ndarray, " windows"]
    ) -> tuple[
        Int64[np.ndarray, " pieces"], Int32[np.ndarray, " pieces"], Int64[np.ndarray, " windows"]
    ]:
        """Starts and lengths of the windows' pieces, one window after the other, and how many of
        each.

        Raises:
          ValueError: the file is damaged.
          FileNotFoundError, OSError: see `TokenFiles.read_pieces`.
        """
        # Windows [5, 2] with 3 and 1 pieces: borders [[11, 14], [4, 5]], counts [3, 1].
        at = windows * _BORDER.itemsize
        borders = np.frombuffer(self._read(at, at + 2 * _BORDER.itemsize), _BORDER).reshape(-1, 2)
        first, num_bytes = (self.num_windows + 1) * _BORDER.itemsize, self.file.num_bytes
        num_pieces = (num_bytes - first) // _PIECE.itemsize
        counts = borders[:, 1] - borders[:, 0]  # of pieces, each with one token at least
        if borders.min() < 0 or borders.max() > num_pieces or counts.min() < 1:
            raise self._damaged()
        at = first + borders * _PIECE.itemsize
        pieces = np.frombuffer(self._read(at[:, 0], at[:, 1]), _PIECE)
        starts, lengths = pieces["start"].astype(np.int64), pieces["length"].astype(np.int32)
        sizes = np.abs(lengths.astype(np.int64))
        if (
            sizes.min() < 1
            or np.add.reduceat(sizes, np.cumsum(counts) - counts).max() > self.length
        ):
            raise self._damaged()
        return starts, lengths, counts

    def _damaged(self) -> ValueError:
        return ValueError(f"{self.file.path} is damaged; delete it and plan again.")

    def _read(
        self, starts: Int64[np.ndarray, " ranges"], ends: Int64[np.ndarray, " ranges"]
    ) -> bytes:
        ranges = zip(starts.tolist(), ends.tolist(), strict=True)
        if is_remote(self.file.path):
            return b"".join(read_ranges([(self.file.path, *range_) for range_ in ranges]))
        return b"".join(self._map[start:end].tobytes() for start, end in ranges)

    @functools.cached_property
    def _map(self) -> np.ndarray:
        check_size(self.file)
        return np.memmap(self.file.path, np.uint8, "r").view(np.ndarray)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped file."""
        return {name: value for name, value in vars(self).items() if name != "_map"}


def write_plans(directory: Workdir, length: int) -> dict[str, Plan]:
    """Plan the windows of each split of a directory that `maxmars data prepare` wrote.

    Args:
      directory: a directory of token shards.
      length: tokens of a window that are predicted, the `max_seq_len` of the model.

    Returns:
      The plans by split. Their files lie beside the shards.

    Raises:
      ValueError: the length is too short, or the directory does not say where documents start.
      OSError: a file cannot be read or written.
    """
    if length < 2:
        raise ValueError(f"--pack-length {length} must be 2 at least.")
    metadata, plans = read_metadata(directory), {}
    with Progress(stderr=True) as status:
        for split, of_split in metadata.splits.items():
            documents = _documents(directory, metadata, split)
            status.update(f"planning windows of {documents.count:,} documents ({split})")
            with reporting(directory):
                stored = (directory / documents.file).read_bytes()
            if hashlib.sha256(stored).hexdigest() != documents.sha256:
                raise ValueError(
                    f"{directory / documents.file} does not match its checksum in meta.json: it is "
                    f"damaged; {AGAIN}."
                )
            starts = np.frombuffer(stored, "<u8")
            plans[split] = plan = plan_best_fit(starts, of_split.num_tokens, length)
            pieces = np.empty(len(plan.starts), _PIECE)
            pieces["start"], pieces["length"] = plan.starts, plan.lengths
            content = plan.windows.astype(_BORDER).tobytes() + pieces.tobytes()
            name = _plan_name(split, length)
            write_bytes(directory / f"{name}.bin", content)
            described = _Described(
                documents=documents.sha256,
                num_windows=len(plan),
                num_pieces=len(pieces),
                sha256=hashlib.sha256(content).hexdigest(),
            )
            write_json(directory / f"{name}.json", asdict(described))
    return plans


def read_plan(stream: TokenStream, length: int) -> PlanFile:
    """The plan of a stream's split for a length; all processes of a run must call.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is damaged, or of other documents.
      OSError: it cannot be read.
    """
    path = resolve(stream.directory) / f"{_plan_name(stream.split, length)}.json"
    text = processes.text_from_primary(lambda: read_text(path))
    if text is None or not isinstance(stream, TokenShards):
        raise FileNotFoundError(
            f"{stream.directory} has no plan for data.packing=best_fit with model.max_seq_len="
            f"{length}; run its `maxmars data prepare` command with --pack best_fit "
            f"--pack-length {length}."
        )
    with about(path):
        described = read_as(_Described, json.loads(text))
        documents = _documents(stream.directory, stream.metadata, stream.split).sha256
        require(described.documents == documents, "it is the plan of other documents; plan again.")
    borders = (described.num_windows + 1) * _BORDER.itemsize
    file = TokenFile(
        path=path.with_suffix(".bin"),
        num_bytes=borders + described.num_pieces * _PIECE.itemsize,
        sha256=described.sha256,
    )
    plan = PlanFile(length=length, num_windows=described.num_windows, file=file)
    # That of training, which may be large, is compared while the run trains: see `verification`.
    if stream.split != "train":
        if not is_remote(file.path):
            check_size(file)
        with reporting(file.path):
            content = file.path.read_bytes()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise ValueError(f"{file.path} does not match its checksum; delete it and plan again.")
    return plan


def _plan_name(split: str, length: int) -> str:
    return f"{split}_best_fit_{length}"


def _documents(directory: Workdir, metadata: Metadata, split: str) -> DocumentStarts:
    documents = metadata.splits[split].documents
    if documents is None:
        raise ValueError(
            f"{directory} does not say where documents start, since an earlier version wrote it; "
            f"{AGAIN}, or take data.packing=split."
        )
    return documents


_WITHOUT_MASK: Types = {name: TYPES[name] for name in TYPES if name != "mask"}


class SegmentedWindows(TokenWindows):
    """The windows of a stream, in which a segment begins at each token that ends a document.

    Args:
      stream, length, at_every_token: see `TokenWindows`.
      end_of_text: the token that ends a document.
    """

    types: Types = _WITHOUT_MASK

    def __init__(
        self, stream: TokenStream, length: int, end_of_text: int, *, at_every_token: bool = False
    ) -> None:
        super().__init__(stream, length, at_every_token=at_every_token)
        self._end_of_text = end_of_text

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        batch = super().read(numbers)
        return batch | segments_and_positions(batch["tokens"] == self._end_of_text)


class PlannedWindows(TokenWindows):
    """The windows that a plan makes of a stream's documents.

    Args:
      stream: the tokens.
      end_of_text: the token that ends a document.
      plan: of the stream; it says how long the windows are.
    """

    types: Types = TYPES

    def __init__(self, stream: TokenShards, end_of_text: int, plan: PlanFile) -> None:
        self._shards, self._end_of_text, self._plan = stream, end_of_text, plan
        super().__init__(stream, plan.length)

    def __len__(self) -> int:
        return len(self._plan)

    @property
    def files(self) -> Sequence[TokenFile]:
        return [*self._shards.files, self._plan.file]

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        # A window with a whole document "ab" and the end "yz" of a long one, whose last token
        # before that, x, the window before has predicted ("." ends a document, "_" is padding):
        #
        #   tokens     .  a  b  .  x  y  z  .  .  .     all but the first: pieces, then padding
        #   filled     -  *  *  *  *  *  *  *  -  -     what the pieces hold
        #   begins     *  -  -  *  *  -  -  *  *  *     a segment begins: at "." and at x
        #   mask       -  *  *  *  -  *  *  *  -  -     predicted: not x, which has no token before
        #
        # All windows are read at once: the pieces of one lie one after the other in `places`, and
        # assigning to `tokens[filled]` deals their tokens out in that order.
        places, lengths, counts = self._plan.pieces(numbers)
        sizes = np.abs(lengths)
        used = np.add.reduceat(sizes, np.cumsum(counts) - counts)  # tokens of each window
        column = np.arange(self.length + 1)
        filled = (column > 0) & (column <= used[:, None])
        tokens = np.full(filled.shape, self._end_of_text, np.int32)
        tokens[filled] = self._shards.read_pieces(places, sizes)
        # The first token of each piece that continues a document, first as places in the joined
        # pieces, then in the windows.
        first, continues = np.zeros(sizes.sum(), bool), np.zeros_like(filled)
        first[np.cumsum(sizes) - sizes] = lengths < 0
        continues[filled] = first
        begins = (tokens == self._end_of_text) | continues
        return {"tokens": tokens, **segments_and_positions(begins), "mask": filled & ~continues}

    def locate(self, number: int) -> dict[str, str | int]:
        """Where the first piece of a window is, and the places of all in the stream."""
        starts, lengths, _ = self._plan.pieces(np.array([number]))
        ends = starts + np.abs(lengths)
        ranges = ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))
        first = int(starts[0])
        return {"start": first, **self._shards.locate(first), "pieces": ranges}

    def digest(self) -> str:
        return hashlib.sha256(f"{super().digest()}{self._plan.file.sha256}".encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"num_tokens": len(self) * self.length + 1}
