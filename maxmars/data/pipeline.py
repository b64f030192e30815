"""From a config to batches on the mesh: the token stream of training, and the validation windows.

The stream of training examples is a pure function of (seed, example index), and row r of step s is
example `s * global_batch_size + r`. So the same tokens reach step s for every mesh, number of
processes, microbatching and prefetch, and a resume anywhere continues them exactly.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32, Integer

from maxmars.config import GPT2Config, TrainConfig
from maxmars.data.examples import (
    Examples,
    Interleaving,
    Place,
    ValidationWindows,
    training_examples,
)
from maxmars.data.formats import open_split
from maxmars.data.local_copy import local_copy
from maxmars.data.prepare import prepare_python_sources
from maxmars.data.streams import TokenStream
from maxmars.data.tokenizer import ByteTokenizer, GPT2Tokenizer
from maxmars.data_config import DataConfig, MixtureConfig, PythonSourcesConfig, TokenShardsConfig
from maxmars.sharding import batch_shards, local_rows, to_device

_END_OF_TEXT = {t.name: t.eot for t in (ByteTokenizer, GPT2Tokenizer)}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SplitTokens:
    """The opened streams of one split that a config means, and their weights."""

    streams: tuple[TokenStream, ...]
    weights: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer, which is that of all streams."""
        return self.streams[0].tokenizer


def open_data(config: DataConfig, split: str, *, model: GPT2Config) -> SplitTokens:
    """The tokens of a split (`train` or `val`), copied and verified first if the config says so.

    Raises:
      FileNotFoundError: there is no such directory, or nothing in it that can be read.
      ValueError: files are damaged, a directory lacks the split, the parts of a mixture have
        different tokenizers, or these do not fit the model.
      OSError: `cache_dir` has too little space.
    """
    streams, weights = [], []
    for directory, weight in _directories(config):
        streams.append(open_split(directory, split))
        weights.append(weight)
    for stream in streams:
        _check_vocabulary(stream, model)
    _check_tokenizers(streams)
    if config.verify:
        for stream in streams:
            stream.verify()
    return SplitTokens(streams=tuple(streams), weights=tuple(weights))


def _directories(config: DataConfig) -> Iterator[tuple[Path, float]]:
    """Directories of tokens that a config means, prepared or copied if need be, and weights."""
    match config:
        case TokenShardsConfig():
            yield _local(config.path, config.cache_dir), 1.0
        case MixtureConfig():
            for part in config.parts:
                yield _local(part.path, config.cache_dir), part.weight
        case PythonSourcesConfig():
            yield prepare_python_sources(), 1.0


def _local(path: str, cache_dir: str | None) -> Path:
    directory = Path(path).expanduser()
    return directory if cache_dir is None else local_copy(directory, Path(cache_dir).expanduser())


def _check_vocabulary(stream: TokenStream, model: GPT2Config) -> None:
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


def _check_tokenizers(streams: Sequence[TokenStream]) -> None:
    first = streams[0]
    for other in streams[1:]:
        digests = {first.tokenizer_digest, other.tokenizer_digest} - {None}
        if first.tokenizer != other.tokenizer or len(digests) > 1:
            found = [f"{s.directory} ({s.tokenizer}, {s.tokenizer_digest})" for s in (first, other)]
            raise ValueError(
                f"the parts of a mixture need one tokenizer, but {' and '.join(found)} have two; "
                "prepare the text of one again with the tokenizer of the other."
            )


class TrainRows:
    """The rows of each step that one process needs, in plain NumPy.

    Why not `grain.experimental.ElasticIterator`, which also keeps one integer of state: it deals
    process p of n the rows p, p + n, p + 2n, ... Which rows a process needs is up to the mesh, and
    where the batch axes do not split over processes (`tensor` across hosts) several need the same.

    Args:
      examples: see `training_examples`.
      rows: row numbers in the global batch, [microbatches, local rows] (see `local_rows`).
      global_batch_size: examples a step.
      position: example index of row 0 of the first step.
    """

    def __init__(
        self,
        examples: Examples,
        rows: Integer[np.ndarray, "microbatches rows"],
        *,
        global_batch_size: int,
        position: int = 0,
    ) -> None:
        """Rows `rows` of every step from `position` on."""
        self._examples = examples
        self._rows = rows
        self._global_batch_size = global_batch_size
        self._position = position

    def __iter__(self) -> Iterator[Int32[np.ndarray, "microbatches rows window"]]:
        """Itself."""
        return self

    def __next__(self) -> Int32[np.ndarray, "microbatches rows window"]:
        """The rows of the next step; there always is one."""
        windows = [self._examples[self._position + row] for row in self._rows.ravel().tolist()]
        self._position += self._global_batch_size
        return np.stack(windows).reshape(*self._rows.shape, -1)


class ReadAhead(Generic[T]):
    """An endless iterator over what a function returns, called ahead of time in a thread.

    One thread hides the latency of disk and transfer; more only contend for the interpreter. An
    error of the function is raised where its result would have been taken.
    """

    def __init__(self, produce: Callable[[], T], depth: int) -> None:
        """Keep `depth` results ready; 0 calls when asked."""
        self._produce = produce
        self._executor = ThreadPoolExecutor(1, "maxmars-data") if depth else None
        self._ready: collections.deque[Future[T]] = collections.deque()
        for _ in range(depth):
            self._submit()

    def _submit(self) -> None:
        if self._executor is not None:
            self._ready.append(self._executor.submit(self._produce))

    def __iter__(self) -> Iterator[T]:
        """Itself."""
        return self

    def __next__(self) -> T:
        """The next result; there always is one."""
        if self._executor is None:
            return self._produce()
        result = self._ready.popleft().result()
        self._submit()
        return result

    def close(self) -> None:
        """End the thread, after the call that it is in."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


class TrainBatches:
    """Iterator over the batches of training, on the mesh.

    Each is an int32 array [num_microbatches, microbatch_size, max_seq_len + 1]: microbatch j is the
    j-th run of rows of the global batch. A thread reads ahead and puts batches on the devices while
    the steps before run; that does not show in `position`.

    Args:
      tokens: the training tokens.
      config: takes seed, batch sizes, max_seq_len and data.order from it.
      mesh: where the batches go.
      position: index of the first example, for a resume. It counts examples, not steps, so that a
        run that continues with another batch size repeats and skips nothing.
      prefetch_steps: batches to have ready on the devices; 0 reads when asked.

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
        self._global_batch_size = config.global_batch_size
        self._position = position
        self._examples = training_examples(
            tokens.streams,
            tokens.weights,
            length=config.model.max_seq_len,
            seed=config.seed,
            order=config.data.order,
        )
        rows = TrainRows(
            self._examples,
            local_rows(mesh, (config.num_microbatches, config.microbatch_size)),
            global_batch_size=config.global_batch_size,
            position=position,
        )

        def batch() -> jax.Array:
            # Waits for the transfer, so that a batch that is ready is one on the devices.
            return to_device(mesh, next(rows), config.microbatch_size).block_until_ready()

        self._batches = ReadAhead(batch, prefetch_steps)

    @property
    def position(self) -> int:
        """Index of the next batch's first example: the state to save in a checkpoint."""
        return self._position

    def place(self, example: int) -> Place:
        """Where the tokens of an example, of any step, are."""
        return self._examples.place(example)

    def __iter__(self) -> Iterator[jax.Array]:
        """Itself."""
        return self

    def __next__(self) -> Int32[jax.Array, "microbatches rows window"]:
        """The next batch; there always is one."""
        batch = next(self._batches)
        self._position += self._global_batch_size
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()


def _check_batch(tokens: SplitTokens, config: TrainConfig) -> None:
    """Check that no stream repeats itself within one batch."""
    length, batch_size = config.model.max_seq_len, config.global_batch_size
    shares = Interleaving(tokens.weights).counts(batch_size)
    for stream, share in zip(tokens.streams, shares, strict=True):
        num_windows = (stream.num_tokens - 1) // length
        if num_windows < share:
            part = "" if share == batch_size else f", of which it has {share}"
            raise ValueError(
                f"split {stream.split!r} of {stream.directory} has {stream.num_tokens} tokens, too "
                f"few for one batch of global_batch_size={batch_size} sequences of "
                f"model.max_seq_len={length} tokens{part}: that makes {num_windows} sequences. "
                "Prepare more text or lower one of the two."
            )


def validation_rows(batch_size: int, mesh: Mesh) -> int:
    """Sequences in a batch of the evaluation: `batch_size`, rounded up to divide over a mesh."""
    parts = batch_shards(mesh)
    return -(-batch_size // parts) * parts


class ValidationBatches:
    """The first windows of the validation split, in order, on the mesh.

    Each iteration yields pairs of tokens, int32 [1, rows, length + 1], and a mask, float32
    [1, rows], which is 0 for the rows that only fill up the last batch. The windows are the same
    on each mesh; only the filling differs.

    Args:
      tokens: the validation tokens; see `ValidationWindows` for those of a mixture.
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
        self._windows = ValidationWindows(tokens.streams, tokens.weights, length)
        self._mesh = mesh
        self.num_windows = min(num_windows, len(self._windows))
        self._rows = validation_rows(batch_size, mesh)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.num_windows // self._rows)

    def __iter__(
        self,
    ) -> Iterator[tuple[Int32[jax.Array, "1 rows window"], Float32[jax.Array, "1 rows"]]]:
        """The batches, from the first window on."""
        rows = local_rows(self._mesh, (1, self._rows))
        for batch in range(len(self)):
            index = batch * self._rows + rows
            real = index < self.num_windows
            windows = np.where(real, index, 0).ravel().tolist()
            tokens = np.stack([self._windows[i] for i in windows])
            yield (
                to_device(self._mesh, tokens[None], self._rows),
                to_device(self._mesh, real.astype(np.float32), self._rows),
            )
