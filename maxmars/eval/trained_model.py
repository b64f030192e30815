"""A trained model, wherever it is: a run, one checkpoint, or a Hugging Face model.

`load` reads it, and `export_model` writes it as a Hugging Face directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Integer

from maxmars.checkpoint import Checkpoint, find, first_sound, load_params, read
from maxmars.config import (
    DataConfig,
    EvalConfig,
    GPT2Config,
    MeshConfig,
    ModelConfig,
    from_dict,
)
from maxmars.config.checks import require
from maxmars.config.errors import EXTERNAL_ERRORS, about, in_words
from maxmars.config.mesh import check_mesh_divides_model
from maxmars.data import tokenizer as tokenizers
from maxmars.data.tokenizer import GPT2Tokenizer, Tokenizer
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import (
    is_remote,
    naming,
    read_json,
    resolve,
)
from maxmars.distributed.progress import Progress
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.workdir import CHECKPOINTS, CONFIG, MODEL_SOURCE, SOURCES, TOKENIZER
from maxmars.model import hub, huggingface
from maxmars.model.language_model import LanguageModel, make_model
from maxmars.model.parameters import Parameters, abstract_module

Result = TypeVar("Result")
_MOST_PADDING = 256  # rows of a vocabulary are rounded up to a multiple of 64, 128 or 256


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that `load` read."""

    config: ModelConfig
    params: Any
    """Nested dict of arrays, on the mesh, in the shardings of training. Of a run with `ema_decay`,
    or whose optimizer names them, those that are evaluated, and not those that are trained."""
    tokenizer: Tokenizer
    mesh: Mesh
    name: str
    """For people: `quickstart, step 500`, with `, evaluation parameters` where `params` are not
    those that are trained; the name of a Hugging Face directory, or OWNER/NAME@ and the first
    digits of the commit of a model on the hub."""
    origin: str = ""
    """The checkpoint or Hugging Face directory that was read, or `hf:OWNER/NAME@COMMIT`."""
    digest: str | None = None
    """Of the whole state in the checkpoint; None for a Hugging Face directory."""

    @property
    def start(self) -> int:
        """Id of the token that an empty prompt means. In training here, a text comes after the end
        of another, whatever token its tokenizer names."""
        return self.tokenizer.eot if self.digest is not None else self.tokenizer.bos

    @property
    def model(self) -> LanguageModel:
        """The model with these parameters: int32 tokens [B, T] to logits [B, T, V]."""
        return make_model(self.config, self.params)

    def logits(
        self, tokens: Integer[np.ndarray | Array, "B T"]
    ) -> Float[np.ndarray, "B T vocab_size"]:
        """Logits of the next token at every position, in float32 at least.

        Compiled once for each shape, where `model` compiles at each call. The rows, of any number,
        are split over the mesh; every process of it calls with the same tokens and gets all logits.

        Raises:
          ValueError: the rows are longer than `max_seq_len`.
        """
        shards = sharding.batch_shards(self.mesh)
        padding = -len(tokens) % shards
        rows = np.pad(np.asarray(tokens, np.int32), ((0, padding), (0, 0)))
        with jax.set_mesh(self.mesh):
            logits = _logits(self.params, rows, config=self.config)
            return np.asarray(logits)[: len(tokens), :, : self.config.vocab_size]


@functools.partial(jax.jit, static_argnames="config")
def _logits(
    params: Any, tokens: Int[Array, "B T"], *, config: ModelConfig
) -> Float[Array, "B T V"]:
    tokens = sharding.constrain(tokens, "batch", "length")
    logits = make_model(config, params)(tokens)
    return sharding.constrain(logits, None, None, None)  # each process has all of them


def load(path: str | Path | Target, *, mesh: Mesh | None = None) -> TrainedModel:
    """Read a trained model: its parameters, configuration and tokenizer.

    Args:
      path: working directory of a run (its newest sound checkpoint is read), its `checkpoints`
        directory, one step in there, all of them also on `gs://`; a Hugging Face GPT-2 directory
        with safetensors; `hf:OWNER/NAME[@REVISION]` for one on the hub, which is fetched if need
        be; or what `find_target` found.
      mesh: the parameters go here, in the shardings of training. It may be of any size and of any
        number of processes, all of which call. None is the first device of this process.

    Raises:
      FileNotFoundError: there is no model at this path, or no tokenizer.
      ValueError: the model is damaged or no GPT-2, its code is not the recorded one, or the mesh
        does not divide it.
      ImportError: the tokenizer's library (extra `hf`) is not installed.
      OSError: a model on the hub cannot be fetched; see `hub.fetch`.
    """
    mesh = mesh or sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    target = path if isinstance(path, Target) else find_target(path)

    def read_model(stored: Checkpoint | None) -> TrainedModel:
        config = target.config(stored)
        if stored is None:
            # `tensor` must divide the vocabulary, so pad it; padding changes no result.
            multiple = math.lcm(config.vocab_pad_multiple, mesh.shape["tensor"])
            config = dataclasses.replace(config, vocab_pad_multiple=multiple)
        return TrainedModel(
            config=config,
            tokenizer=target.tokenizer(config),
            params=target.params(stored, config, _abstract_params(config, mesh)),
            mesh=mesh,
            name=target.name(stored),
            origin=target.origin(stored),
            digest=None if stored is None else stored.digest,
        )

    return target.first_sound(read_model)


# --- what a path means ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a trained model is: a run, one of its checkpoints, or a Hugging Face directory.

    A run may have damaged checkpoints, which only reading finds; `first_sound` leaves them out.
    """

    path: str
    """As it was given to `find_target`."""
    directory: epath.Path
    """Working directory of the run, or directory of the Hugging Face model."""
    checkpoints: epath.Path | None = None
    """Directory of the run's checkpoints; None of a Hugging Face model."""
    step: int | None = None
    """The checkpoint; None is the newest sound one."""
    snapshot: hub.Snapshot | None = None
    """Where on the hub the model is; None of others."""

    def first_sound(self, use: Callable[[Checkpoint | None], Result]) -> Result:
        """What `use` returns for the newest checkpoint in which it finds no damage, see
        `maxmars.checkpoint.first_sound`; or for None, of a Hugging Face model."""
        if self.checkpoints is None:
            return use(None)
        return first_sound(self.checkpoints, lambda stored, skipped: use(stored), self.step)

    def recorded_config(self, stored: Checkpoint | None = None) -> Any:
        """The configuration of the model (`ModelConfig`) as its files say it; no code runs.

        Args:
          stored: one of its checkpoints; None reads the record of the newest sound one.
        """
        if self.checkpoints is None:
            return huggingface.read_config(Path(self.directory))
        return (stored or read(self.checkpoints, self.step)).config.model

    def config(self, stored: Checkpoint | None = None) -> Any:
        """The configuration to use the model here, whatever the devices; see `recorded_config`.

        A module of the user's own is made by the copy of its file that the run keeps.

        Raises:
          ValueError: see `recorded_code`.
        """
        config = self.recorded_config(stored)
        if isinstance(config, GPT2Config):
            return dataclasses.replace(config, attention="auto")
        return recorded_code(config, self.directory, MODEL_SOURCE)

    def params(self, stored: Checkpoint | None, config: Any, abstract: Any) -> Any:
        """The parameters of a checkpoint or of the model, on devices as `abstract` says."""
        if stored is None:
            return huggingface.load_params(Path(self.directory), config, abstract)
        return load_params(stored, abstract)

    def name(self, stored: Checkpoint | None) -> str:
        """Name of the model in a checkpoint, for people."""
        if stored is None:
            return self.directory.name if self.snapshot is None else self.snapshot.name
        evaluated = ", evaluation parameters" if stored.has_evaluation_params else ""
        return f"{self.directory.name}, step {stored.step}{evaluated}"

    def origin(self, stored: Checkpoint | None) -> str:
        """The target that means these files alone."""
        if stored is None:
            return str(self.directory) if self.snapshot is None else self.snapshot.origin
        return str(stored.path)

    @property
    def tokenizer_place(self) -> epath.Path:
        """The directory of the tokenizer's files."""
        return self.directory if self.checkpoints is None else self.directory / TOKENIZER

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer that the model was trained with.

        Where a Hugging Face directory has none, and the vocabulary has the size of GPT-2's, or that
        rounded up as in nanoGPT (50,304), it is GPT-2's; a note on stderr says so.

        Raises:
          FileNotFoundError: there is none, and the vocabulary is not GPT-2's.
          ValueError: it has tokens that a model of this configuration does not know.
          ValueError, ImportError, OSError: see `maxmars.data.tokenizer.load`.
        """
        place, is_run = self.tokenizer_place, self.checkpoints is not None
        if is_run and not place.is_dir():
            raise FileNotFoundError(
                f"{place} is missing: a run keeps the tokenizer of its data there. Copy it "
                "from where the run was trained, or start its `maxmars train` command again, which "
                "writes it anew; other programs' tokens name it by --data.tokenizer, and data of "
                "your own by GrainConfig(tokenizer='byte') or 'gpt2'."
            )
        try:
            tokenizer = tokenizers.load(place)
        except FileNotFoundError:
            padding = config.vocab_size - GPT2Tokenizer.vocab_size
            if is_run or not 0 <= padding < _MOST_PADDING:
                raise
            tokenizer = GPT2Tokenizer()
            if processes.is_primary():
                rows = f" and {padding} rows of padding" if padding else ""
                print(
                    f"{self.origin(None)} has no tokenizer files; GPT-2's tokenizer is used, since "
                    f"the vocabulary has its size{rows}.",
                    file=sys.stderr,
                )
        require(
            tokenizer.num_text_ids <= config.vocab_size,
            f"the tokenizer in {place} has {tokenizer.num_text_ids} tokens, but the model only "
            f"{config.vocab_size}; put the one that it was trained with there.",
        )
        return tokenizer

    def data(self) -> DataConfig | None:
        """The data that a run was trained on, with functions of the user's own in the copies of
        their files that it keeps; a Hugging Face model has none.

        Raises:
          ValueError: see `recorded_code`.
        """
        if self.checkpoints is None:
            return None
        return recorded_code(read(self.checkpoints, self.step).config.data, self.directory, SOURCES)

    def evaluation(self) -> EvalConfig:
        """How a run was evaluated when it last started, as recorded: its functions may run only as
        `recorded_code` finds them. Without the record, that number of windows of the checkpoint;
        the defaults of another model."""
        if self.checkpoints is None:
            return EvalConfig()
        if (record := read_json(self.directory / CONFIG)) is None:
            return EvalConfig(num_windows=read(self.checkpoints, self.step).config.eval.num_windows)
        with about(self.directory / CONFIG):
            return from_dict(record["eval"])


def _abstract_params(config: ModelConfig, mesh: Mesh) -> Any:
    check_mesh_divides_model(config, mesh.shape)
    return Parameters(config, mesh).sharded


def find_target(path: str | Path) -> Target:
    """Find out whether a path is a run, a checkpoint or a Hugging Face directory; fetch `hf:...`.

    Args:
      path: see `load`.

    Raises:
      FileNotFoundError: there is nothing, or a run that has not saved a checkpoint.
      ValueError: there is something else.
      ImportError, OSError: it is on `gs://`, see `files.require_access`; or on the hub, see
        `hub.fetch`.
    """
    if hub.is_on_hub(path):
        snapshot = hub.fetch(path)
        return Target(path=str(path), directory=resolve(snapshot.directory), snapshot=snapshot)
    directory = resolve(path)
    if not directory.exists():
        raise FileNotFoundError(
            f"{path} does not exist; name the working directory of a run, such as "
            "runs/quickstart, one of its checkpoints, a Hugging Face directory, or a model on the "
            "hub (hf:OWNER/NAME)."
        )
    if (checkpoints_and_step := find(directory)) is not None:
        checkpoints, step = checkpoints_and_step
        run = checkpoints.parent
        return Target(path=str(path), directory=run, checkpoints=checkpoints, step=step)
    if not is_remote(directory) and huggingface.is_hf_directory(Path(directory)):
        return Target(path=str(path), directory=directory)
    if (directory / CHECKPOINTS).is_dir() or directory.name == CHECKPOINTS:
        raise FileNotFoundError(
            f"{path} holds no checkpoint yet; a run writes the first after checkpoint.every steps "
            "and one at its end."
        )
    raise ValueError(
        f"{path} is neither a run (it has no directory {CHECKPOINTS}), nor a checkpoint, nor a "
        "Hugging Face directory on a disk (it has no model.safetensors, and no config.json with a "
        "model_type)."
    )


# --- export ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of `export_model`."""

    name: str
    architecture: str
    """The class of `transformers` that loads it."""
    num_parameters: int
    """Number of parameters, vocabulary padding left out."""
    num_bytes: int
    """Size of the weights."""
    num_files: int
    """Of weights."""
    notes: list[str]
    """Differences from the model, in sentences."""
    config: ModelConfig
    dtype: huggingface.Dtype
    """Type of the weights."""
    target: Target
    checkpoint: Checkpoint | None
    """The checkpoint that was read; None of a Hugging Face model."""


def export_model(
    path: str | Path,
    out: str | Path,
    *,
    dtype: huggingface.Dtype = "float32",
    max_file_bytes: int = huggingface.MAX_FILE_BYTES,
    add_files: Callable[[Path, Exported], None] = lambda directory, exported: None,
) -> Exported:
    """Write a model as a Hugging Face directory.

    `out` appears complete or not at all. Of a GPT-2 the weights of one file are in memory at once,
    vocabulary padding is left out, and biases that it lacks are written as zeros. A module of the
    user's own says by its `export` what it is in Hugging Face's terms.

    Args:
      path: see `load`.
      out: directory to make.
      dtype: type of the weights in it.
      max_file_bytes: the weights are split into files of this size at most.
      add_files: called with the complete directory before it gets the name `out`; may write more
        files there, such as the model card of `maxmars.train.card`.

    Raises:
      FileExistsError: `out` exists.
      FileNotFoundError, ValueError: see `load`; a tokenizer is not necessary.
      OSError: the disk is full or cannot be written to.
    """
    target = find_target(path)
    with _in_the_making(out) as directory, Progress(stderr=True) as status:
        exported = target.first_sound(
            lambda stored: _write(directory, target, stored, dtype, max_file_bytes, status)
        )
        status.update("adding files")
        add_files(directory, exported)
        return exported


def _write(
    directory: Path,
    target: Target,
    stored: Checkpoint | None,
    dtype: huggingface.Dtype,
    max_file_bytes: int,
    status: Progress,
) -> Exported:
    """Write weights, configuration and tokenizer of a checkpoint, or of a Hugging Face model."""
    config = target.config(stored)
    model = _hf_model(target, stored, config)
    num_bytes, notes, tokenizer = model.num_bytes(dtype), [], None
    try:
        tokenizer = target.tokenizer(config)
    except EXTERNAL_ERRORS as error:
        notes.append(f"Tokenizer files were not written: {in_words(error)}")
    files = huggingface.write_model(
        directory,
        dataclasses.replace(model, arrays=_showing(model, num_bytes, status)),
        dtype=dtype,
        ends_of_text=None if tokenizer is None else (tokenizer.bos, tokenizer.eot),
        max_file_bytes=max_file_bytes,
    )
    if tokenizer is not None:
        tokenizers.save(tokenizer, directory, max_seq_len=config.max_seq_len)
    num_parameters = sum(map(math.prod, model.shapes.values()))
    if isinstance(config, GPT2Config):  # biases of zeros are none
        num_parameters = Parameters(dataclasses.replace(config, vocab_pad_multiple=1)).count
    return Exported(
        name=target.name(stored),
        architecture=model.architecture,
        num_parameters=num_parameters,
        num_bytes=num_bytes,
        num_files=len(files),
        notes=notes,
        config=config,
        dtype=dtype,
        target=target,
        checkpoint=stored,
    )


def _hf_model(target: Target, stored: Checkpoint | None, config: Any) -> huggingface.HFModel:
    """The model in Hugging Face's terms; its arrays are read one after another."""
    if stored is None:
        weights = huggingface.open_weights(Path(target.directory), config)
        return huggingface.gpt2_model(
            config, lambda layout: (weights[name].read() for name in layout.names)
        )
    if isinstance(config, GPT2Config):
        return huggingface.gpt2_model(config, functools.partial(_read_layout, stored))
    return _exported_by_itself(target, stored, config)


def _showing(model: huggingface.HFModel, num_bytes: int, status: Progress) -> Iterator[np.ndarray]:
    """The arrays of a model, each told to `status` before it is written."""
    for name, array in zip(model.shapes, model.arrays, strict=True):
        status.update(f"writing {name} ({num_bytes / 1e9:.1f} GB in all)")
        yield array


def _exported_by_itself(target: Target, stored: Checkpoint, config: Any) -> huggingface.HFModel:
    """What the `export` of a module of the user's own returns for the parameters in a checkpoint.

    Raises:
      ValueError: it has none, or returns something else.
    """
    what = f"{stored.path} holds the model of {config.make}"
    if not hasattr(abstract_module(config), "export"):
        raise ValueError(
            f"{what}, which has no method export, and is no GPT-2: export cannot know which model "
            "of Hugging Face's it is; add the method, or take the arrays of `load(...).params` in "
            "Python to another format."
        )
    mesh = sharding.make_mesh(MeshConfig(), jax.local_devices()[:1])
    params = target.params(stored, config, _abstract_params(config, mesh))
    match make_model(config, params).module.export():
        case {"architectures": [str(), *_]} as fields, {**arrays} if arrays:
            shapes = {name: np.shape(array) for name, array in arrays.items()}
            return huggingface.HFModel(
                fields=fields, shapes=shapes, arrays=map(np.asarray, arrays.values())
            )
    raise ValueError(
        f"{what}, whose export must return the fields of config.json, a dict with architectures, "
        "and a dict of arrays by name."
    )


def _read_layout(stored: Checkpoint, layout: huggingface.HFLayout) -> Iterable[np.ndarray]:
    """One parameter of a checkpoint, as Hugging Face's arrays."""
    leaf = flatten_dict(Parameters(stored.config.model).abstract)[layout.path]
    array = np.asarray(jax.tree.leaves(load_params(stored, unflatten_dict({layout.path: leaf})))[0])
    return array if layout.stacked else [array]


@contextlib.contextmanager
def _in_the_making(out: str | Path) -> Generator[Path]:
    """A directory that gets the name `out` at the end of the block, and is removed after errors."""
    if "://" in str(out):
        raise ValueError(f"{out} is no local path; write to a local disk and copy the result.")
    out = Path(resolve(out))
    if out.exists():
        raise FileExistsError(f"{out} exists; delete it or choose another name.")
    directory = out.with_name(f".{out.name}.partial")
    shutil.rmtree(directory, ignore_errors=True)  # left by an attempt that was killed
    directory.mkdir(parents=True)
    try:
        with naming(out):
            yield directory
            for path in (*directory.rglob("*"), directory):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)  # the name must not survive a power cut without the contents
                os.close(descriptor)
            directory.rename(out)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
