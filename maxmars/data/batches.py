"""From a config to batches on the mesh: the token stream of training, and the validation windows.

The stream of training examples is a pure function of (seed, example index), and row r of step s is
example `s * global_batch_size + r`. So step s gets the same tokens on every mesh and number of
processes, with any microbatching and prefetching. The state of the data is one integer, and a
resume continues the stream exactly.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh
from jaxtyping import Bool, Int64

from maxmars.config import (
    DataConfig,
    GrainConfig,
    GrainSource,
    MixtureConfig,
    ModelConfig,
    Order,
    PythonSourcesConfig,
    TokenFilesConfig,
    TokenShardsConfig,
    TrainConfig,
    ValidationSet,
)
from maxmars.config.data import TokenOptions
from maxmars.config.errors import about
from maxmars.config.user_code import Source
from maxmars.data.formats import check_files, describe, read_description
from maxmars.data.metadata import METADATA, NoSuchSplitError
from maxmars.data.own_data import OwnWindows
from maxmars.data.prepare import prepare_python_sources, prepare_validation_text
from maxmars.data.sampling import (
    Interleaving,
    WeightChange,
    process_batches,
    training_numbers,
    validation_numbers,
)
from maxmars.data.token_files import TokenDirectory, TokenFile
from maxmars.data.tokenizer import Tokenizer, Vocabulary
from maxmars.data.windows import PACKED, TYPES, Batch, TokenWindows, Types
from maxmars.data.workers import end_with_parent
from maxmars.distributed import processes
from maxmars.distributed.files import is_remote, read_text, resolve
from maxmars.distributed.sharding import batch_shards, local_rows, to_device

_LOGGER = logging.getLogger(__name__)
_BUCKET_READS = 4  # batches at a time: an answer may take longer than a step
UNKNOWN_TOKENIZER = GrainSource.tokenizer

Windows = TokenWindows | OwnWindows
"""Windows by number: of a directory of tokens, or of a user's function. Both classes have the same
attributes and methods."""

DeviceBatch = dict[str, jax.Array]
"""A global batch on the mesh: `tokens`, int32 [microbatches, rows, max_seq_len + 1], and those
arrays of the same shape that the data has: `mask` (bool: whether a token is a target; or float32:
the weight of its loss; unused for the first token of a row), `segment_ids` and `positions`
(int32)."""


@dataclass(frozen=True, kw_only=True)
class DataSplit:
    """One split of the data of a config: the windows of its parts, and their order in training.

    A mixture has several parts, whose windows are numbered one part after the other; other data has
    one part.
    """

    parts: tuple[Windows, ...]
    weights: tuple[float, ...] = (1.0,)
    """Weight of each part in the mixture; only ratios count."""
    changes: tuple[WeightChange, ...] = ()
    """Changes of the weights; see `WeightedInterleave`."""
    order: Order = "shuffled"
    """Order of a part's windows in training."""
    num_workers: int = 0
    """Processes that prefetch batches; 0 prefetches in a thread."""

    @functools.cached_property
    def types(self) -> Types:
        """Names and types of the arrays of a batch."""
        return _merge_types([part.types for part in self.parts])

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
        """The vocabulary of the first part with a known tokenizer; all parts share one."""
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

        An array that only other parts have gets its neutral values: all tokens are targets, a
        window is one segment, and positions count from 0.

        Raises:
          See `TokenWindows.read`, and `ExampleCheck.read` for a user's function.
        """
        if len(self.parts) == 1:  # the usual case, without a copy
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
        """Digest of the data, wherever it lies; for a mixture, over the digests of its parts."""
        digest, *others = (part.digest() for part in self.parts)
        if others:
            digest = hashlib.sha256("".join([digest, *others]).encode()).hexdigest()
        return digest

    def describe(self) -> dict[str, Any]:
        """JSON-ready: `num_tokens` of all parts, and of each of `parts` its `name` (the file name
        of the directory or the function), `weight`, `tokenizer` and `TokenWindows.describe`."""
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


def _merge_types(parts: Sequence[Types]) -> Types:
    """Names and types of the arrays that any part has; `mask` is float32 if that of any part is."""
    names = {name for types in parts for name in types}
    is_weighted = any(types.get("mask") is np.float32 for types in parts)
    return {n: np.float32 if n == "mask" and is_weighted else TYPES[n] for n in TYPES if n in names}


def batch_types(config: DataConfig, model: ModelConfig) -> Types:
    """Names and types of the arrays of a training batch, for a plan: no tokens are opened.

    A user's function is called, since only its first example shows which arrays it has. If its data
    is not on this machine, the plan takes it for tokens alone, with a warning.

    Raises:
      ValueError: see `OwnWindows`.
    """
    types = [PACKED[config.packing if isinstance(config, TokenOptions) else "none"]]
    for part in _parts(config):
        if isinstance(part, GrainSource):
            try:
                types.append(_own_windows(part, "train", model).types)
            except OSError as error:
                _LOGGER.warning("data.source=%r: planned as tokens alone (%s)", part.source, error)
    return _merge_types(types)


def open_data(
    config: DataConfig, split: str, *, model: ModelConfig, opened: DataSplit | None = None
) -> DataSplit:
    """The windows of a split (`train` or `val`); all processes of a run must call.

    Args:
      config: the data of the run.
      split: name of the split.
      model: has the length of a window, and the bound of the tokens.
      opened: another split of the same data; its directories are not opened again.

    Raises:
      FileNotFoundError: there is no such directory, or no tokens in it.
      ValueError: files are damaged, a directory lacks the split or has too few tokens for a window,
        the parts of a mixture have different tokenizers, the vocabulary is larger than the model's,
        or processes have different data.
      OSError, ImportError: a bucket cannot be read; see `files.require_access`.
      Any other exception was raised by a user's function.
    """
    parts, weights, changes = _parts(config), (1.0,), ()
    if isinstance(config, MixtureConfig):
        weights = tuple(part.weight for part in config.parts)
        changes = tuple((c.at_example, c.weights) for c in config.changes)
    parts_before = itertools.repeat(None) if opened is None else opened.parts
    all_windows: list[Windows] = []
    for part, before in zip(parts, parts_before, strict=False):  # `repeat` is endless
        if isinstance(part, GrainSource):
            windows: Windows = _own_windows(part, split, model)
            _check_all_have(windows.digest(), f"data.source={part.source!r}, split {split!r}")
        else:
            assert isinstance(config, TokenOptions)  # as every config with a part of tokens is
            if isinstance(before, TokenWindows):  # one look at the files for `train` and `val`
                directory = before.stream.directory
            else:
                directory = _open_together(part, checksums=config.verify)
            windows = _token_windows(directory, config, split, model)
        all_windows.append(windows)
    _check_tokenizers(all_windows, "the parts of a mixture need")
    return DataSplit(
        parts=tuple(all_windows),
        weights=weights,
        changes=changes,
        order=config.order,
        num_workers=max((p.num_workers for p in parts if isinstance(p, GrainSource)), default=0),
    )


def open_validation(
    data: DataConfig | None,
    sets: Sequence[ValidationSet],
    tokenizer: Callable[[], Tokenizer],
    model: ModelConfig,
    *,
    files: Mapping[str, Any] = MappingProxyType({}),
    opened: DataSplit | None = None,
) -> dict[str, DataSplit]:
    """The split `val` of the data of a run, as "", and of sets by name; see `open_data`.

    Args:
      data: of the run; they need no split `val` where there are sets. None leaves them out.
      sets: others, which are read as these are.
      tokenizer: gives that of the model, for sets that are text.
      model: see `open_data`.
      files: further fields of `TokenFilesConfig` for directories among the sets.
      opened: the split `train` of `data`, whose tokenizer the sets must have.
    """
    splits = {}
    if data is not None:
        with contextlib.suppress(*[NoSuchSplitError] * bool(sets)):
            splits[""] = open_data(data, "val", model=model, opened=opened)
    options: dict[str, Any] = {"verify": data is None or data.verify}
    if isinstance(data, TokenOptions):
        options["packing"] = data.packing
    for one in sets:
        with about(one.spec):
            if isinstance(one.place, Source):
                config: DataConfig = GrainConfig(source=one.place)
            elif (file := resolve(one.place)).is_file():
                path = prepare_validation_text(file, tokenizer())
                config = TokenShardsConfig(path=str(path), **options)
            else:
                config = TokenShardsConfig(path=one.place, **options, **files)
            splits[one.name] = split = open_data(config, "val", model=model)
        if opened is not None:
            _check_tokenizers([*opened.parts, *split.parts], "training and validation need")
    return splits


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
    # Validation reads the same windows whatever the order of training.
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
    """`formats.open_directory`, once for all processes; all must call.

    Process 0 reads the description and checks the files. On a disk, other processes may see other
    files: their descriptions are compared, or without `meta.json` their `TokenDirectory.digest`.
    Whether the files match their checksums, `Verification` finds out while the run trains.
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
    """Check that every process has data with the same digest; all must call."""
    unlike = processes.first_mismatch(digest)
    if unlike is not None:
        process, other, first = unlike
        raise ValueError(
            f"{what}: process {process} has other data than process 0, with the digest "
            f"{other[:16]} and not {first[:16]}; give all hosts the same files."
        )


def vocabulary_hint(tokens: DataSplit, model: ModelConfig) -> str | None:
    """A hint if a model's table has at least twice the rows that the tokens need; else None."""
    needed = max(part.vocabulary.size for part in tokens.parts)
    if 2 * needed > model.vocab_size:
        return None
    return (
        f"hint: the tokens ({tokens.vocabulary.tokenizer}) have {needed:,} ids, and the model's "
        f"table has {model.vocab_size:,} rows; --model.vocab-size {needed} makes it smaller and "
        "faster"
    )


def _check_tokenizers(parts: Sequence[Windows], who: str) -> None:
    known = [part for part in parts if part.vocabulary.tokenizer != UNKNOWN_TOKENIZER]
    for pair in itertools.pairwise(known):
        first, other = (part.vocabulary for part in pair)
        digests = {first.digest, other.digest} - {None}  # other programs' files may have none
        if first.tokenizer != other.tokenizer or len(digests) > 1:
            both = " and ".join(
                f"{part.path} ({part.vocabulary.tokenizer}, {part.vocabulary.digest})"
                for part in pair
            )
            raise ValueError(
                f"{who} one tokenizer, but {both} have two; "
                "prepare the text of one again with the tokenizer of the other."
            )


class TrainBatches:
    """Iterator over the batches of training, on the mesh; see `DeviceBatch`.

    The global batch is divided into microbatches of consecutive rows. A thread prefetches batches
    to the devices; batches that wait there do not count in `position`.

    Why not Grain's own checkpoints: they count batches, and have one file per process, which
    another number of processes cannot read.

    Args:
      tokens: the split for training.
      config: has the seed and the batch sizes.
      mesh: the mesh of the batches.
      position: index of the first example, for a resume. It counts examples, not steps, so that a
        run that continues with another batch size repeats and skips nothing.
      prefetch_steps: batches to have ready on the devices; 0 reads each at its step.

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
        """The next batch; the stream is endless."""
        if self._batches is None:
            raise ValueError("these batches are closed.")
        batch = next(self._batches)
        self.position += self._batch_size
        return batch

    def close(self) -> None:
        """Stop prefetching, and end the thread."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None  # collected at exit, it would print an exception that Python ignores


def _iterate(
    batches: grain.MapDataset[Batch],
    mesh: Mesh,
    rows: int,
    prefetch_steps: int,
    *,
    in_bucket: bool,
    num_workers: int = 0,
) -> grain.DatasetIterator[DeviceBatch]:
    """Global batches on the mesh from the batches of each process, prefetched in a thread.

    Reading from a disk and the transfer share one thread: more would only contend for the
    interpreter. From a bucket, several batches are read at the same time. With workers, each of
    these processes reads every `num_workers`-th batch.
    """
    reads = _BUCKET_READS if in_bucket and prefetch_steps else 0
    local = batches.to_iter_dataset(
        grain.ReadOptions(num_threads=reads, prefetch_buffer_size=reads)
    )
    if num_workers and prefetch_steps:
        flags.FLAGS.mark_as_parsed()  # Grain hands the flags of Abseil to its workers
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        local = local.mp_prefetch(options, worker_init_fn=lambda *_: end_with_parent())
    device_batches = local.map(functools.partial(_to_devices, mesh, rows))
    if prefetch_steps == 0:
        return iter(device_batches)
    prefetched = device_batches.pipe(
        grain.experimental.ThreadPrefetchIterDataset, prefetch_buffer_size=prefetch_steps
    )
    iterator = iter(prefetched)
    iterator.start_prefetch()
    return iterator


def _to_devices(mesh: Mesh, rows: int, batch: Batch) -> DeviceBatch:
    arrays = {name: to_device(mesh, local, rows) for name, local in batch.items()}
    # This thread waits for the transfer, so that the training loop does not.
    return jax.block_until_ready(arrays)


def _check_batch(tokens: DataSplit, batch_size: int) -> None:
    """Check that no part repeats a window within one batch."""
    # A repeated window would count twice in one gradient. Any weights of the run must fit.
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
    """Sequences in a validation batch: `batch_size`, rounded up to the mesh's shards of a batch."""
    parts = batch_shards(mesh)
    return -(-batch_size // parts) * parts


class ValidationBatches:
    """The first windows of the validation split, in order, on the mesh.

    Each iteration yields batches with one microbatch (see `DeviceBatch`). Every batch has a `mask`,
    which is False for the rows that pad the last batch. The windows are the same on each mesh; only
    the padding differs.

    Args:
      tokens: the split for validation; see `validation_numbers` for a mixture.
      mesh: the mesh of the batches.
      num_windows: number of windows to take.
      batch_size: rows of a batch; see `validation_rows`.

    Attributes:
      num_windows: windows scored: `num_windows`, or all if the split has fewer.
    """

    def __init__(self, tokens: DataSplit, mesh: Mesh, *, num_windows: int, batch_size: int) -> None:
        """Count the windows and rows; read none."""
        self._in_bucket = tokens.in_bucket
        numbers = validation_numbers(tokens.sizes, tokens.weights)
        self.num_windows = last = min(num_windows, len(numbers))
        self._mesh, self._rows = mesh, validation_rows(batch_size, mesh)
        # The last window, repeated, pads the last batch; its mask is False there.
        padded: grain.MapDataset[Any] = grain.MapDataset.range(len(self) * self._rows).map(
            lambda index: numbers[min(index, last - 1)]
        )
        rows = local_rows(mesh, (1, self._rows))
        self._batches = process_batches(padded, tokens.read, rows, self._rows)[
            : len(self)
        ].map_with_index(lambda number, batch: _with_mask(batch, number * self._rows + rows < last))

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.num_windows // self._rows)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return _iterate(self._batches, self._mesh, self._rows, 1, in_bucket=self._in_bucket)


def _with_mask(batch: Batch, counted: Bool[np.ndarray, "1 rows"]) -> Batch:
    # A product with booleans keeps the dtype of the mask: booleans or weights.
    mask = batch.get("mask", np.ones(batch["tokens"].shape, bool))
    return {**batch, "mask": mask * counted[..., None]}
