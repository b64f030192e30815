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
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Integer

from maxmars.checkpoint import Checkpoint, candidates, find, load_params, read
from maxmars.config import GPT2Config, MeshConfig, ModelConfig, ModuleConfig, from_dict
from maxmars.config.checks import require
from maxmars.config.errors import EXTERNAL_ERRORS, about, in_words
from maxmars.config.mesh import check_mesh_divides_model
from maxmars.config.user_code import Source
from maxmars.data import tokenizer as tokenizers
from maxmars.data.tokenizer import GPT2Tokenizer, Tokenizer
from maxmars.distributed import processes, sharding
from maxmars.distributed.files import (
    Workdir,
    naming,
    read_json,
    require_access,
    resolve,
)
from maxmars.distributed.progress import Progress
from maxmars.distributed.recorded_code import recorded_code
from maxmars.distributed.workdir import (
    CHECKPOINTS,
    CONFIG,
    EVAL_SOURCE,
    MODEL_SOURCE,
    TOKENIZER,
)
from maxmars.model import hub, huggingface
from maxmars.model.language_model import LanguageModel, make_model
from maxmars.model.parameters import Parameters, abstract_module

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


def load(
    path: str | Path | RunTarget | HFTarget,
    *,
    mesh: Mesh | None = None,
) -> TrainedModel:
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
    target = path if isinstance(path, RunTarget | HFTarget) else find_target(path)
    if isinstance(target, RunTarget):
        return _load_from_run(target, mesh)
    config = target.config()
    # `tensor` must divide the vocabulary, so pad it; padding changes no result.
    multiple = math.lcm(config.vocab_pad_multiple, mesh.shape["tensor"])
    config = dataclasses.replace(config, vocab_pad_multiple=multiple)
    huggingface.open_weights(target.directory, config)  # find errors before anything is loaded
    return TrainedModel(
        config=config,
        tokenizer=target.tokenizer(config),
        params=huggingface.load_params(target.directory, config, _abstract_params(config, mesh)),
        mesh=mesh,
        name=target.name,
        origin=target.origin,
    )


def _load_from_run(target: RunTarget, mesh: Mesh) -> TrainedModel:
    for candidate in candidates(target.checkpoints, target.step):
        with candidate as stored:
            config = target.config_to_run(stored)
            tokenizer = target.tokenizer(config)
            return TrainedModel(
                config=config,
                params=load_params(stored, _abstract_params(config, mesh)),
                tokenizer=tokenizer,
                mesh=mesh,
                name=target.name(stored),
                origin=str(stored.path),
                digest=stored.digest,
            )
    raise AssertionError("unreachable")


def _abstract_params(config: ModelConfig, mesh: Mesh) -> Any:
    check_mesh_divides_model(config, mesh.shape)
    return Parameters(config, mesh).on_mesh


# --- what a path means ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunTarget:
    """A run, or one of its checkpoints."""

    checkpoints: Workdir
    step: int | None
    """None is the newest sound checkpoint."""

    @property
    def workdir(self) -> Workdir:
        return self.checkpoints.parent

    def config(self) -> ModelConfig:
        """The configuration of the model, to use it here; see `config_to_run`."""
        return self.config_to_run(read(self.checkpoints, self.step))

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The tokenizer that the run was trained with.

        Raises:
          FileNotFoundError: the run's directory has none.
          ValueError: it has tokens that a model of this configuration does not know.
          ValueError, ImportError, OSError: see `maxmars.data.tokenizer.load`.
        """
        directory = self.workdir / TOKENIZER
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{directory} is missing: a run keeps the tokenizer of its data there. Copy it "
                "from where the run was trained, or start its `maxmars train` command again, which "
                "writes it anew; other programs' tokens name it by --data.tokenizer, and data of "
                "your own by GrainConfig(tokenizer='byte') or 'gpt2'."
            )
        return _that_fits(tokenizers.load(directory), config, directory)

    def config_to_run(self, stored: Checkpoint) -> ModelConfig:
        """The configuration of the model in a checkpoint, to use it here.

        A module of the user's own is made by the copy of its file that the run keeps.

        Raises:
          ValueError: see `recorded_code`.
        """
        config: Any = stored.config.model
        if isinstance(config, GPT2Config):
            # It may run on other devices than it was trained on.
            return dataclasses.replace(config, attention="auto")
        return recorded_code(config, self.workdir, MODEL_SOURCE)

    def own_evaluations(self) -> tuple[Source, ...]:
        """The functions of the user's own that the run was evaluated by when it last started, in
        the copies of their files that the run keeps.

        Raises:
          ValueError: see `recorded_code`.
        """
        record = read_json(self.workdir / CONFIG)
        with about(self.workdir / CONFIG):
            own = from_dict(record["eval"]).own if record else None
        return recorded_code(own or (), self.workdir, EVAL_SOURCE)

    def name(self, stored: Checkpoint) -> str:
        """Name of the model in a checkpoint, for people."""
        evaluated = ", evaluation parameters" if stored.has_evaluation_params else ""
        return f"{self.workdir.name}, step {stored.step}{evaluated}"


def _that_fits(tokenizer: Tokenizer, config: ModelConfig, directory: Workdir) -> Tokenizer:
    require(
        tokenizer.num_text_ids <= config.vocab_size,
        f"the tokenizer in {directory} has {tokenizer.num_text_ids} tokens, but the model only "
        f"{config.vocab_size}; put the one that it was trained with there.",
    )
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class HFTarget:
    """A Hugging Face directory, or a model on the hub that was fetched."""

    directory: Path
    snapshot: hub.Snapshot | None = None
    """Where on the hub it is; None for a directory of the user's."""

    @property
    def name(self) -> str:
        """Name of the model, for people."""
        return self.directory.name if self.snapshot is None else self.snapshot.name

    @property
    def origin(self) -> str:
        """The target that means the same files."""
        return str(self.directory) if self.snapshot is None else self.snapshot.origin

    def config(self) -> GPT2Config:
        """The configuration of the model, by its `config.json`."""
        return huggingface.read_config(self.directory)

    def own_evaluations(self) -> tuple[Source, ...]:
        """None: there is no run."""
        return ()

    def tokenizer(self, config: ModelConfig) -> Tokenizer:
        """The directory's own tokenizer.

        Where there is none, and the vocabulary has the size of GPT-2's, or that rounded up as in
        nanoGPT (50,304), it is GPT-2's; a note on stderr says so.

        Raises:
          FileNotFoundError: there is none, and the vocabulary is not GPT-2's.
          ValueError: it has tokens that the model does not know.
          ImportError, OSError: see `maxmars.data.tokenizer.load`.
        """
        try:
            tokenizer = tokenizers.load(self.directory)
        except FileNotFoundError:
            padding = config.vocab_size - GPT2Tokenizer.vocab_size
            if not 0 <= padding < _MOST_PADDING:
                raise
            tokenizer = GPT2Tokenizer()
            if processes.is_primary():
                print(
                    f"{self.origin} has no tokenizer files; GPT-2's tokenizer is used, since the "
                    f"vocabulary has its size{f' and {padding} rows of padding' * bool(padding)}.",
                    file=sys.stderr,
                )
        return _that_fits(tokenizer, config, self.directory)


def find_target(path: str | Path) -> RunTarget | HFTarget:
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
        return HFTarget(directory=snapshot.directory, snapshot=snapshot)
    directory = resolve(path)
    require_access(directory)
    if not directory.exists():
        raise FileNotFoundError(
            f"{path} does not exist; name the working directory of a run, such as "
            "runs/quickstart, one of its checkpoints, a Hugging Face directory, or a model on the "
            "hub (hf:OWNER/NAME)."
        )
    if (checkpoints_and_step := find(directory)) is not None:
        checkpoints, step = checkpoints_and_step
        return RunTarget(checkpoints=resolve(checkpoints), step=step)
    if isinstance(directory, Path) and huggingface.is_hf_directory(directory):
        return HFTarget(directory=directory)
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
    origin: Checkpoint | HFTarget
    """Where it was read from."""


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

    def write(
        config: ModelConfig, name: str, model: huggingface.HFModel, origin: Checkpoint | HFTarget
    ) -> Exported:
        num_bytes, notes, tokenizer = model.num_bytes(dtype), [], None

        def arrays_and_progress() -> Iterator[np.ndarray]:
            for array_name, array in zip(model.shapes, model.arrays, strict=True):
                status.update(f"writing {array_name} ({num_bytes / 1e9:.1f} GB in all)")
                yield array

        try:
            tokenizer = target.tokenizer(config)
        except EXTERNAL_ERRORS as error:
            notes.append(f"Tokenizer files were not written: {in_words(error)}")
        files = huggingface.write_model(
            directory,
            dataclasses.replace(model, arrays=arrays_and_progress()),
            dtype=dtype,
            ends_of_text=None if tokenizer is None else (tokenizer.bos, tokenizer.eot),
            max_file_bytes=max_file_bytes,
        )
        if tokenizer is not None:
            tokenizers.save(tokenizer, directory, max_seq_len=config.max_seq_len)
        num_parameters = sum(map(math.prod, model.shapes.values()))
        if isinstance(config, GPT2Config):  # biases of zeros are none
            num_parameters = Parameters(dataclasses.replace(config, vocab_pad_multiple=1)).count
        exported = Exported(
            name=name,
            architecture=model.architecture,
            num_parameters=num_parameters,
            num_bytes=num_bytes,
            num_files=len(files),
            notes=notes,
            config=config,
            dtype=dtype,
            origin=origin,
        )
        status.update("adding files")
        add_files(directory, exported)
        return exported

    with _in_the_making(out) as directory, Progress(stderr=True) as status:
        if isinstance(target, HFTarget):
            config = target.config()
            weights = huggingface.open_weights(target.directory, config)
            model = huggingface.gpt2_model(
                config, lambda layout: (weights[name].read() for name in layout.names)
            )
            return write(config, target.name, model, target)
        for candidate in candidates(target.checkpoints, target.step):
            with candidate as stored:
                config: Any = stored.config.model
                if isinstance(config, GPT2Config):
                    read_layout = functools.partial(_read_layout, stored)
                    model = huggingface.gpt2_model(config, read_layout)
                else:
                    config: Any = target.config_to_run(stored)
                    model = _exported_by_itself(config, stored)
                return write(config, target.name(stored), model, stored)
    raise AssertionError("unreachable")


def _exported_by_itself(config: ModuleConfig, stored: Checkpoint) -> huggingface.HFModel:
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
    params = load_params(stored, _abstract_params(config, mesh))
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
    out = Path(out).expanduser()
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
