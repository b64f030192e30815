"""From a config to batches on the mesh: the token stream of training, and the validation windows.

The stream of training examples is a pure function of (seed, example index), and row r of step s is
example `s * global_batch_size + r`. So the same tokens reach step s for every mesh, number of
processes, microbatching and prefetch, and a resume anywhere continues them exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int32, Integer

from maxmars.config import DataConfig, PythonSourcesConfig, TokenShardsConfig, TrainConfig
from maxmars.data.prepare import prepare_python_sources
from maxmars.data.sources import TokenShards, TokenWindows
from maxmars.sharding import batch_shards, local_rows, to_device


def data_directory(config: DataConfig) -> Path:
    """Directory of token shards that a config means; prepared first if it can be.

    Raises:
      ValueError: prepared data in the cache is damaged.
    """
    match config:
        case TokenShardsConfig():
            return Path(config.path).expanduser()
        case PythonSourcesConfig():
            return prepare_python_sources()


def open_split(config: DataConfig, split: str, *, model_vocab_size: int) -> TokenShards:
    """The tokens of a split (`train` or `val`), verified if the config says so.

    Raises:
      FileNotFoundError: there is no such directory.
      ValueError: its files are damaged, it lacks the split, or the tokens have a larger vocabulary
        than the model.
    """
    shards = TokenShards(data_directory(config), split)
    if shards.vocab_size > model_vocab_size:
        raise ValueError(
            f"the tokens in {shards.directory} have a vocabulary of {shards.vocab_size} "
            f"({shards.tokenizer}), more than model.vocab_size={model_vocab_size}; set "
            f"model.vocab_size={shards.vocab_size} or prepare the text with another tokenizer."
        )
    if config.verify:
        shards.verify()
    return shards


def training_examples(windows: TokenWindows, *, seed: int, shuffle: bool) -> grain.MapDataset:
    """The endless stream of training windows, by example index.

    Every run of `len(windows)` examples from a multiple of it is one epoch: each window once, in a
    new random order if `shuffle`, else in the order of the text.
    """
    dataset = grain.MapDataset.source(windows)
    if shuffle:
        # Not shuffle(seed=seed): epoch e of seed s would then be epoch 0 of seed s + e.
        dataset = dataset.seed(seed).shuffle()
    return dataset.repeat()


class TrainRows:
    """The rows of each step that one process needs, by index, in plain NumPy.

    Why not `grain.experimental.ElasticIterator`, which also keeps one integer of state: it deals
    process p of n the rows p, p + n, p + 2n, ... Which rows a process needs is up to the mesh, and
    where the batch axes do not split over processes (`tensor` across hosts) several need the same.

    Args:
      examples: see `training_examples`.
      rows: row numbers in the global batch, [microbatches, local rows] (see `local_rows`).
      global_batch_size: examples a step.
      position: example index of row 0 of step 0.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
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

    def __len__(self) -> int:
        """As good as endless."""
        return sys.maxsize

    def __getitem__(self, index: int) -> Int32[np.ndarray, "microbatches rows window"]:
        """The rows of step `index`, counted from `position`."""
        first = self._position + index * self._global_batch_size
        windows = [self._examples[first + row] for row in self._rows.ravel().tolist()]
        return np.stack(windows).reshape(*self._rows.shape, -1)


class TrainBatches:
    """Iterator over the batches of training, on the mesh.

    Each is an int32 array [num_microbatches, microbatch_size, max_seq_len + 1]: microbatch j is the
    j-th run of rows of the global batch. A thread reads ahead, which does not show in `position`.

    Args:
      shards: the training tokens.
      config: takes seed, batch sizes, max_seq_len and data.shuffle from it.
      mesh: where the batches go.
      position: index of the first example, for a resume. It counts examples, not steps, so that a
        run that continues with another batch size repeats and skips nothing.
      prefetch_steps: batches to read ahead; 0 reads when asked.

    Raises:
      ValueError: there are too few tokens for one batch.
    """

    def __init__(
        self,
        shards: TokenShards,
        config: TrainConfig,
        mesh: Mesh,
        *,
        position: int = 0,
        prefetch_steps: int = 4,
    ) -> None:
        """Start at `position`."""
        windows = TokenWindows(shards, config.model.max_seq_len)
        _check_batch(shards, windows, config)
        self._mesh = mesh
        self._microbatch_size = config.microbatch_size
        self._global_batch_size = config.global_batch_size
        self._position = position
        rows = TrainRows(
            training_examples(windows, seed=config.seed, shuffle=config.data.shuffle),
            local_rows(mesh, (config.num_microbatches, config.microbatch_size)),
            global_batch_size=config.global_batch_size,
            position=position,
        )
        # One thread hides the latency of the disk; more only contend for the interpreter.
        reading = grain.ReadOptions(
            num_threads=min(prefetch_steps, 1), prefetch_buffer_size=prefetch_steps
        )
        self._local: Any = iter(grain.MapDataset.source(rows).to_iter_dataset(reading))

    @property
    def position(self) -> int:
        """Index of the next batch's first example: the state to save in a checkpoint."""
        return self._position

    def __iter__(self) -> Iterator[jax.Array]:
        """Itself."""
        return self

    def __next__(self) -> Int32[jax.Array, "microbatches rows window"]:
        """The next batch; there always is one."""
        local = next(self._local)
        self._position += self._global_batch_size
        return to_device(self._mesh, local, self._microbatch_size)

    def close(self) -> None:
        """Stop reading ahead."""
        self._local.close()


def _check_batch(shards: TokenShards, windows: TokenWindows, config: TrainConfig) -> None:
    if len(windows) < config.global_batch_size:
        raise ValueError(
            f"split {shards.split!r} of {shards.directory} has {shards.num_tokens} tokens, too few "
            f"for one batch of global_batch_size={config.global_batch_size} sequences of "
            f"model.max_seq_len={config.model.max_seq_len} tokens: that makes {len(windows)} "
            "sequences. Prepare more text or lower one of the two."
        )


class ValidationBatches:
    """The first `eval.num_windows` windows of the validation split, in order, on the mesh.

    Each iteration yields pairs of tokens, int32 [1, rows, max_seq_len + 1], and a mask, float32
    [1, rows], which is 0 for the rows that only fill up the last batch. The windows are the same
    on each mesh; only the filling differs.

    Args:
      shards: the validation tokens.
      config: takes the eval group, eval_batch_size and max_seq_len from it.
      mesh: where the batches go.

    Attributes:
      num_windows: windows scored: `eval.num_windows`, or all where the split has fewer.

    Raises:
      ValueError: there are too few tokens for one window.
    """

    def __init__(self, shards: TokenShards, config: TrainConfig, mesh: Mesh) -> None:
        """Find out how many windows and rows there are; read none."""
        self._windows = TokenWindows(shards, config.model.max_seq_len)
        self._mesh = mesh
        self.num_windows = min(config.eval.num_windows, len(self._windows))
        parts = batch_shards(mesh)
        self._rows = -(-config.eval_batch_size // parts) * parts

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
