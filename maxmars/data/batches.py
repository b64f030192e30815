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
from jaxtyping import Bool, Int64

from maxmars.config import (
    DataConfig,
    GrainSource,
    MixtureConfig,
    ModelConfig,
    Order,
    PythonSourcesConfig,
    TokenFilesConfig,
    TrainConfig,
)
from maxmars.config.data import TokenOptions
from maxmars.config.user_code import Source
from maxmars.data.formats import check_files, describe, read_description
from maxmars.data.metadata import METADATA
from maxmars.data.own_data import OwnWindows
from maxmars.data.prepare import prepare_python_sources
from maxmars.data.sampling import (
    Interleaving,
    WeightChange,
    process_batches,
    training_numbers,
    validation_numbers,
)
from maxmars.data.token_files import TokenDirectory, TokenFile
from maxmars.data.tokenizer import Vocabulary
from maxmars.data.windows import PACKED, TYPES, Batch, TokenWindows, Types
from maxmars.data.workers import end_with_parent
from maxmars.distributed import processes
from maxmars.distributed.files import is_remote, read_text
from maxmars.distributed.sharding import batch_shards, local_rows, to_device

_LOGGER = logging.getLogger(__name__)
_BUCKET_READS = 4  # batches at a time: an answer may take longer than a step
UNKNOWN_TOKENIZER = GrainSource.tokenizer

Windows = TokenWindows | OwnWindows
"""Windows by number, with the same attributes and methods: of a directory of tokens, or of a user's
function."""

DeviceBatch = dict[str, jax.Array]
"""A global batch on the mesh: `tokens`, int32 [microbatches, rows, max_seq_len + 1], and where the
data has them, arrays of the same shape: `mask` (bool, whether a token counts as a target, or
float32, the weight of its loss; that of the first token of a row is never used), `segment_ids` and
`positions` (int32)."""


@dataclass(frozen=True, kw_only=True)
class DataSplit:
    """One split of the data of a config: the windows of its parts, and how training takes them.

    The windows of a mixture's parts are numbered one part after the other; other data are one part.
    """

    parts: tuple[Windows, ...]
    weights: tuple[float, ...] = (1.0,)
    """Share of each part's windows in the examples."""
    changes: tuple[WeightChange, ...] = ()
    """Changes of the weights; see `WeightedInterleave`."""
    order: Order = "shuffled"
    """Of the windows of a part, in training."""
    num_workers: int = 0
    """Processes that read batches ahead; 0 reads in a thread."""

    @functools.cached_property
    def types(self) -> Types:
        """Names and types of the arrays of a batch."""
        return _union([part.types for part in self.parts])

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of windows of each part."""
        return [len(part) for part in self.parts]

    @functools.cached_property
    def _firsts(self) -> list[int]:
        """Number of each part's first window."""
        return [0, *itertools.accumulate(self.sizes[:-1])]

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def length(self) -> int:
        """Tokens of a window that are predicted."""
        return self.parts[0].length

    @property
    def vocabulary(self) -> Vocabulary:
        """What the ids of the tokens mean: by the first part whose tokenizer is known, as all have
        one tokenizer."""
        vocabularies = [part.vocabulary for part in self.parts]
        known = (v for v in vocabularies if v.tokenizer != UNKNOWN_TOKENIZER)
        return next(known, vocabularies[0])

    @property
    def in_bucket(self) -> bool:
        """Whether some of the tokens are in a bucket."""
        return any(is_remote(file.path) for file in self.files)

    @property
    def files(self) -> list[TokenFile]:
        """The files of all parts, of every split."""
        return [file for part in self.parts for file in part.files]

    def read(self, numbers: Int64[np.ndarray, " windows"]) -> Batch:
        """The arrays [windows, length + 1] of the windows with these numbers, each part read once.

        What a part does not have is filled in: all tokens count as targets, a window is one
        segment, and positions count from 0.

        Raises:
          See `TokenWindows.read`; ValueError also where what a user's function gives is not as it
            should be.
        """
        if len(self.parts) == 1:
            return self.parts[0].read(numbers)
        shape = (len(numbers), self.length + 1)
        batch = {name: np.zeros(shape, dtype) for name, dtype in self.types.items()}
        if "mask" in batch:
            batch["mask"][:] = 1
        if "positions" in batch:
            batch["positions"][:] = np.arange(shape[1])
        part_of = np.searchsorted(self._firsts, numbers, "right") - 1
        for k in np.unique(part_of).tolist():
            rows = part_of == k
            for name, array in self.parts[k].read(numbers[rows] - self._firsts[k]).items():
                batch[name][rows] = array
        return batch

    def training_numbers(self, seed: int) -> grain.MapDataset[int]:
        """The number of the window of each example of training; see `sampling`."""
        return training_numbers(
            self.sizes, self.weights, seed=seed, order=self.order, changes=self.changes
        )

    def digest(self) -> str:
        """Digest of the data, whatever its path; of a mixture, over its parts'."""
        digest, *others = (part.digest() for part in self.parts)
        if others:
            digest = hashlib.sha256("".join([digest, *others]).encode()).hexdigest()
        return digest

    def describe(self) -> dict[str, Any]:
        """Of each of `parts`, JSON-ready: its `name` (of the directory, or of the user's function),
        `weight` and `tokenizer`, and what `TokenWindows.describe` says; and `num_tokens` of all."""
        parts: list[dict[str, Any]] = [
            {
                "name": part.path.name,
                "weight": weight,
                "tokenizer": part.vocabulary.tokenizer,
                **part.describe(),
            }
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]
        return {"parts": parts, "num_tokens": sum(part["num_tokens"] for part in parts)}


def _union(of_all: Sequence[Types]) -> Types:
    """The arrays that some data have; a mask is of weights where one is."""
    names = {name for types in of_all for name in types}
    is_weighted = any(types.get("mask") is np.float32 for types in of_all)
    return {n: np.float32 if n == "mask" and is_weighted else TYPES[n] for n in TYPES if n in names}


def batch_types(config: DataConfig, model: ModelConfig) -> Types:
    """Names and types of the arrays of a batch of training, for a plan: no tokens are opened.

    Data of the user's own are, since only their first element says what they have. Where they are
    not on this machine, they count as tokens alone, and a warning says so.

    Raises:
      ValueError: own data are not as they should be.
    """
    of_parts = [PACKED[config.packing if isinstance(config, TokenOptions) else "none"]]
    for part in _parts(config):
        if isinstance(part, GrainSource):
            try:
                of_parts.append(_own_windows(part, "train", model).types)
            except OSError as error:
                _LOGGER.warning("data.source=%r: planned as tokens alone (%s)", part.source, error)
    return _union(of_parts)


def open_data(
    config: DataConfig, split: str, *, model: ModelConfig, opened: DataSplit | None = None
) -> DataSplit:
    """The windows of a split (`train` or `val`); all processes of a run must call.

    Process 0 looks at the files of a directory for all.

    Args:
      config: where the data are.
      split: which of them.
      model: takes length and bound of the tokens from it.
      opened: another split of the same data, whose directories are not opened again.

    Raises:
      FileNotFoundError: there is no such directory, or nothing in it that can be read.
      ValueError: files are damaged, a directory lacks the split or has too few tokens for a window,
        the parts of a mixture have different tokenizers, or these do not fit the model.
      OSError, ImportError: a bucket cannot be read; see `files.require_access`.
      Functions of the user's own may raise anything; where processes differ in their data, it is a
        ValueError.
    """
    parts, weights, changes = _parts(config), (1.0,), ()
    if isinstance(config, MixtureConfig):
        weights = tuple(part.weight for part in config.parts)
        changes = tuple((c.at_example, c.weights) for c in config.changes)
    parts_before = itertools.repeat(None) if opened is None else opened.parts
    all_windows: list[Windows] = []
    for part, before in zip(parts, parts_before, strict=False):
        if isinstance(part, GrainSource):
            windows: Windows = _own_windows(part, split, model)
            _check_all_have(windows.digest(), f"data.source={part.source!r}, split {split!r}")
        else:
            assert isinstance(config, TokenOptions)  # own data alone are not
            if isinstance(before, TokenWindows):
                directory = before.stream.directory
            else:
                directory = _open_together(part, checksums=config.verify)
            windows = _token_windows(directory, config, split, model)
        all_windows.append(windows)
    _check_tokenizers(all_windows)
    return DataSplit(
        parts=tuple(all_windows),
        weights=weights,
        changes=changes,
        order=config.order,
        num_workers=max((p.num_workers for p in parts if isinstance(p, GrainSource)), default=0),
    )


def _parts(config: DataConfig) -> tuple[TokenFilesConfig | PythonSourcesConfig | GrainSource, ...]:
    return config.parts if isinstance(config, MixtureConfig) else (config,)


def _own_windows(part: GrainSource, split: str, model: ModelConfig) -> OwnWindows:
    return OwnWindows(
        Source.parse(part.source),
        split,
        length=model.max_seq_len,
        vocab_size=model.vocab_size,
        options=part.options,
        tokenizer=part.tokenizer,
    )


def _token_windows(
    directory: TokenDirectory, options: TokenOptions, split: str, model: ModelConfig
) -> TokenWindows:
    vocabulary = directory.vocabulary
    if vocabulary.size > model.vocab_size:
        raise ValueError(
            f"the tokens in {directory.path} have a vocabulary of {vocabulary.size} "
            f"({vocabulary.tokenizer}), more than model.vocab_size={model.vocab_size}; set "
            f"model.vocab_size={vocabulary.size} or prepare the text with another tokenizer."
        )
    is_random = options.order == "random_windows" and split == "train"
    return TokenWindows(
        directory.stream(split),
        model.max_seq_len,
        packing=options.packing,
        stride=1 if is_random else None,
    )


def _open_together(
    tokens: TokenFilesConfig | PythonSourcesConfig, *, checksums: bool
) -> TokenDirectory:
    """`formats.open_directory` in all processes, which all must call, of the same directory.

    Process 0 reads the description and looks at the files for all. On disks the others may see
    other files: only descriptions are compared, or where there are none, samples of the files: see
    `TokenDirectory.digest`. That files are as described is checked by `Verification`, which divides
    them over the hosts.
    """
    if isinstance(tokens, PythonSourcesConfig):
        tokens = TokenFilesConfig(path=str(prepare_python_sources()))
    text = processes.text_from_primary(lambda: read_description(tokens.path))
    directory = describe(tokens, text)
    processes.text_from_primary(lambda: check_files(directory, checksums=checksums))
    if not is_remote(directory.path):
        own = text if processes.is_primary() else read_text(directory.path / METADATA)
        own = directory.digest() if text is None else own or ""
        _check_all_have(hashlib.sha256(own.encode()).hexdigest(), f"{directory.path}")
    return directory


def _check_all_have(digest: str, what: str) -> None:
    """Check that data are the same in every process; all must call."""
    unlike = processes.first_other(digest)
    if unlike is not None:
        process, other, first = unlike
        raise ValueError(
            f"{what}: process {process} has other data than process 0, with the digest "
            f"{other[:16]} and not {first[:16]}; give all hosts the same files."
        )


def vocabulary_hint(tokens: DataSplit, model: ModelConfig) -> str | None:
    """A hint where a model has at least twice the rows that the tokens need; else None."""
    needed = max(part.vocabulary.size for part in tokens.parts)
    if 2 * needed > model.vocab_size:
        return None
    return (
        f"hint: the tokens ({tokens.vocabulary.tokenizer}) have {needed:,} ids, and the model's "
        f"table has {model.vocab_size:,} rows; --model.vocab-size {needed} makes it smaller and "
        "faster"
    )


def _check_tokenizers(parts: Sequence[Windows]) -> None:
    known = [part for part in parts if part.vocabulary.tokenizer != UNKNOWN_TOKENIZER]
    for pair in itertools.pairwise(known):
        first, other = (part.vocabulary for part in pair)
        digests = {first.digest, other.digest} - {None}
        if first.tokenizer != other.tokenizer or len(digests) > 1:
            both = " and ".join(
                f"{part.path} ({part.vocabulary.tokenizer}, {part.vocabulary.digest})"
                for part in pair
            )
            raise ValueError(
                f"the parts of a mixture need one tokenizer, but {both} have two; "
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
      config: takes seed and batch sizes from it.
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
        tokens: DataSplit,
        config: TrainConfig,
        mesh: Mesh,
        *,
        position: int = 0,
        prefetch_steps: int = 4,
    ) -> None:
        """Start at `position`."""
        self._batch_size = config.global_batch_size
        _check_batch(tokens, self._batch_size)
        self.position = position
        examples = tokens.training_numbers(config.seed)
        rows = local_rows(mesh, (config.microbatches, config.microbatch_size))
        self._batches: grain.DatasetIterator[DeviceBatch] | None = _iterate(
            process_batches(examples, tokens.read, rows, self._batch_size, position),
            mesh,
            config.microbatch_size,
            prefetch_steps,
            in_bucket=tokens.in_bucket,
            num_workers=tokens.num_workers,
        )

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


def _check_batch(tokens: DataSplit, batch_size: int) -> None:
    """Check that no part repeats itself within one batch."""
    stages = [tokens.weights, *(weights for _, weights in tokens.changes)]
    shares = np.max([Interleaving(weights).counts(batch_size) for weights in stages], axis=0)
    for part, share in zip(tokens.parts, shares.tolist(), strict=True):
        if len(part) < share:
            of_it = "" if share == batch_size else f", of which it has {share}"
            raise ValueError(
                f"split {part.split!r} of {part.path} has {len(part)} windows "
                f"of model.max_seq_len={part.length} tokens, too few for one batch of "
                f"global_batch_size={batch_size}{of_it}; prepare more text or lower one of the two."
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
      tokens: the validation tokens; see `validation_numbers` for those of a mixture.
      mesh: where the batches go.
      num_windows: number of windows to take.
      batch_size: rows of a batch, rounded up to what the mesh divides.

    Attributes:
      num_windows: windows scored: those asked for, or all where the split has fewer.
    """

    def __init__(self, tokens: DataSplit, mesh: Mesh, *, num_windows: int, batch_size: int) -> None:
        """Find out how many windows and rows there are; read none."""
        self._in_bucket = tokens.in_bucket
        numbers = validation_numbers(tokens.sizes, tokens.weights)
        self.num_windows = last = min(num_windows, len(numbers))
        self._mesh, self._rows = mesh, validation_rows(batch_size, mesh)
        filled: grain.MapDataset[Any] = grain.MapDataset.range(len(self) * self._rows).map(
            lambda index: numbers[min(index, last - 1)]
        )
        rows = local_rows(mesh, (1, self._rows))
        self._batches = process_batches(filled, tokens.read, rows, self._rows)[
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
