"""From a config to batches on the mesh: the token stream of training, and the validation windows.

The stream of training examples is a pure function of (seed, example index), and row r of step s is
example `s * global_batch_size + r`. So the same tokens reach step s for every mesh, number of
processes, microbatching and prefetch, and a resume anywhere continues them exactly.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Bool

from maxmars.config import (
    DataConfig,
    GrainSource,
    MixtureConfig,
    ModelConfig,
    PythonSourcesConfig,
    TokenDirectory,
    TrainConfig,
)
from maxmars.data.formats import examine, open_examined
from maxmars.data.own_data import TYPES, OwnData, Types
from maxmars.data.packing import PackedStream, read_plan
from maxmars.data.prepare import prepare_python_sources
from maxmars.data.sampling import (
    Batch,
    Change,
    Interleaving,
    Place,
    Stream,
    num_windows,
    process_batches,
    training_examples,
    validation_examples,
)
from maxmars.data.token_files import TokenFile, TokenStream, digest_of
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer, tokenizer_of_tokens
from maxmars.data.workers import end_with_parent
from maxmars.distributed import processes
from maxmars.distributed.files import is_remote, read_text
from maxmars.distributed.sharding import batch_shards, local_rows, to_device

_LOGGER = logging.getLogger(__name__)
_BUCKET_READS = 4  # batches at a time: an answer may take longer than a step
UNKNOWN_TOKENIZER = GrainSource.tokenizer
_END_OF_TEXT = {t.name: t.eot for t in (ByteTokenizer, GPT2Tokenizer)}

DeviceBatch = dict[str, jax.Array]
"""A global batch on the mesh: `tokens`, int32 [microbatches, rows, max_seq_len + 1], and where the
data has them, arrays of the same shape: `mask` (bool, whether a token counts as a target, or
float32, the weight of its loss; that of the first token of a row is never used), `segment_ids` and
`positions` (int32)."""


@dataclass(frozen=True, kw_only=True)
class SplitTokens:
    """The opened streams and own data of one split that a config means, and their weights."""

    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    changes: tuple[Change, ...] = ()
    """Changes of the weights; see `SharesByWeight`."""
    num_workers: int = 0
    """Processes that read batches ahead; 0 reads in a thread."""

    @property
    def types(self) -> Types:
        """Names and types of the arrays of a batch."""
        return _union([s.types for s in self.streams if isinstance(s, OwnData | PackedStream)])

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def first(self) -> Stream:
        """The first stream whose tokenizer is known, if any is: it is that of all streams."""
        return next((s for s in self.streams if s.tokenizer != UNKNOWN_TOKENIZER), self.streams[0])

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer, which is that of all streams."""
        return self.first.tokenizer

    @property
    def in_bucket(self) -> bool:
        """Whether some of the tokens are in a bucket."""
        return any(is_remote(stream.directory) for stream in self.streams)

    @property
    def files(self) -> list[TokenFile]:
        """The files of all streams' directories, of every split."""
        return [file for stream in self.streams for file in stream.files]

    def digest(self) -> str:
        """Digest of the data, whatever its path: see `digest_of`; of a mixture, over its parts'."""
        first, *others = (
            s.digest() if isinstance(s, OwnData | PackedStream) else digest_of(s)
            for s in self.streams
        )
        return hashlib.sha256("".join([first, *others]).encode()).hexdigest() if others else first

    def describe(self) -> list[dict[str, Any]]:
        """What each part is, JSON-ready: its `name` (of the directory, or of the user's function),
        `weight`, `num_tokens` and `tokenizer`; of what `maxmars data prepare` wrote also
        `num_documents` and `source`, which are None for others."""
        found = []
        for stream, weight in zip(self.streams, self.weights, strict=True):
            metadata = None if isinstance(stream, OwnData) else stream.metadata
            split = None if metadata is None else metadata.splits[stream.split]
            found.append(
                {
                    "name": stream.directory.name,
                    "weight": weight,
                    "num_tokens": stream.num_tokens,
                    "tokenizer": stream.tokenizer,
                    "num_documents": None if split is None else split.num_documents,
                    "source": None if metadata is None else metadata.source,
                }
            )
        return found


def _union(found: Sequence[Types]) -> Types:
    """The arrays that some data have; a mask is of weights where one is."""
    names = {"tokens", *(name for types in found for name in types)}
    is_weighted = any(types.get("mask") is np.float32 for types in found)
    return {n: np.float32 if n == "mask" and is_weighted else TYPES[n] for n in TYPES if n in names}


def batch_types(config: DataConfig, model: ModelConfig) -> Types:
    """Names and types of the arrays of a batch of training, for a plan: no tokens are opened.

    Data of the user's own are, since only their first element says what they have. Where they are
    not on this machine, they count as tokens alone, and a warning says so.

    Raises:
      ValueError: own data are not as they should be.
    """
    found: list[Types] = [{name: TYPES[name] for name in config.arrays}]
    for part in config.parts if isinstance(config, MixtureConfig) else (config,):
        if isinstance(part, GrainSource):
            try:
                found.append(OwnData(part, "train", model).types)
            except OSError as error:
                _LOGGER.warning("data.source=%r: planned as tokens alone (%s)", part.source, error)
    return _union(found)


def open_data(config: DataConfig, split: str, *, model: ModelConfig) -> SplitTokens:
    """The tokens of a split (`train` or `val`); all processes of a run must call.

    Process 0 reads `meta.json` and looks at the files for all: see `formats.examine`.

    Raises:
      FileNotFoundError: there is no such directory, nothing in it that can be read, or no plan of
        packing for this model.
      ValueError: files are damaged, a directory lacks the split, the parts of a mixture have
        different tokenizers, or these do not fit the model.
      OSError, ImportError: a bucket cannot be read; see `files.require_access`.
      Own data may raise anything; where processes differ in them, it is a ValueError.
    """
    streams: list[TokenStream | OwnData] = []
    parts = config.parts if isinstance(config, MixtureConfig) else (config,)
    for part in parts:
        if isinstance(part, GrainSource):
            streams.append(own := OwnData(part, split, model))
            _check_all_have(own)
            continue
        if isinstance(part, PythonSourcesConfig):
            part = TokenDirectory(path=str(prepare_python_sources()))
        checksums = config.verify and split == "train"  # of all splits: once is enough
        look = functools.partial(examine, part.path, checksums=checksums)
        meta = processes.text_from_primary(look)
        stream = open_examined(part, split, meta)
        _check_same_directory(stream, meta)
        streams.append(stream)
    for stream in streams:
        if not isinstance(stream, OwnData):
            _check_vocabulary(stream, model)
    _check_tokenizers([s for s in streams if s.tokenizer != UNKNOWN_TOKENIZER])
    mixture = isinstance(config, MixtureConfig)
    return SplitTokens(
        streams=tuple(_packed(stream, config, model) for stream in streams),
        weights=tuple(part.weight for part in config.parts) if mixture else (1.0,),
        changes=tuple((c.at_example, c.weights) for c in config.changes) if mixture else (),
        num_workers=max(p.num_workers if isinstance(p, GrainSource) else 0 for p in parts),
    )


def _check_all_have(own: OwnData) -> None:
    """Check that own data are the same in every process; all must call."""
    found = processes.first_other(own.digest())
    if found is not None:
        process, other, first = found
        raise ValueError(
            f"data.source={own.source!r}, split {own.split!r}: process {process} has other "
            f"data than process 0, with the digest {other[:16]} and not {first[:16]}; give all "
            "hosts the same files."
        )


def _check_same_directory(stream: TokenStream, meta: str | None) -> None:
    """Check that a directory on disks is the same for every process; all must call.

    Only its description is compared, or where it has none, samples of the files: see `digest_of`.
    That files are as described is checked by `Verification`, which divides them over the hosts.
    """
    if is_remote(stream.directory):
        return  # all read the same objects
    own = digest_of(stream) if meta is None else read_text(stream.directory / "meta.json")
    found = processes.first_other(hashlib.sha256((own or "").encode()).hexdigest())
    if found is not None:
        process, other, first = found
        raise ValueError(
            f"process {process} has other tokens in {stream.directory} than process 0: the "
            f"digest of their description is {other[:16]}, and that of process 0 {first[:16]}; "
            "give all hosts the same files."
        )


def _packed(stream: TokenStream | OwnData, config: DataConfig, model: ModelConfig) -> Stream:
    """A stream with the segments, positions and mask that `config.packing` asks for."""
    if isinstance(config, GrainSource) or config.packing == "none" or isinstance(stream, OwnData):
        return stream
    end = _END_OF_TEXT.get(stream.tokenizer)
    if end is None:
        end = tokenizer_of_tokens(stream).eot
    plan = read_plan(stream, model.max_seq_len) if config.packing == "best_fit" else None
    return PackedStream(stream, end, plan)


def vocabulary_hint(tokens: SplitTokens, model: ModelConfig) -> str | None:
    """A hint where a model has at least twice the rows that the tokens need; else None."""
    needed = max(stream.vocab_size for stream in tokens.streams)
    if 2 * needed > model.vocab_size:
        return None
    return (
        f"hint: the tokens ({tokens.tokenizer}) have {needed:,} ids, and the model's table has "
        f"{model.vocab_size:,} rows; --model.vocab-size {needed} makes it smaller and faster"
    )


def _check_vocabulary(stream: TokenStream, model: ModelConfig) -> None:
    if stream.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokens in {stream.directory} have a vocabulary of {stream.vocab_size} "
            f"({stream.tokenizer}), more than model.vocab_size={model.vocab_size}; set "
            f"model.vocab_size={stream.vocab_size} or prepare the text with another tokenizer."
        )
    end = _END_OF_TEXT.get(stream.tokenizer)
    if model.document_end_id is not None and end not in (None, model.document_end_id):
        raise ValueError(
            f"documents in {stream.directory} ({stream.tokenizer}) end with the token {end}, not "
            f"with model.document_end_id={model.document_end_id}; set it to {end} or to None."
        )


def _check_tokenizers(streams: Sequence[Stream]) -> None:
    for first, other in itertools.pairwise(streams):
        digests = {first.tokenizer_digest, other.tokenizer_digest} - {None}
        if first.tokenizer != other.tokenizer or len(digests) > 1:
            found = [f"{s.directory} ({s.tokenizer}, {s.tokenizer_digest})" for s in (first, other)]
            raise ValueError(
                f"the parts of a mixture need one tokenizer, but {' and '.join(found)} have two; "
                "prepare the text of one again with the tokenizer of the other."
            )


class TrainBatches:
    """Iterator over the batches of training, on the mesh; see `DeviceBatch`.

    Microbatch j is the j-th run of rows of the global batch. A thread reads ahead and puts batches
    on the devices while the steps before run; that does not show in `position`.

    Why not Grain's own checkpoints: they count batches, and are files by process that another
    number of processes cannot read.

    Args:
      tokens: the training tokens.
      config: takes seed, batch sizes, max_seq_len and data.order from it.
      mesh: where the batches go.
      position: index of the first example, for a resume. It counts examples, not steps, so that a
        run that continues with another batch size repeats and skips nothing.
      prefetch_steps: batches to have ready on the devices; 0 reads when asked.

    Attributes:
      position: index of the next batch's first example: the state to save in a checkpoint.

    Raises:
      ValueError: there are too few tokens for one batch.
    """

    def __init__(
        self,
        tokens: SplitTokens,
        config: TrainConfig,
        mesh: Mesh,
        *,
        position: int = 0,
        prefetch_steps: int = 4,
    ) -> None:
        """Start at `position`."""
        _check_batch(tokens, config)
        self.position = position
        self._examples = training_examples(
            tokens.streams,
            tokens.weights,
            length=config.model.max_seq_len,
            seed=config.seed,
            order=config.data.order,
            changes=tokens.changes,
        )
        self._batch_size = config.global_batch_size
        rows = local_rows(mesh, (config.microbatches, config.microbatch_size))
        self._batches: grain.DatasetIterator[DeviceBatch] | None = _iterate(
            process_batches(self._examples, rows, self._batch_size, position, tokens.types),
            mesh,
            config.microbatch_size,
            prefetch_steps,
            in_bucket=tokens.in_bucket,
            num_workers=tokens.num_workers,
        )

    def place(self, example: int) -> Place:
        """Where the tokens of an example, of any step, are."""
        place = self._examples[example]
        assert place is not None  # no example is filtered out
        return place

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        """The next batch; there always is one."""
        if self._batches is None:
            raise ValueError("these batches are closed.")
        batch = next(self._batches)
        self.position += self._batch_size
        return batch

    def close(self) -> None:
        """Stop reading ahead, and end the thread."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None  # kept until the interpreter ends, it would print an ignored exception


def _iterate(
    batches: grain.MapDataset[Batch],
    mesh: Mesh,
    rows: int,
    prefetch_steps: int,
    *,
    in_bucket: bool,
    num_workers: int = 0,
) -> grain.DatasetIterator[DeviceBatch]:
    """Batches of this process as global ones on the mesh; a thread keeps some ready.

    Reading from a disk and the transfer share one thread: more would only contend for the
    interpreter. From a bucket, several batches are read at the same time. With workers, each of
    these processes reads every `num_workers`-th batch.
    """
    reads = _BUCKET_READS if in_bucket and prefetch_steps else 0
    read = batches.to_iter_dataset(grain.ReadOptions(num_threads=reads, prefetch_buffer_size=reads))
    if num_workers and prefetch_steps:
        flags.FLAGS.mark_as_parsed()  # Grain hands the flags of Abseil to its workers
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        read = read.mp_prefetch(options, worker_init_fn=lambda *_: end_with_parent())
    on_mesh = read.map(functools.partial(_to_devices, mesh, rows))
    if prefetch_steps == 0:
        return iter(on_mesh)
    ahead = on_mesh.pipe(
        grain.experimental.ThreadPrefetchIterDataset, prefetch_buffer_size=prefetch_steps
    )
    iterator = iter(ahead)
    iterator.start_prefetch()
    return iterator


def _to_devices(mesh: Mesh, rows: int, batch: Batch) -> DeviceBatch:
    on_mesh = {name: to_device(mesh, local, rows) for name, local in batch.items()}
    # Wait for the transfer, so that a batch that is ready is one on the devices.
    return jax.block_until_ready(on_mesh)


def _check_batch(tokens: SplitTokens, config: TrainConfig) -> None:
    """Check that no stream repeats itself within one batch."""
    length, batch_size = config.model.max_seq_len, config.global_batch_size
    stages = [tokens.weights, *(weights for _, weights in tokens.changes)]
    shares = np.max([Interleaving(weights).counts(batch_size) for weights in stages], axis=0)
    for stream, share in zip(tokens.streams, shares.tolist(), strict=True):
        found = num_windows(stream, length)
        if found < share:
            part = "" if share == batch_size else f", of which it has {share}"
            if isinstance(stream, OwnData):
                raise ValueError(
                    f"data.source={stream.source!r}, split {stream.split!r}: {found} windows "
                    f"are too few for one batch of global_batch_size={batch_size}{part}."
                )
            raise ValueError(
                f"split {stream.split!r} of {stream.directory} has {stream.num_tokens} tokens, too "
                f"few for one batch of global_batch_size={batch_size} sequences of "
                f"model.max_seq_len={length} tokens{part}: that makes {found} sequences. "
                "Prepare more text or lower one of the two."
            )


def validation_rows(batch_size: int, mesh: Mesh) -> int:
    """Sequences in a batch of the evaluation: `batch_size`, rounded up to divide over a mesh."""
    parts = batch_shards(mesh)
    return -(-batch_size // parts) * parts


class ValidationBatches:
    """The first windows of the validation split, in order, on the mesh.

    Each iteration yields batches with one microbatch (see `DeviceBatch`). They always have a
    `mask`, which is False for the rows that only fill up the last batch. The windows are the same
    on each mesh; only the filling differs.

    Args:
      tokens: the validation tokens; see `validation_examples` for those of a mixture.
      mesh: where the batches go.
      length: tokens of a window that are predicted.
      num_windows: number of windows to take.
      batch_size: rows of a batch, rounded up to what the mesh divides.

    Attributes:
      num_windows: windows scored: those asked for, or all where the split has fewer.

    Raises:
      ValueError: there are too few tokens for one window.
    """

    def __init__(
        self, tokens: SplitTokens, mesh: Mesh, *, length: int, num_windows: int, batch_size: int
    ) -> None:
        """Find out how many windows and rows there are; read none."""
        self._in_bucket = tokens.in_bucket
        parts = {s: w for s, w in zip(tokens.streams, tokens.weights, strict=True) if w > 0}
        examples = validation_examples(tuple(parts), tuple(parts.values()), length)
        self.num_windows = last = min(num_windows, len(examples))
        self._mesh, self._rows = mesh, validation_rows(batch_size, mesh)
        filled: grain.MapDataset[Any] = grain.MapDataset.range(len(self) * self._rows).map(
            lambda index: examples[min(index, last - 1)]
        )
        rows = local_rows(mesh, (1, self._rows))
        self._batches = process_batches(filled, rows, self._rows, types=tokens.types)[
            : len(self)
        ].map_with_index(lambda number, batch: _with_mask(batch, number * self._rows + rows < last))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.num_windows // self._rows)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return _iterate(self._batches, self._mesh, self._rows, 1, in_bucket=self._in_bucket)


def _with_mask(batch: Batch, counted: Bool[np.ndarray, "1 rows"]) -> Batch:
    mask = batch.get("mask", np.ones(batch["tokens"].shape, bool))
    return {**batch, "mask": mask * counted[..., None]}
