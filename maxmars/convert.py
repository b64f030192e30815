"""Models to and from Hugging Face directories."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxmars import hf, sharding
from maxmars.checkpoint import StoredModel, save_params, stream_model
from maxmars.config import GPT2Config, MeshConfig
from maxmars.data.partial_directory import PartialDirectory
from maxmars.data.sources import LateStatus
from maxmars.data.tokenizer import Tokenizer, store_tokenizer
from maxmars.model import graph_and_abstract_params
from maxmars.trained_model import (
    CHECKPOINTS,
    TOKENIZER,
    RunTarget,
    find_target,
    open_trained_model,
)

_OTHER_BYTES = 20_000_000  # of tokenizer files, configuration and headers, generously


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What `export_model` wrote."""

    config: GPT2Config
    name: str
    """Of the model."""
    num_bytes: int
    """Of the weights."""
    num_files: int
    """Files of weights."""
    notes: list[str]
    """What differs from the model, in sentences."""


def export_model(
    target: str | Path,
    out: str | Path,
    *,
    dtype: hf.Dtype = "float32",
    max_file_bytes: int = hf.MAX_FILE_BYTES,
) -> Exported:
    """Write a model as a Hugging Face directory; one parameter at a time is in memory.

    `out` appears complete or not at all. Vocabulary padding is left out, and biases that the model
    has not are written as zeros.

    Args:
      target: see `maxmars.trained_model.open_trained_model`.
      out: directory to make.
      dtype: type of the weights in it.
      max_file_bytes: the weights are split into files of this size at most.

    Raises:
      FileExistsError: `out` exists.
      FileNotFoundError, ValueError: see `open_trained_model`; a tokenizer is not necessary.
      OSError: the disk is too small or cannot be written to.
    """
    found, out = find_target(target), _local(out)
    with _in_the_making(out) as directory, LateStatus() as status:
        export = _Export(out, directory, dtype, max_file_bytes, status)
        if isinstance(found, RunTarget):

            def write(model: StoredModel) -> Exported:
                name = found.name(model.step)
                return export.write(model.config, name, found.tokenizer, _layers_in(model))

            return stream_model(found.checkpoints, write, found.step)
        config = hf.load_config(found.directory)
        weights = hf.open_weights(found.directory, config)
        return export.write(
            config,
            found.directory.name,
            lambda: found.tokenizer(config),
            lambda layout: (weights[name].read() for name in layout.names),
        )


def import_model(source: str | Path, out: str | Path) -> GPT2Config:
    """Make a directory with a checkpoint of a Hugging Face model, and its tokenizer.

    It can be used wherever a run's directory can, except that there is no training to continue.
    `out` appears complete or not at all.

    Args:
      source: Hugging Face directory, see `maxmars.hf.load_params`.
      out: directory to make.

    Returns:
      The model.

    Raises:
      FileExistsError: `out` exists.
      FileNotFoundError, ImportError: the model has no weights, or no tokenizer.
      ValueError: it is no Hugging Face directory, or what is in it is not a sound GPT-2.
      OSError: the disk is too small or cannot be written to.
    """
    found, out = find_target(source), _local(out)
    if isinstance(found, RunTarget):
        raise ValueError(f"{source} is a run of maxmars already; there is nothing to import.")
    mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    with _in_the_making(out) as directory:
        model = open_trained_model(source, mesh=mesh)
        _check_space(out, directory, sharding.bytes_of(model.params))
        save_params(directory / CHECKPOINTS, model.config, model.params, mesh=mesh)
        store_tokenizer(model.tokenizer, directory / TOKENIZER)
    return model.config


@dataclass(frozen=True)
class _Export:
    out: Path
    directory: Path
    dtype: hf.Dtype
    max_file_bytes: int
    status: LateStatus

    def write(
        self,
        config: GPT2Config,
        name: str,
        open_tokenizer: Callable[[], Tokenizer],
        read: Callable[[hf.HFLayout], Iterable[np.ndarray]],
    ) -> Exported:
        """Write all files of a model."""
        num_bytes = hf.model_bytes(config, self.dtype)
        _check_space(self.out, self.directory, num_bytes)

        def read_and_tell(layout: hf.HFLayout) -> Iterable[np.ndarray]:
            self.status.update(f"writing {'.'.join(layout.path)} ({num_bytes / 1e9:.1f} GB in all)")
            return read(layout)

        notes = []
        try:
            tokenizer = open_tokenizer()
        except (OSError, ValueError, ImportError) as error:
            tokenizer = None
            notes.append(f"Tokenizer files were not written: {error}")
        files = hf.write_model(
            self.directory,
            config,
            read_and_tell,
            dtype=self.dtype,
            end_of_text=None if tokenizer is None else tokenizer.eot,
            max_file_bytes=self.max_file_bytes,
        )
        if tokenizer is not None:
            hf.write_hf_tokenizer(self.directory, tokenizer, config)
        if config.document_end_id is not None:
            notes.append(
                f"The model keeps attention within documents (document_end_id="
                f"{config.document_end_id}), Hugging Face's does not: logits agree as long as a "
                "text does not hold that token after its beginning."
            )
        return Exported(
            config=config, name=name, num_bytes=num_bytes, num_files=len(files), notes=notes
        )


def _layers_in(model: StoredModel) -> Callable[[hf.HFLayout], Iterable[np.ndarray]]:
    """How to read a parameter of a checkpoint as Hugging Face's arrays."""
    _, abstract = graph_and_abstract_params(model.config)

    def read(layout: hf.HFLayout) -> Iterable[np.ndarray]:
        leaf: Any = abstract
        for key in layout.path:
            leaf = leaf[key]
        array = model.read(layout.path, leaf)
        return array if layout.stacked else [array]

    return read


def _local(out: str | Path) -> Path:
    if "://" in str(out):
        raise ValueError(f"{out} is no local path; write to a local disk and copy the result.")
    return Path(out).expanduser()


@contextlib.contextmanager
def _in_the_making(out: Path) -> Generator[Path]:
    """A directory that gets the name `out` at the end of the block, and is removed after errors."""
    with PartialDirectory(out) as partial:
        try:
            shutil.rmtree(partial.content)  # what an attempt that was killed left
            partial.content.mkdir()
            yield partial.content
            partial.publish(partial.content)
        except BaseException as error:
            partial.discard()
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(out)  # a full disk: the write does not know its file
            raise


def _check_space(out: Path, directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes + _OTHER_BYTES:
        raise OSError(
            f"{out} needs {num_bytes / 1e9:.3g} GB, but its disk has {free / 1e9:.3g} GB left; "
            "make room or choose another disk."
        )
